"""Submitted jobs in the shared state topic: announced, reported by themselves, watched and asked to stop, from any
host.

Whoever submits a job gives it an id, by which it is found here before it has a claim on its slot, and also if it never
gets one.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.log import UNREPORTED
from airflow_bottledwater.jobs.reporter import Reporter
from airflow_bottledwater.jobs.run_directory import Claimed
from airflow_bottledwater.jobs.supervise import RUN_DIRECTORY
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.claim import work_for, working_for
from airflow_bottledwater.state.control_records import (
    JOBS,
    STOPS,
    TASK,
    JobRecord,
    StoppedBy,
    StopRequest,
    decode,
    encode,
    job_key,
    stop_key,
)
from airflow_bottledwater.state.store import RawRecords

log = logging.getLogger(__name__)

#: the kind of a job that only reads, and publishes in place of a stream that has finished
VERIFY = "verify"
#: seconds for which new lines of the log stay in the record, since not every watcher reads each of its versions
_LOG_STAYS = 30.0
#: seconds that a job waits to hear what was requested before it began
_HEARING = 20.0
#: how many lines of a job's log travel with its record, and how many characters of each
_LINES, _WIDTH = 40, 300
#: how many characters of the error of a job that could not report it itself
_ERROR = 4000
#: seconds after which the record of a job is removed whose watcher did not remove it: more than a weekend
_KEPT = 7 * 86400.0


class LogTail(logging.Handler):
    """Keeps the last lines of a job's log.

    :ivar count: how many lines there were.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.count = 0
        self._kept: collections.deque[str] = collections.deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's lines, unless they are not to be reported."""
        if UNREPORTED.items() <= vars(record).items():
            return
        lines = self.format(record).splitlines()
        self._kept.extend(line[:_WIDTH] for line in lines)
        self.count += len(lines)

    @property
    def lines(self) -> list[str]:
        """The last lines."""
        return list(self._kept)


class JobReporter(Reporter):
    """Reports a job from the start of its driver to its end, and hears the request to stop it.

    :param job_id: the id that its submitter gave it; empty if nobody watches it by one.
    :param stop: called when it is asked to stop.
    """

    def __init__(self, pipeline: Settings, job_id: str, kind: str, tail: LogTail, stop: Callable[[], None]) -> None:
        self._id, self._tail, self._stop = job_id or uuid.uuid4().hex, tail, stop
        super().__init__(pipeline, "report", stop_key(self._id).__eq__)
        #: whether nobody watches it, so that nobody removes its record
        self._unwatched = not job_id
        self._changed = 0.0
        #: the name of the pipeline that is to stop
        self._to_stop = ""
        self.record = JobRecord(kind, pipeline.slot)
        self.record.host, self.record.pid, self.record.application = socket.gethostname(), os.getpid(), application()
        self.record.folder, self.record.heartbeat = os.environ.get(RUN_DIRECTORY, ""), pipeline.heartbeat_interval
        #: the task whose job its claims are: that which has submitted it, or in place of whose job it works
        self.owner: Owner | None = None
        #: who has stopped the job, once it was asked to
        self.stopped_by: StoppedBy = ""

    def start(self) -> None:
        """Start the thread."""
        work_for(self)
        super().start()

    @property
    def last_claim(self) -> str:
        """The id of the job's last claim on its slot; empty if it has made none."""
        return self.record.claim

    def claimed(self, job: Job) -> None:
        """Report the job's claim on its slot."""
        self.record.claim = job.id
        if self.record.folder:
            with contextlib.suppress(OSError):  # a full disk ends no job
                run_directory.write(Path(self.record.folder), Claimed(job.id))
        self._write(wait=0)

    def may_claim(self, name: str) -> bool:
        """Whether neither the job nor its pipeline was asked to stop.

        :param name: the pipeline's.
        """
        self.record.pipeline = name
        self.listening.wait(_HEARING)
        return not self.record.asked and self._to_stop != name

    def finish(self, outcome: Outcome) -> bool:
        """Write how the job has ended; a failure to write it is only logged. Returns whether it was written."""
        work_for(None)
        self.record.outcome = outcome
        return self._finish()

    def _hear_before(self, records: RawRecords) -> None:
        announced = decode(JobRecord, records.get(job_key(self._id)))
        if announced is not None:
            self.record.owner = self.owner = announced.owner
            self.record.pipeline = self.record.pipeline or announced.pipeline
            # on Kubernetes, a driver with its node's network has the node's name
            self.record.application = announced.application or self.record.application
        self._hear_now(stop_key(self._id), records.get(stop_key(self._id)))
        for key, raw in records.items():
            if not key.startswith((JOBS, STOPS)):
                continue
            left = decode(JobRecord, raw) if key.startswith(JOBS) else decode(StopRequest, raw)
            if left is not None and time.time() - (left.at or 0.0) > _KEPT:
                self._topic.write({key: None}, wait=0)

    def _hear_now(self, key: str, value: dict[str, Any] | None) -> None:
        request = decode(StopRequest, value) if key == stop_key(self._id) else None
        if request is None or self.record.asked:
            return
        self._to_stop = request.pipeline
        if self._to_stop and self.record.kind == VERIFY and not self.record.claim:
            return  # it does not begin to publish, and reads on
        # before a job has claimed its slot, it does not know its pipeline's name, and there may be another slot of the
        # same name
        if self._to_stop in ("", self.record.pipeline):
            log.info("Asked to stop.")
            self.record.asked, self.stopped_by = not self._to_stop, request.by
            self._stop()

    def _write(self, wait: float) -> None:
        ended = self.record.outcome is not None
        if ended and self._unwatched:
            self._topic.write({job_key(self._id): None}, wait=wait)
            return
        if self._tail.count != self.record.lines:
            self.record.lines, self._changed = self._tail.count, time.monotonic()
        self.record.log = self._tail.lines if ended or time.monotonic() - self._changed < _LOG_STAYS else []
        self.record.at = time.time()
        self._topic.write({job_key(self._id): encode(self.record)}, wait=wait)


def stand_in(owner: Owner | None) -> None:
    """Let what this process claims next be a stream of its own, in place of one that has finished: of an earlier claim
    on the slot, which that one has followed, nothing is left to be taken over; and it is the job of the same task,
    which starts the pipeline again.

    :param owner: the task that has submitted the stream that has finished; None if none has.
    """
    job = working_for()
    if isinstance(job, JobReporter):
        job.record.claim, job.owner = "", owner


def stopped_by() -> StoppedBy:
    """Who has stopped this process, if it is a job that was asked to stop; a signal that belongs to a request comes
    before it is heard."""
    job = working_for()
    return (job.stopped_by if isinstance(job, JobReporter) else "") or TASK


def application() -> str:
    """What the cluster's manager calls this driver: YARN's application id, by its container's, or the driver's pod on
    Kubernetes.

    YARN: ``CONTAINER_ID`` is ``container_[eEPOCH_]TIMESTAMP_APPLICATION_ATTEMPT_NUMBER``
    (org.apache.hadoop.yarn.api.records.ContainerId.toString). Kubernetes: a pod's host name is its name, and Spark sets
    ``SPARK_APPLICATION_ID`` in it (org.apache.spark.deploy.k8s.Constants.ENV_APPLICATION_ID).
    """
    found = re.match(r"container_(?:e\d+_)?(\d+_\d+)_\d+_\d+$", os.environ.get("CONTAINER_ID", ""))
    if found is not None:
        return f"application_{found[1]}"
    return socket.gethostname() if os.environ.get("SPARK_APPLICATION_ID") else ""


def announce(pipeline: Settings, job_id: str, kind: str, owner: Owner, application: str, name: str) -> None:
    """Write the record of a job that is going to be submitted, so that it can be found and stopped before it runs.

    :param application: see :class:`JobRecord`.
    :param name: the pipeline's.
    :raises Outage: Kafka does not take it.
    """
    record = JobRecord(kind, pipeline.slot, owner, application=application, pipeline=name, at=time.time())
    control_topic.write(pipeline.kafka, {job_key(job_id): encode(record)})


def report_end(
    pipeline: Settings, job_id: str, kind: str, outcome: Outcome, lines: list[str], *, asked: bool = True
) -> None:
    """Report the end of a job that could not do it itself, unless it did.

    :param lines: the last lines of its log.
    :param asked: whether this job was asked to stop, if it was stopped, and not its pipeline.
    :raises Outage: Kafka does not take it.
    """
    before = read(pipeline, job_id) or JobRecord(kind, pipeline.slot)
    if before.outcome is None:
        before.outcome = replace(outcome, error=outcome.error[:_ERROR])
        before.log, before.at = [line[:_WIDTH] for line in lines[-_LINES:]], time.time()
        before.lines += len(before.log)
        before.asked = before.asked or (outcome.stopped and asked)
        control_topic.write(pipeline.kafka, {job_key(job_id): encode(before)})


def forget(pipeline: Settings, job_id: str, *, asked: bool) -> None:
    """Remove a job's record and the request to it.

    :param asked: whether it was asked to stop. A tombstone of what was never written would be read by everybody as well;
        a request that nobody knows of is removed later, by another job.
    :raises Outage: Kafka does not take it.
    """
    keys = [job_key(job_id), *([stop_key(job_id)] if asked else [])]
    control_topic.write(pipeline.kafka, dict.fromkeys(keys))


def records(pipeline: Settings) -> RawRecords:
    """All records of the shared topic.

    :raises Outage: Kafka does not answer.
    """
    return control_topic.read(pipeline.kafka)


def read(pipeline: Settings, job_id: str) -> JobRecord | None:
    """A job's record as it is now.

    :raises Outage: Kafka does not answer.
    """
    return decode(JobRecord, records(pipeline).get(job_key(job_id)))


def unfinished(found: Mapping[str, Any], slot: str, name: str) -> dict[str, JobRecord]:
    """The jobs of a pipeline that have not reported their end, by their ids, with those on a slot of this name that do
    not know their pipeline yet.

    :param found: records of the shared topic.
    :param name: the pipeline's.
    """
    decoded = {key.removeprefix(JOBS): decode(JobRecord, raw) for key, raw in found.items() if key.startswith(JOBS)}
    return {
        job_id: job
        for job_id, job in decoded.items()
        if job is not None and job.outcome is None and job.slot == slot and job.pipeline in ("", name)
    }
