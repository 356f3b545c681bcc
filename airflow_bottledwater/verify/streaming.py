"""Whether somebody publishes what a verification waits for; where nobody does, and nobody is about to, the verification
does it itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from airflow_bottledwater.backoff import pause
from airflow_bottledwater.errors import BottledWaterError, Outage, PipelineStopped, SlotInUse, TakenOver
from airflow_bottledwater.jobs.alive import suspect
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.state.control_records import StatusRecord

log = logging.getLogger(__name__)

#: seconds for which nobody reads from the slot before it counts: a stream that reconnects needs a moment
_PATIENCE = 3.0


class Streaming:
    """
    :param advance: publishes what is committed, and ends, in place of a job of the task that it is given; None: that
        nobody does it is an error.
    """

    def __init__(
        self,
        pipeline: Settings,
        cluster: Cluster,
        connection: Connection,
        advance: Callable[[Owner | None], None] | None,
    ) -> None:
        self._pipeline, self._connection, self._advance = pipeline, connection, advance
        self._name = cluster.pipeline(pipeline.slot)
        self._free_since = 0.0

    def catch_up(self) -> None:
        """Where no stream runs, publish what is committed before any lock is taken: most of it, so that little is left
        under the snapshot.

        :raises Outage: see :meth:`look`; or a job lives, and does not read from the slot in time.
        """
        deadline = time.monotonic() + self._pipeline.verify_timeout
        while True:
            self.look()
            if not self._free_since:
                return
            if time.monotonic() > deadline:
                raise self._nobody(read_status(self._pipeline, self._name))
            pause(0.2)

    def look(self) -> None:
        """Look whether a stream reads from the slot; if the last job has finished, and the pipeline is meant to run,
        publish what is committed in its place.

        :raises Outage: no stream runs, and none may be run in its place.
        :raises PipelineStopped: that is so since the pipeline was asked to stop.
        """
        found = slot.state(self._connection, self._pipeline.slot)
        if found is not None and found.active_pid is not None:
            self._free_since = 0.0
            return
        now = time.monotonic()
        self._free_since = self._free_since or now
        if now - self._free_since < _PATIENCE:
            return
        status = read_status(self._pipeline, self._name)
        if status is not None and not status.ended and not suspect(status, time.time()):
            return  # it is about to connect
        # a job that was stopped, or has failed, is started again by a person, or by its task, and by nobody else
        if self._advance is None or not (status is None or (status.state == "finished" and status.wanted)):
            raise self._nobody(status)
        log.info("No stream runs, and the last one has finished: what is committed is published now.")
        try:
            self._advance(status.job.owner if status is not None else None)
        except (TakenOver, SlotInUse) as error:
            log.info("A stream has been started meanwhile: %s", error)
        self._free_since = 0.0

    def _nobody(self, status: StatusRecord | None) -> BottledWaterError:
        """Why nothing is published.

        :param status: the pipeline's last one.
        """
        what = (
            f"The stream of slot {self._pipeline.slot!r} has not come to the rows that are to be verified, and no "
            "stream reads from the slot."
        )
        if status is not None and not status.wanted:
            how = "retired" if status.retired else "asked to stop"
            return PipelineStopped(
                f"{what} The pipeline was {how}, so that a verification publishes nothing in its place.",
                "If it is to run again, start it, and verify then.",
            )
        why = f" The last job: {status.state}. {status.error}".rstrip() if status is not None else ""
        return Outage(
            f"{what}{why}",
            "Start the stream, or verify while it runs; its last error is in 'bottledwater status'.",
        )
