"""Tables of which the stream publishes no changes until a person lets them go on: requests to pause them, and to go
on."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.jobs.open_requests import OpenRequests
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import held
from airflow_bottledwater.state.control_records import TableRequest, table_requests_prefix
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import StateRecord
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.tables import writer

log = logging.getLogger(__name__)

#: seconds until the removal of a request that was carried out is tried again after an outage
_AGAIN = 5.0


class TableControl:
    """Carries out the requests about single tables, between two batches, in their order.

    :param name: the pipeline's name.
    """

    def __init__(self, pipeline: Settings, name: str) -> None:
        self._requests = OpenRequests(pipeline, table_requests_prefix(name), TableRequest)
        self._again = 0.0

    @property
    def open(self) -> bool:
        """Whether there is a request that is not carried out yet."""
        return bool(self._requests.open)

    def close(self) -> None:
        """Hear no more requests."""
        self._requests.close()

    def catch_up(self) -> None:
        """Read all requests that were made until now.

        :raises Outage: Kafka does not answer.
        """
        self._requests.read()

    def carry_out(self, publisher: StreamPublisher) -> bool:
        """Carry out what was asked for, unless the stream is inside of a transaction; returns whether that has changed
        anything. It is safe to do it again: a request is only removed when the state has its outcome.

        :raises TakenOver: another job has claimed the slot.
        """
        self._requests.poll()
        if not self._requests.complete or publisher.position.ordinal or time.monotonic() < self._again:
            return False
        changed = False
        for request_id, request in list(self._requests.open.items()):
            before = publisher.state.gaps
            publisher.write(functools.partial(_records, request))
            _tell(request, publisher.state, publisher.state.gaps != before)
            changed = changed or publisher.state.gaps != before
            try:
                self._requests.remove(request_id)
            except Outage as error:
                # a later one must not be removed before it
                log.warning("That a request was carried out cannot be told yet: %s", error)
                self._again = time.monotonic() + _AGAIN
                break
        return changed


def _records(request: TableRequest, known: PipelineState) -> dict[str, StateRecord | None]:
    if not request.paused:
        return writer.release(known, request.tables)
    return writer.hold(known, dict.fromkeys(request.tables, held.paused(request.by, request.why, request.at)))


def _tell(request: TableRequest, known: PipelineState, changed: bool) -> None:
    names = ", ".join(_names(known, request.tables))
    if not changed:
        log.info("%s: nothing is changed by the request to %s.", names, "pause" if request.paused else "go on")
    elif request.paused:
        log.warning("%s: paused%s. Other tables go on.", names, f" by {request.by}" if request.by else "")
    else:
        log.info("%s: goes on, as soon as its rows are read again.", names)


def _names(known: PipelineState, oids: Iterable[int]) -> list[str]:
    return [known.tables[oid].table.qualified if oid in known.tables else f"oid {oid}" for oid in oids]
