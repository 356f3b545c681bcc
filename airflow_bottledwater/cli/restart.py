"""``--restart``: a job that ended for a transient reason is followed by another one, by the policy that the stream
operator has."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.errors import BottledWaterError, JobDied
from airflow_bottledwater.jobs.restarts import RESTARTS, Restarts, reached
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient

log = logging.getLogger("bottledwater")


class Work(Protocol):
    """What is done again.

    :ivar pipeline: the pipeline's settings, as they were read last.
    :ivar published: whether it has published rows of a snapshot, the last time it was done.
    :ivar claim: the id of the claim of the last job; empty if it has made none.
    """

    pipeline: Settings
    published: bool
    claim: str

    def once(self) -> None:
        """Do it, until it ends or fails."""

    def asked(self) -> bool:
        """Whether it is not to be done again, since somebody has asked for its end."""


def keep_running(work: Work, stopped: threading.Event) -> None:
    """Do the work until it ends without an error; after a transient failure again, with back-off, unless the pipeline
    was asked to stop.

    :param stopped: set when the command is to end; it ends a pause at once.
    :raises BottledWaterError: it failed for good, or too often without progress in between.
    """
    last = Restarts(at=time.time())
    while True:
        try:
            work.once()
            return
        except BottledWaterError as error:
            if stopped.is_set() or not transient(error):
                raise
            kind = error.kind if isinstance(error, JobDied) else type(error).__name__
            with stoppable(stopped):
                position = reached(work.pipeline)
            last = last.after(kind, reached=position, now=time.time(), published=work.published)
            if last.count > RESTARTS:
                from airflow_bottledwater.jobs import requests

                log.error("Started again %d times without progress; giving up.", RESTARTS)
                requests.note(work.pipeline, error, claim=work.claim)
                raise
            log.warning(
                "The job died: %s\nIt is started again in %.0f s (%d of %d).", error, last.pause, last.count, RESTARTS
            )
        if not stopped.wait(last.at - time.time()) and work.asked():
            log.info("The pipeline was asked to stop: its job is not started again.")
            return
        if stopped.is_set():
            log.info("Terminated, shutting down...")
            return
