"""All pipelines of a Kafka as they are now: the shared topic and the last samples, read as they are written."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_bottledwater.metrics.history import History
from airflow_bottledwater.metrics.points import Point, points
from airflow_bottledwater.metrics.sample import Sample
from airflow_bottledwater.state.control_records import status_key
from airflow_bottledwater.state.control_topic import ControlTopic

#: seconds of samples that are read at first: a rate needs two, and an interval of some minutes is allowed
_BEFORE = 600.0


class Pipelines:
    """Reads what all pipelines of a Kafka report; may be used from several threads."""

    def __init__(self, kafka: dict[str, str]) -> None:
        self._records, self._history = ControlTopic.of(kafka), History(kafka, since=_BEFORE)
        self._lock = threading.RLock()

    def read(self) -> Mapping[str, Any]:
        """Read what is new; returns the records of the shared topic.

        :raises Outage: Kafka does not answer.
        """
        with self._lock:
            records = self._records.all()  # which may take a while, and a sample is soon too old to be shown
            self._history.read(0.2)
            return records

    def changed(self, name: str) -> float:
        """When a pipeline's status last changed, see :meth:`ControlTopic.get`.

        :raises Outage: Kafka does not answer.
        """
        return self._records.get(status_key(name))[1]

    def look(self) -> Iterable[Point]:
        """The present values of all metrics.

        :raises Outage: Kafka does not answer.
        """
        with self._lock:
            records = self.read()
            return list(points(self._history.latest, records))

    def samples(self, name: str) -> list[Sample]:
        """The last samples of a pipeline, the oldest first, as they were read."""
        with self._lock:
            return list(self._history.samples.get(name, ()))

    def close(self) -> None:
        """Close the readers."""
        self._records.close()
        self._history.close()
