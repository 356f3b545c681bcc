"""After a slot was lost: a tombstone for every key that the new snapshot did not find again.

The topic then held records before the table got its plan; the plan's ends say where these stop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.kafka.publisher import Publisher, tombstones
from airflow_bottledwater.kafka.scan import scan
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.publish.delivery import Channel
from airflow_bottledwater.state.records import PinnedTable, sweep_key

log = logging.getLogger(__name__)


def sweep(channel: Channel, pinned: PinnedTable, ends: Sequence[int]) -> int:
    """Publish the tombstones and the record that it is done, in one transaction; returns how many.

    :param ends: per partition, the topic's end when the plan was made.
    :raises TakenOver: another job has claimed the slot.
    """
    while True:
        try:
            channel.open()
            config = channel.pipeline.kafka
            latest: dict[bytes, tuple[int, int, bool]] = {}
            for message in scan(config, pinned.topic, Topics(config).ends(pinned.topic, pinned.partitions)):
                latest[message.key()] = (message.partition(), message.offset(), message.value() is not None)
            stale = [(partition, key) for key, (partition, at, live) in latest.items() if live and at < ends[partition]]
            records = tombstones(channel.index[pinned.topic], stale)

            def parts(publisher: Publisher) -> None:
                publisher.produce(records)  # noqa: B023  (called before the next round)

            channel.send(parts, {sweep_key(pinned.table.oid): {"ends": list(ends), "done": True}})
            log.info("Swept %r: %d keys that the source no longer has.", pinned.topic, len(stale))
            return len(stale)
        except NewProducerNeeded as error:
            channel.close()
            channel.backoff.wait(str(error))
