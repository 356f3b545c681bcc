"""The shared state topic, read once for all triggers of a triggerer with the same Kafka settings."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from airflow_bottledwater.state import store


#: seconds for reading what is new
_READING = 1.0
#: seconds without a record after which Kafka is asked whether it answers, and the longest time between two answers over
#: which it counts as having answered; watches look more often
_ASKED, _GAP = 5.0, 30.0


class SharedRecords:
    """The records of all pipelines in one Kafka, read only once for all users in this process; closed when the last
    user releases it.

    :ivar answering: since when Kafka has answered whenever it was asked, by the monotonic clock: only from then on does
        it mean anything that a record did not change; 0 before it was asked.
    """

    _of: ClassVar[dict[str, SharedRecords]] = {}
    #: reentrant, since a signal's handler (on_kill) may need what the interrupted code has
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, kafka: dict[str, str]) -> None:
        self._kafka = kafka
        self._users = 0
        self._reading = threading.RLock()
        self._reader: store.Reader | None = None
        self._read = 0.0
        self.answering = 0.0
        self._answered = -math.inf
        self._changed: dict[str, float] = {}

    @classmethod
    def acquire(cls, kafka: dict[str, str]) -> SharedRecords:
        """The shared instance for these properties; its user has to call :meth:`release` once."""
        with cls._lock:
            found = cls._of.setdefault(cls._key(kafka), cls(kafka))
            found._users += 1
            return found

    def release(self) -> None:
        """Release the instance; the call of its last user closes the reader."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            # a user that comes later gets a new instance
            del self._of[self._key(self._kafka)]
        with self._reading:
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    @staticmethod
    def _key(kafka: dict[str, str]) -> str:
        return json.dumps(kafka, sort_keys=True)

    def get(self, key: str, *, now: bool = False) -> tuple[dict[str, Any] | None, float]:
        """A record, at most a second old (None if there is none), and when it last changed, by this process's monotonic
        clock (0 if it has not changed since the first read).

        :param now: whether to read to the present end of the topic, which also makes sure that Kafka answers.
        :raises Outage: Kafka does not answer.
        """
        with self._reading:
            try:
                self._look(now)
            except BaseException:
                self._answered = -math.inf
                raise
            found = self._reader.values.get(key) if self._reader is not None else None
            return found, self._changed.get(key, 0.0)

    def _look(self, now: bool) -> None:
        if self._reader is not None and not now and time.monotonic() - self._read > 1.0:
            # bounded: with hundreds of pipelines, there is always one more heartbeat
            began = time.monotonic()
            while changes := self._reader.poll(0.5):
                self._note(name for name, _ in changes)
                self._answers()
                if time.monotonic() - began >= _READING:
                    break
            self._read = time.monotonic()
        if self._reader is None or now or time.monotonic() - self._answered > _ASKED:
            self._read_to_end()

    def _read_to_end(self) -> None:
        """Read to the present end of the topic, if it exists, which also makes sure that Kafka answers."""
        # imported here, since they import confluent-kafka, which a DAG processor does not need
        from airflow_bottledwater.kafka.topics import Topics
        from airflow_bottledwater.state import store

        topics, first = Topics(self._kafka), self._reader is None
        if store.CONTROL_TOPIC in topics.describe([store.CONTROL_TOPIC]):
            end = topics.ends(store.CONTROL_TOPIC, 1)[0]
            self._reader = self._reader or store.Reader(self._kafka, store.CONTROL_TOPIC, committed=False)
            before = dict(self._reader.values)
            self._reader.read_to(end, timeout=30.0)
            if not first:
                self._note(name for name, value in self._reader.values.items() if before.get(name) != value)
            self._read = time.monotonic()
        self._answers()

    def _answers(self) -> None:
        """Kafka has answered now."""
        now = time.monotonic()
        if now - self._answered > _GAP:
            self.answering = now
        self._answered = now

    def all(self) -> dict[str, Any]:
        """All records, at most a second old.

        :raises Outage: Kafka does not answer.
        """
        self.get("")
        with self._reading:
            return dict(self._reader.values) if self._reader is not None else {}

    def _note(self, keys: Iterable[str]) -> None:
        self._changed.update(dict.fromkeys(keys, time.monotonic()))
