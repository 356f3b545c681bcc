"""The requests to a pipeline's job that stay open until they are answered: those for live snapshots, and those about
single tables."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import fields
from typing import Any, Generic, TypeVar

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import SnapshotRequest, TableRequest, decode, is_below
from airflow_bottledwater.state.control_topic import ControlTopic

log = logging.getLogger(__name__)

#: what is said of a request of which this version does not know all
UNKNOWN = "It was written by another version of the provider than the job's: use the same version in both places."
#: seconds between two looks of a job for new requests
_INTERVAL = 0.3

R = TypeVar("R", SnapshotRequest, TableRequest)


class OpenRequests(Generic[R]):
    """Hears the requests of one kind to a pipeline.

    :param prefix: that of their keys in the shared topic, behind which their ids are.
    :ivar open: by their ids, the oldest first.
    :ivar unknown: the ids of those of which this version does not know all: carried out without that, more could be
        done than was asked for.
    :ivar complete: whether all requests from before were read; until then, some of these may be answered.
    """

    def __init__(self, pipeline: Settings, prefix: str, kind: type[R]) -> None:
        self._prefix = prefix
        self._kind: type[R] = kind
        self._fields = {field.name for field in fields(kind)}
        self._topic = ControlTopic.of(pipeline.kafka)
        self._heard = self._topic.subscribe(lambda key: is_below(prefix, key))
        self._looked = 0.0
        self._end: int | None = None
        self.open: dict[str, R] = {}
        self.unknown: set[str] = set()
        self.complete = False

    def poll(self) -> None:
        """Take in what was requested, without waiting; Kafka's outages are the stream's own to report."""
        if time.monotonic() - self._looked < _INTERVAL:
            return
        self._looked = time.monotonic()
        if self._end is None:
            with contextlib.suppress(BottledWaterError):
                self._end = self._topic.end()
        read = self._end is not None and self._topic.at >= self._end
        self._take(self._heard.poll())
        if read:
            self._completed()

    def read(self) -> None:
        """Read on to the topic's present end.

        :raises Outage: Kafka does not answer.
        """
        self._topic.read_to_end()
        self._take(self._heard.poll())
        self._completed()

    def _completed(self) -> None:
        """All requests from before were read."""
        self.complete = True

    def remove(self, request_id: str) -> None:
        """Remove a request that is answered.

        :raises Outage: Kafka does not take it; the request is still open.
        """
        self._topic.write({self._prefix + request_id: None})
        self.open.pop(request_id, None)

    def close(self) -> None:
        """Hear no more requests."""
        self._heard.close()
        self._topic.close()

    def _take(self, changes: list[tuple[str, dict[str, Any] | None]]) -> None:
        for key, value in changes:
            request_id, request = key.removeprefix(self._prefix), decode(self._kind, value)
            self.open.pop(request_id, None)
            self.unknown.discard(request_id)
            if request is not None and value is not None and value.keys() <= self._fields:
                self.open[request_id] = request
            elif value is not None:
                log.error("Request %s is not carried out: %s", request_id, UNKNOWN)
                self.unknown.add(request_id)
        self.open = dict(sorted(self.open.items(), key=lambda item: (item[1].at, item[0])))
