"""A running job's status, its heartbeats and the requests to it, all in the shared state topic."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from airflow_bottledwater.errors import (
    BeginsAnew,
    BottledWaterError,
    CredentialsRefused,
    Interrupted,
    StaleBatch,
    StopRequested,
    TakenOver,
    beside,
    rotated,
)
from airflow_bottledwater.jobs import requests, submitted
from airflow_bottledwater.jobs.reporter import Reporter
from airflow_bottledwater.kafka.clients import GRANT
from airflow_bottledwater.model.amounts import clock
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.model.stop import interruption
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.state import letters
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.state.control_records import (
    REQUEST,
    SNAPSHOT,
    StatusRecord,
    StoppedBy,
    StopRequest,
    decode,
    encode,
    request_key,
    status_key,
)
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.state.store import CONTROL_TOPIC, RawRecords

log = logging.getLogger(__name__)

#: seconds after which a job that then fails does not count as one that repeats
_STABLE = 600.0
#: seconds for which a job that was taken over listens before it ends: its last heartbeat may be under way to Kafka
_UNDER_WAY = 0.5
#: seconds without any record of the shared topic, to which Kafka takes this job's heartbeats, after which its requests
#: are not heard
_UNHEARD = 60.0


class Controller(Reporter):
    """Writes the status of a pipeline's job at every heartbeat, and reads the requests that are made to it.

    :ivar stopped: set when the job is asked to stop.
    :ivar status: the status that the next heartbeat writes; the job updates it.
    :ivar problems: what is not as it is meant; the parts of the job tell it, and each heartbeat writes it.
    :ivar lost_at: when a heartbeat was lost last, or the job began, by the monotonic clock: Kafka was away then.
    :ivar replaced: whether a later job has reported on the pipeline, which it has claimed, or the pipeline was dropped.
    """

    def __init__(self, pipeline: Settings, cluster: Cluster, job: Job) -> None:
        self.name = cluster.pipeline(pipeline.slot)
        self._pipeline, self._cluster = pipeline, cluster
        super().__init__(pipeline, "status", {request_key(self.name), status_key(self.name)}.__contains__)
        self.status = StatusRecord("starting", job, pipeline.slot, pipeline.on_error)
        self.status.heartbeat, self.status.first = pipeline.heartbeat_interval, job.started
        self.stopped = threading.Event()
        self.problems = Problems()
        #: the number of the outside signal that the request to stop passes on; 0 if a stop was requested
        self.interrupted = 0
        self._job, self._obeys, self.replaced, self._dropped = job, False, False, False
        self._by: StoppedBy = ""
        self._look: Callable[[], str] | None = None
        #: when another consumer was made to hear requests, by the monotonic clock
        self.lost_at, self._renewed = time.monotonic(), -math.inf
        #: the last state must not be overwritten by what a heartbeat finds meanwhile
        self._naming = threading.Lock()

    def watch(self, look: Callable[[], str]) -> None:
        """Have the job looked at before each heartbeat.

        :param look: tells what it finds to :attr:`problems`, and returns the job's state.
        """
        self._look = look

    def begin_at(self, position: Position, known: PipelineState) -> None:
        """Report where a stream begins, and what was published before it: also if it ends before it streams."""
        self.status.position, self.status.counters = str(position), known.counters
        self.problems.tell("dead letters", letters.problems(known.open_letters))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Write heartbeats while a block runs, and its error as the last status; a block that succeeds writes its own.

        :raises Outage: instead of :class:`CredentialsRefused`: the claim was made with the same credentials, so they
            were changed since; when the job is submitted again, it gets the new ones.
        """
        self.start()
        try:
            yield
        except StopRequested:
            self.finish_stopped()
            raise
        except TakenOver:
            self.replaced = True
            self._ended.wait(_UNDER_WAY)
            self._forget_if_dropped()
            self.abandon()
            raise
        except (StaleBatch, BeginsAnew):  # another attempt of this job goes on, or it begins anew
            self.abandon()
            raise
        except CredentialsRefused as error:
            changed = rotated(error)
            self.finish("failed", changed)
            raise changed from error
        except BaseException as error:
            self.finish("failed", error, permanent=not transient(error))
            raise

    def finish(self, result: str, error: BaseException | None = None, *, permanent: bool = False) -> None:
        """End the thread and write the job's last status; a failure to write it is only logged.

        :param result: the last state, see :class:`StatusRecord`.
        :param permanent: whether the job failed for good.
        """
        self.status.problems = self.problems.all()
        with self._naming:
            self.status.state = result
        if error is not None:
            self.status.error, self.status.permanent = str(error), permanent
        if result == "stopped":
            self.status.stopped_by = self._by or submitted.stopped_by()
        self._finish()

    def _forget_if_dropped(self) -> None:
        """Delete the status of a pipeline that was dropped while this job was asleep: it has heard nothing of that, if
        its deletion was compacted away before it woke, and has reported since."""
        try:
            known = read_own(self._pipeline, self._cluster)
            # while a drop is under way, or has failed, the status tells of a slot that nobody reads; its last step
            # deletes both
            if known.claim is not None and known.claim.kind == "drop" and known.slot is None and known.intent is None:
                self._topic.write({status_key(self.name): None}, wait=10.0)
        except BottledWaterError as error:
            log.warning("The status of a pipeline that may have been dropped is left as it is: %s", error)

    def abandon(self) -> None:
        """End the thread of a job that was taken over: the status is the other job's by now."""
        self._finish(write=False)

    def finish_stopped(self) -> None:
        """Write the last status of a job that was stopped: "stopped" after a request; after a signal from outside, a
        transient failure."""
        error = Interrupted(self.interrupted) if self.interrupted else interruption(self.stopped)
        if error is None:
            self.finish("stopped")
        else:
            self.finish("failed", error, permanent=False)

    def _hear_before(self, records: RawRecords) -> None:
        """Obey a request that was written before if it still holds, else remove it."""
        found, status = records.get(request_key(self.name)), decode(StatusRecord, records.get(status_key(self.name)))
        self.follow(status)
        self._see(status, now=False)
        if found is None:
            return
        request = decode(StopRequest, found)
        if request is not None and requests.holds(request, status, self._job.epoch, time.time()):
            self._hear(request)
        elif request is None or request.epoch < self._job.epoch:
            log.info("A request to stop that was made to an earlier job is removed: %s", found)
            self._topic.write({request_key(self.name): None}, wait=0)

    def follow(self, before: StatusRecord | None) -> None:
        """Take over from the job before this one when the pipeline began, how often jobs have ended without publishing
        anything, and since when there has been something to publish: that is no younger because another job tries it.

        :param before: the last status of that job; None if there is none.
        """
        self.status.began = self.status.position
        if before is None:
            return
        self.status.first = before.first
        if before.job.epoch >= self._job.epoch or SNAPSHOT in (before.job.kind, self._job.kind):
            return
        last = before.reported or before.at
        # one that was killed has written no last status
        if before.position == self.status.began and before.state != "finished":
            measured = last - before.delay if before.delay else 0.0
            self.status.behind_since = measured or (before.behind_since if before.position == before.began else 0.0)
        died, moved = before.failed or not before.ended, before.position != before.began
        if died and not moved and last - before.job.started < _STABLE:
            self.status.repeats = before.repeats + 1

    def _hear_now(self, key: str, value: dict[str, Any] | None) -> None:
        if key == request_key(self.name) and value is not None:
            self._hear(decode(StopRequest, value))
        elif key == status_key(self.name) and value is None:
            # a status is deleted with its pipeline only: it must not come back, as that of a job that was killed
            self.replaced = self._dropped = True
        elif key == status_key(self.name):
            self._see(decode(StatusRecord, value), now=True)

    def _see(self, status: StatusRecord | None, *, now: bool) -> None:
        """A later job has reported, or this one was fenced, and its last status was written in its place.

        :param now: whether it was written while this listened; otherwise an earlier attempt of the same job may have
            written it.
        """
        if status is None or self.status.ended:
            return
        if status.job.epoch > self._job.epoch:
            self.replaced, self._dropped = True, False
        elif self._dropped:
            # a heartbeat of this job has come behind the deletion
            self._topic.write({status_key(self.name): None}, wait=0)
        elif now and status.job.id == self._job.id and status.ended and status.stopped_by:
            # it is written again: a heartbeat of this job may have come behind it. An attempt of this job that has
            # failed, which a lost executor may do later, stops nobody
            self.status = status

    def _hear(self, request: StopRequest | None) -> None:
        if request is None or request.epoch > self._job.epoch:
            return  # malformed, or made to a later job
        if request.at is None and request.epoch != self._job.epoch:
            return  # passed on by the driver of an earlier job, which was asleep, to its own worker
        if not self._obeys or request.retire > self.status.retired:
            log.info("Asked to stop%s.", " for good" if request.retire else "")
        # what was requested before a signal from outside is still requested
        self.interrupted = request.interrupted if not self._obeys or self.interrupted else 0
        # what the pipeline was asked for outlasts this job, and its replacement
        self._by = request.by if self._by != REQUEST else REQUEST
        self.status.retired = self.status.retired or request.retire
        self._obeys = True
        self.stopped.set()

    def _unheard(self) -> list[Problem]:
        """That nothing is heard of the shared topic, not even this job's own heartbeats, which Kafka takes: the role
        may not read it any more, say. Nobody could stop the job, or ask it for anything."""
        now, limit = time.monotonic(), max(_UNHEARD, 3 * self._pipeline.heartbeat_interval)
        if self._topic.lost:
            self.lost_at = now
        ago, why = self._topic.unread()
        ago = min(ago, now - self.lost_at)
        if ago <= limit:
            return []
        if now - self._renewed > limit:
            self._renewed = now
            with suppress(BottledWaterError):  # that is tried again, too
                self._topic.read_anew()
        what = (
            f"Since {clock(time.time() - ago)} nothing is heard of it, though Kafka takes what this job writes there: a "
            f"request to stop, to pause or to read a table again does not reach the job. {why}"
        )
        remedy = beside(CredentialsRefused(what, f"Make sure that the role may read it. {GRANT}."))
        return [Problem("requests-unheard", f"topic {CONTROL_TOPIC!r}", what.rstrip(), remedy, since=time.time() - ago)]

    def _write(self, wait: float) -> None:
        if self.replaced:
            return
        if not self.status.ended:
            state = self._look() if self._look is not None else ""
            with self._naming:
                if state and not self.status.ended:
                    self.status.state = state
            self.problems.tell("requests", self._unheard())
            self.status.problems = self.problems.all()
        self.status.at = time.time()
        self._topic.write({status_key(self.name): encode(self.status)}, wait=wait)
        if self._obeys and self.status.over:
            self._topic.write({request_key(self.name): None}, wait=wait)
