"""What the pipelines of a Kafka report, read once for all who look at the page of one API server."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow_bottledwater.errors import BottledWaterError, Refused
from airflow_bottledwater.jobs.alive import longest_silence, suspect
from airflow_bottledwater.jobs.pipelines import statuses
from airflow_bottledwater.metrics.pipelines import Pipelines
from airflow_bottledwater.metrics.sample import Sample
from airflow_bottledwater.state.control_records import StatusRecord

log = logging.getLogger(__name__)

#: seconds between two looks; seconds without anybody who asks, after which nothing is read any more
_INTERVAL, _IDLE = 1.0, 300.0
#: seconds that whoever asks waits for the first answer, and seconds without one after which Kafka counts as away
_FIRST, _AWAY = 1.5, 5.0


@dataclass(frozen=True, slots=True)
class KafkaLook:
    """What was read last.

    :param records: those of the shared topic.
    :param statuses: the last status of each pipeline, by its name.
    :param samples: the last samples of each pipeline, the oldest first.
    :param silent: the pipelines whose jobs have not ended and do not report.
    :param read: when, by the monotonic clock; 0: nothing was read yet.
    :param away: why this is not what is now, as a sentence; empty if it is.
    """

    records: Mapping[str, Any] = field(default_factory=dict)
    statuses: Mapping[str, StatusRecord] = field(default_factory=dict)
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    read: float = 0.0
    away: str = ""


class KafkaWatch:
    """Reads what the pipelines of a Kafka report, in a thread, for as long as somebody asks.

    :param conn_id: the connection, for messages.
    :param kafkas: properties of clients of this Kafka: where it refuses one, the next one reads.
    :ivar kafka: those of the one that reads.
    """

    _of: ClassVar[dict[str, KafkaWatch]] = {}
    _all: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, conn_id: str, *kafkas: dict[str, str]) -> None:
        self.conn_id, self.kafka = conn_id, kafkas[0]
        self._clients, self._several = itertools.cycle(kafkas), len(kafkas) > 1
        self._asked = self._began = time.monotonic()
        self._error = ""
        self._seen = KafkaLook()
        self._read = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"bottledwater {conn_id}", daemon=True)

    @classmethod
    def of(cls, conn_id: str, *kafkas: dict[str, str]) -> KafkaWatch:
        """The one of this process for these properties."""
        key = json.dumps(kafkas, sort_keys=True)
        with cls._all:
            found = cls._of.get(key)
            if found is None or not found._thread.is_alive():
                found = cls._of[key] = cls(conn_id, *kafkas)
                found._thread.start()
            found._asked = time.monotonic()
            return found

    def look(self) -> KafkaLook:
        """What was read last; at the first time it is waited for, for less than two seconds."""
        self._read.wait(max(0.0, self._began + _FIRST - time.monotonic()))
        seen, now = self._seen, time.monotonic()
        since = seen.read or self._began
        if not self._error and now - since < _AWAY and seen.read:
            return seen
        waited = f"Kafka (connection {self.conn_id!r}) has not answered for {now - since:.0f} s."
        reason = self._error if self._error else waited
        return KafkaLook(seen.records, seen.statuses, seen.samples, seen.silent, seen.read, reason)

    def _run(self) -> None:
        found: Pipelines | None = None
        try:
            while time.monotonic() - self._asked < _IDLE:
                try:
                    if found is None:
                        self.kafka = next(self._clients)
                        found = Pipelines(self.kafka)
                    self._seen, self._error = self._look(found), ""
                except Exception as error:
                    # the thread goes on: without it, the page would be wrong for good
                    if not isinstance(error, BottledWaterError):
                        log.warning("What pipelines report cannot be read (%s).", self.conn_id, exc_info=error)
                    self._error = str(error)
                    if found is not None and self._several and isinstance(error, Refused):
                        found.close()
                        found = None
                self._read.set()
                time.sleep(_INTERVAL)
        finally:
            if found is not None:
                found.close()

    def _look(self, found: Pipelines) -> KafkaLook:
        records, now = found.read(), time.monotonic()
        known = statuses(records)
        quiet = frozenset(
            name
            for name, status in known.items()
            # by the clock of the job's host, which may be wrong, and by this one's
            if suspect(status, time.time()) and now - found.changed(name) > longest_silence(status.heartbeat)
        )
        samples = {name: found.samples(name) for name in known}
        return KafkaLook(records, known, samples, quiet, now)
