"""A consumer beside a test: when a stream publishes."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence

from confluent_kafka import Consumer, TopicPartition

from airflow_bottledwater.kafka.topics import Topics
from tests.support.topics import Flow
from tests.support.waiting import until


class LiveReader:
    """A read_committed consumer beside the test: when records became visible.

    :ivar arrivals: wall-clock times.
    :ivar committed: when the last of the transactions was committed whose changes have arrived.
    """

    def __init__(self, flow: Flow, tables: Sequence[str]) -> None:
        self.arrivals: list[float] = []
        self.committed = 0.0
        self._flow, self._tables = flow, tables
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-reader", daemon=True)

    def __enter__(self) -> LiveReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def goes_on(self) -> None:
        """Wait until a change has arrived that was committed later than now: the stream runs, and has published what
        was there, however many records that are under the options of the tables."""
        since = time.time()
        until(lambda: self.committed > since, "a change that is committed from now on")

    def _run(self) -> None:
        config = {"bootstrap.servers": self._flow.kafka.bootstrap}
        names = [self._flow.topic(table) for table in self._tables]
        described = Topics(config).describe(names)
        consumer = Consumer(
            {**config, "group.id": uuid.uuid4().hex, "isolation.level": "read_committed", "log_level": 2}
        )
        consumer.assign([TopicPartition(n, p, 0) for n in names for p in range(described[n].partitions)])
        while not self._ended.is_set():
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                self.arrivals.append(time.time())
                self.committed = max(self.committed, message.timestamp()[1] / 1000)
        with contextlib.suppress(Exception):
            consumer.close()
