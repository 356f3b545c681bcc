"""How many records, and bytes, librdkafka's queue has room for."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_bottledwater.kafka.clients import unknown_property

#: records of a batch. librdkafka's queue has room for less than two: it has one request to a partition under way, and
#: while a complete batch waits for its answer, its thread asks the socket again and again without a pause
#: (rd_kafka_toppar_producer_serve, src/rdkafka_broker.c). The fewer records there are, the better they fit into the
#: caches of the processor and of malloc
BATCH = 5_000
#: of the bytes of a batch for each partition, of so many at most, and of one batch more
_ROOM, _PARTITIONS = 0.95, 8


def room(config: Mapping[str, str], partitions: int) -> dict[str, str]:
    """The properties that limit librdkafka's queue: to less than two batches, or in bytes, which wide rows fill first,
    to less than one batch more than there are partitions. A single record, however large, has room in it.

    :raises Refused: a property is no number.
    """
    partitions = min(max(partitions, 1), _PARTITIONS)
    try:
        records, size = int(config["batch.num.messages"]), int(config["batch.size"])
        largest = int(config.get("message.max.bytes", 0))
    except ValueError as error:
        raise unknown_property(f"a size is no number: {error}") from None
    return {
        "queue.buffering.max.messages": str(max(BATCH, 2 * records - 1)),
        "queue.buffering.max.kbytes": str(max(largest, int(_ROOM * (partitions + 1) * size)) // 1024 + 1),
    }
