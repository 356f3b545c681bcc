"""The shared state topic, read once for all triggers of a triggerer with the same Kafka settings."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from airflow_bottledwater.state import store


#: seconds for reading what is new
_READING = 1.0


class SharedRecords:
    """The records of all pipelines in one Kafka, read only once for all users in this process; closed when the last user releases it."""

    _of: ClassVar[dict[str, SharedRecords]] = {}
    #: reentrant, since a signal's handler (on_kill) may need what the interrupted code has
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, kafka: dict[str, str]) -> None:
        self._kafka = kafka
        self._users = 0
        self._reading = threading.RLock()
        self._reader: store.Reader | None = None
        self._read = 0.0
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
        """A record, at most a second old (None if there is none), and when it last changed, by this process's monotonic clock (0 if it
        has not changed since the first read).

        :param now: whether to read to the present end of the topic, which also makes sure that Kafka answers.
        :raises Outage: Kafka does not answer.
        """
        # imported here, since they import confluent-kafka, which a DAG processor does not need
        from airflow_bottledwater.kafka.topics import Topics
        from airflow_bottledwater.state import store

        with self._reading:
            first = self._reader is None
            if self._reader is None or now:
                topics = Topics(self._kafka)
                if store.CONTROL_TOPIC not in topics.describe([store.CONTROL_TOPIC]):
                    return None, 0.0
                end = topics.ends(store.CONTROL_TOPIC, 1)[0]
                self._reader = self._reader or store.Reader(self._kafka, store.CONTROL_TOPIC, committed=False)
                before = dict(self._reader.values)
                self._reader.read_to(end, timeout=30.0)
                if not first:
                    self._note(name for name, value in self._reader.values.items() if before.get(name) != value)
                self._read = time.monotonic()
            if time.monotonic() - self._read > 1.0:
                # bounded: with hundreds of pipelines, there is always one more heartbeat
                began = time.monotonic()
                while (changes := self._reader.poll(0.5)) and time.monotonic() - began < _READING:
                    self._note(name for name, _ in changes)
                self._note(name for name, _ in changes)
                self._read = time.monotonic()
            return self._reader.values.get(key), self._changed.get(key, 0.0)

    def all(self) -> dict[str, Any]:
        """All records, at most a second old.

        :raises Outage: Kafka does not answer.
        """
        self.get("")
        with self._reading:
            return dict(self._reader.values) if self._reader is not None else {}

    def _note(self, keys: Iterable[str]) -> None:
        self._changed.update(dict.fromkeys(keys, time.monotonic()))
