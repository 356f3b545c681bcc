"""Reading a whole topic once, in blocks that compiled code looks at: a Python object per record takes longer than its
transfer.

Structures and functions: rdkafka.h.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError, KafkaException

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.compiled import compiled, memcpy
from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.clients import Heard, errors, hear, passes, reader_config, unknown_property
from airflow_bottledwater.kafka.hashes import hash_keys

#: records of a block at most
_BLOCK = 10_000
#: milliseconds to wait until a block is full: the last one of a topic never is
_WAIT_MS = 100
#: seconds without a record after which it is said what is waited for
_SILENCE = 10.0
_PARTITION_EOF = KafkaError._PARTITION_EOF


@compiled
def _copy_messages(addresses, count, messages):
    size = messages.itemsize
    for i in range(count):
        memcpy(messages.ctypes.data + i * size, addresses[i], size)


@compiled
def _copy_keys(messages, keys):
    at = 0
    for i in range(messages.size):
        length = messages[i].key_len
        memcpy(keys.ctypes.data + at, messages[i].key, length)
        at += length


@compiled
def _destroy(addresses, count):
    for i in range(count):
        rd.message_destroy(addresses[i])


def warm_up() -> None:
    """Compile what reads blocks; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("topic reader", _read_nothing)


def _read_nothing() -> None:
    addresses, messages = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=rd.MESSAGE)
    _copy_messages(addresses, 0, messages)
    _destroy(addresses, 0)
    assert not len(RecordBlock(messages, addresses).hashes)
    KeySet(())


class RecordBlock:
    """Some committed records of a topic, in order per partition. It is valid until the next one is asked for.

    :ivar messages: ``rd_kafka_message_t`` (:data:`~airflow_bottledwater.kafka.librdkafka.MESSAGE`) of each.
    :ivar addresses: where librdkafka has them.
    """

    def __init__(self, messages: Rows, addresses: npt.NDArray[np.int64]) -> None:
        self.messages, self.addresses = messages, addresses

    def __len__(self) -> int:
        return len(self.messages)

    @cached_property
    def key_ends(self) -> npt.NDArray[np.int64]:
        """Where each record's key ends in :attr:`keys`; it begins where the one before ends."""
        return np.cumsum(self.messages["key_len"])

    @cached_property
    def keys(self) -> npt.NDArray[np.uint8]:
        """The bytes of all keys."""
        copied = np.empty(int(self.key_ends[-1]) + 1 if len(self) else 1, dtype=np.uint8)
        _copy_keys(self.messages, copied)
        return copied

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """128 bits of each record's key, in two columns."""
        return hash_keys(self.keys, self.key_ends)

    def key(self, i: int) -> bytes:
        """The key of a record; empty if it has none."""
        end = int(self.key_ends[i])
        return self.keys[end - int(self.messages[i]["key_len"]) : end].tobytes()

    def value(self, i: int) -> bytes | None:
        """The value of a record; None of a tombstone."""
        message = self.messages[i]
        return ctypes.string_at(int(message["payload"]), int(message["len"])) if message["payload"] else None

    def having(self, keys: KeySet) -> Iterator[int]:
        """The records that have one of these keys."""
        hashes = self.hashes[:, 0]
        near = keys.hashes[np.searchsorted(keys.hashes[:-1], hashes)]
        for i in np.flatnonzero(near == hashes).tolist():
            if self.key(i) in keys.keys:
                yield i

    def header(self, i: int, name: str) -> bytes | None:
        """The last header of this name of a record."""
        headers, value, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        if rd.message_headers(int(self.addresses[i]), ctypes.byref(headers)) != 0:
            return None
        if rd.header_get_last(headers, name.encode(), ctypes.byref(value), ctypes.byref(size)) != 0:
            return None
        return ctypes.string_at(value, size.value) if value else None


class KeySet:
    """Keys to look for in blocks.

    :ivar hashes: of these keys, in order: a block is compared with a million of them as fast as with a few.
    """

    def __init__(self, keys: Collection[bytes]) -> None:
        self.keys = frozenset(keys)
        ends = np.cumsum([len(key) for key in self.keys] or [0], dtype=np.int64)
        self.hashes = np.sort(hash_keys(np.frombuffer(b"".join(self.keys) + b"\0", dtype=np.uint8), ends)[:, 0])


def blocks(
    config: Mapping[str, str],
    topic: str,
    ends: Sequence[int],
    backoff: Backoff,
    *,
    start: Sequence[int] = (),
    size: int = _BLOCK,
) -> Iterator[RecordBlock]:
    """The committed records of a topic below these offsets. A block is empty while none arrive, so that whoever reads
    can end.

    :param ends: per partition, high watermarks.
    :param start: per partition, the offset to begin at; those that it does not have are read from their beginning.
    :param backoff: waits where no records come: the brokers are away, or a transaction is open there, which they end in
        time.
    :param size: records of a block at most; many large ones need memory.
    :raises Outage: it has waited too long.
    :raises CredentialsRefused: they refuse the login, or one side the other's certificate.
    :raises Refused: they deny the topic.
    """
    warm_up()
    begins = dict(enumerate(start))
    places = {p: begins.get(p, 0) for p, end in enumerate(ends) if end > begins.get(p, 0)}
    waited_for = set(places)
    if not waited_for:
        return
    said = Heard()
    failed = rd.error_callback(functools.partial(hear, said))
    consumer = _open(config, topic, places, failed)
    queue = rd.queue_get_consumer(consumer)
    addresses, messages = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=rd.MESSAGE)
    limits = np.array(ends, dtype=np.int64)
    heard = time.monotonic()
    try:
        while waited_for:
            count = max(0, rd.consume_batch_queue(queue, _WAIT_MS, addresses.ctypes.data, size))  # -1: an error
            _copy_messages(addresses, count, messages)
            found = messages[:count]
            try:
                _check(config, found)
                read = found[(found["err"] == 0) | (found["err"] == _PARTITION_EOF)]
                good = (found["err"] == 0) & (found["offset"] < limits[found["partition"]])
                yield RecordBlock(found[good], addresses[:count][good])
                # the offset of a partition's end also counts what is no record: markers, aborted transactions
                after = read["offset"] + (read["err"] == 0)
                waited_for -= set(read["partition"][after >= limits[read["partition"]]].tolist())
            finally:
                _destroy(addresses, count)
            if len(read):
                heard = time.monotonic()
                backoff.over()
            elif time.monotonic() - heard > _SILENCE:
                backoff.wait(said.outage(_waiting(config, topic), config))
    finally:
        rd.queue_destroy(queue)
        rd.consumer_close(consumer)
        rd.destroy(consumer)


def _waiting(config: Mapping[str, str], topic: str) -> str:
    return (
        f"Kafka at {config.get('bootstrap.servers', '?')} gives no more records of topic {topic!r}: a transaction is "
        "open there, or the brokers do not answer"
    )


def _check(config: Mapping[str, str], found: Rows) -> None:
    """:raises BottledWaterError: an error that does not pass."""
    for code in set(found["err"].tolist()) - {0, _PARTITION_EOF}:
        if not passes(error := KafkaError(code)):
            with errors(config):
                raise KafkaException(error)


def _open(config: Mapping[str, str], topic: str, places: Mapping[int, int], failed: Any) -> int:
    """An ``rd_kafka_t`` that reads these partitions, each from an offset on.

    :param failed: see :func:`~airflow_bottledwater.kafka.librdkafka.make_consumer`.
    """
    try:
        consumer = rd.make_consumer(
            {
                # when enough is waiting, librdkafka pauses for a second; whoever reads on has used that up in a tenth
                # of it
                "fetch.queue.backoff.ms": "10",
                "queued.max.messages.kbytes": "16384",
                **reader_config(
                    config,
                    enable_partition_eof="true",
                    isolation_level="read_committed",
                    auto_offset_reset="earliest",
                    # so long a broker keeps the answer back that says that a partition's end is reached
                    fetch_wait_max_ms="50",
                ),
            },
            failed,
        )
    except rd.ConfigRefused as error:
        raise unknown_property(str(error)) from None
    # what is not a record comes by the same queue: a login that was refused, for example
    rd.poll_set_consumer(consumer)
    assigned = rd.topic_partition_list_new(len(places))
    for partition, offset in sorted(places.items()):
        rd.topic_partition_list_add(assigned, topic.encode(), partition)
        rd.topic_partition_list_set_offset(assigned, topic.encode(), partition, offset or rd.BEGINNING)
    code = rd.assign(consumer, assigned)
    rd.topic_partition_list_destroy(assigned)
    assert code == 0, rd.name(code)
    return consumer
