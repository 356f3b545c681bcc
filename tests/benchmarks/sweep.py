"""``sweep``: after a lost slot, keys a second of a topic with two records of most of 2 million keys, and one in ten
that the source no longer has, until all of those are deleted; ``memory`` is what the process grows by.

Reference: the same topic read by the client's own consumer, with a dictionary of all keys.
"""

from __future__ import annotations

import resource
import time

import numpy as np

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import layout
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot.sweep import sweep
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.pinned import pins
from tests.benchmarks.common import Workload, emit, scaled
from tests.support.scan import scan

_KEYS = 2_000_000
_GONE = 10
_BATCH = 100_000
_KEY_BYTES, _VALUE_BYTES = 16, 70


def _records(numbers: np.ndarray, topic: int) -> Records:  # type: ignore[type-arg]
    """Records with the decimal digits of these numbers as keys."""
    table = np.zeros(len(numbers), dtype=layout.RECORD)
    data = np.zeros(len(numbers) * _KEY_BYTES + _VALUE_BYTES, dtype=np.uint8)
    digits = numbers[:, None] // 10 ** np.arange(_KEY_BYTES - 1, -1, -1) % 10
    data[: len(numbers) * _KEY_BYTES] = (digits + 48).astype(np.uint8).reshape(-1)
    table["key"], table["key_length"] = np.arange(len(numbers)) * _KEY_BYTES, _KEY_BYTES
    table["value"], table["value_length"] = len(numbers) * _KEY_BYTES, _VALUE_BYTES
    table["topic"] = topic
    return Records(table, data, 0)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def run(stack: DataStack) -> None:
    """See the module."""
    keys = scaled(_KEYS, 1000)
    source = Workload(stack)
    source.create()
    state = read_state(source.pipeline, source.state_topic)
    assert state.claim is not None
    pinned = next(iter(state.tables.values()))
    session = PublishSession(
        source.pipeline, state.claim, "bench-sweep", pins(state.tables.values()), source.state_topic, Backoff(60)
    )
    session.open()
    number = session.index[pinned.topic]
    for start in range(0, keys, _BATCH):
        session.transact([_records(np.arange(start, min(keys, start + _BATCH)), number)], {})
    admin = Topics(source.pipeline.kafka)
    ends = admin.ends(pinned.topic, pinned.partitions)
    for start in range(0, keys, _BATCH):
        numbers = np.arange(start, min(keys, start + _BATCH))
        session.transact([_records(numbers[numbers % _GONE > 0], number)], {})
    before, started = _peak(), time.monotonic()
    swept = sweep(session, pinned, ends)
    seconds, memory = time.monotonic() - started, _peak() - before
    assert swept == len(range(0, keys, _GONE))
    session.close()
    started, before = time.monotonic(), _peak()
    latest = {m.key(): m.offset() for m in scan(source.pipeline.kafka, pinned.topic, ends)}
    plain = time.monotonic() - started
    emit(
        "sweep", keys / seconds, "keys/s", {"consumer": len(latest) / plain}, keys=keys, swept=swept,
        records_per_s=(ends[0] * 2 + keys * (_GONE - 1) // _GONE) / seconds, memory=memory,
        reference_memory=_peak() - before,
    )  # fmt: skip
    source.drop()
