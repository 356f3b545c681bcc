"""Watches a job through its record in Kafka, from any host.

The job writes the record at every heartbeat, and its outcome at the end. When it counts as dead is in
:mod:`airflow_bottledwater.jobs.alive`; if its processes are there on this host, it has ten times as long. Then it may
be submitted again: the claim of the next job fences it, should it be alive after all.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, JobFailed
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import supervise
from airflow_bottledwater.jobs.alive import longest_silence, silence
from airflow_bottledwater.jobs.following import FileFollower, LogFollower, Write
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import JobRecord, decode, job_key
from airflow_bottledwater.state.control_topic import ControlTopic

log = logging.getLogger(__name__)

#: seconds for the processes of a job on this host to end, once it has reported its end
_GRACE = 20.0
#: how many times longer a job may be silent whose processes are there on this host: it may only be slow, or be kept
#: from Kafka
_ALIVE = 10.0
#: how many lines of its log belong to a job's end
_TAIL = 20


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job that was watched has ended.

    :param asked: whether this very job was asked to stop, and not its pipeline.
    :param lost: whether it has only fallen silent: processes of it may still be there.
    :param log: the last lines of its log.
    :param pending: whether it was given up before it began: in a cluster, it may begin all the same.
    """

    outcome: Outcome
    asked: bool = False
    lost: bool = False
    log: str = ""
    pending: bool = False

    def as_event(self) -> dict[str, Any]:
        """As plain JSON values, for a trigger's event."""
        return asdict(self)

    @classmethod
    def of_event(cls, event: dict[str, Any]) -> Ended:
        """The inverse of :meth:`as_event`."""
        return cls(
            Outcome(**event["outcome"]), event["asked"], event["lost"], event["log"], event.get("pending", False)
        )


class JobWatch:
    """Watches one job, and passes its log on; it has to be closed.

    :param start_timeout: seconds in which a job has to report for the first time; on a cluster, it may wait in a queue.
    :param write: called with each line of the job's log.
    :param past: how many bytes of an existing log to begin with, if the job is on this host; None for all of it.
    """

    def __init__(
        self, pipeline: Settings, identity: Identity, *, start_timeout: float, write: Write, past: int | None = None
    ) -> None:
        self._identity, self._start_timeout = identity, start_timeout
        self._folder = identities.folder_here(identity)
        self._shared = ControlTopic.of(pipeline.kafka)
        self._follower = FileFollower(self._folder, write, past=past) if self._folder else LogFollower(write)
        self._seen_lines = 0
        self._began = time.monotonic()
        self._ended_since = 0.0
        #: whether the job has reported something since this watch began; and whether it has not begun yet
        self.reported = self.announced = False

    def fetch(self) -> Ended | None:
        """Look once, and pass on what the job has logged since; returns how it has ended, or None while it runs. This
        call blocks.

        :raises Outage: Kafka does not answer, or takes no records, and the job is not known to have ended; a silence
            then begins anew.
        """
        try:
            found = self._look(now=False)
            if found is not None and found.lost:
                # the silence may be Kafka's: make sure that it answers
                found = self._look(now=True)
        except BottledWaterError:
            self._began = time.monotonic()
            if self._folder is None or supervise.running(self._folder):
                raise
            # what can be seen here counts while Kafka does not answer
            found = _ended_here(self._folder)
        finally:
            # also while Kafka does not answer: the next watch does not pass it on
            if isinstance(self._follower, FileFollower):
                self._follower.follow()
        return found

    def _look(self, *, now: bool) -> Ended | None:
        raw, changed = self._shared.get(job_key(self._identity["id"]), now=now)
        record = decode(JobRecord, raw)
        self.reported = changed > self._began
        self.announced = record is not None and not record.host
        if record is not None:
            self._pass_on(record)
            if record.outcome is not None:
                return self._finished(record, record.outcome)
        if self._folder is not None and not supervise.running(self._folder) and supervise.outcome(self._folder):
            return _ended_here(self._folder)  # it could not report it
        silent = silence(self._shared, changed, self._began)
        if record is not None and record.host:
            here = self._folder is not None and supervise.running(self._folder)
            longest = longest_silence(record.heartbeat) * (_ALIVE if here else 1.0)
        elif self._folder is not None and not supervise.running(self._folder):
            longest = longest_silence()  # killed before it could report anything
        else:
            longest = self._start_timeout
        if silent <= longest:
            return None
        if now and record is not None:
            self._shared.probe()
        return _lost(record, silent, self._folder)

    def _pass_on(self, record: JobRecord) -> None:
        """Pass on new lines of the record's log, unless the log itself can be read."""
        new = min(record.lines - self._seen_lines, len(record.log))
        self._seen_lines = record.lines
        if new > 0 and not isinstance(self._follower, FileFollower):
            self._follower.lines(record.log[-new:])

    def _finished(self, record: JobRecord, outcome: Outcome) -> Ended | None:
        """The end that a job has reported; None while its processes on this host are still about to end."""
        self._ended_since = self._ended_since or time.monotonic()
        if self._folder is None:
            pending = is_pending(self._identity, record)
            return Ended(outcome, record.asked, log="\n".join(record.log[-_TAIL:]), pending=pending)
        if supervise.running(self._folder) and time.monotonic() - self._ended_since < _GRACE:
            return None
        return Ended(outcome, record.asked, log=supervise.log_tail(self._folder, _TAIL))

    def close(self) -> None:
        """End the watch."""
        self._shared.close()


def is_pending(identity: Identity, record: JobRecord) -> bool:
    """Whether a job was handed to a cluster, and has not begun."""
    return not record.host and not identity["folder"]


def _lost(record: JobRecord | None, silent: float, folder: Path | None) -> Ended:
    where = f" on {record.host}" if record is not None and record.host else ""
    said = f"The job{where} has not reported for {silent:.0f} s: it was killed, it hangs, or its host is gone."
    if not where:
        said = f"The job has not reported within {silent:.0f} s: it waits for the cluster, or Spark could not start it."
    tail = "" if folder is None else supervise.log_tail(folder, _TAIL)
    if record is not None and not tail:
        tail = "\n".join(record.log[-_TAIL:])
    outcome = Outcome(ok=False, kind=JobFailed.__name__, error=f"{said}\n{tail}".strip(), transient=True)
    return Ended(outcome, lost=True, log=tail)


def _ended_here(folder: Path) -> Ended:
    """The end of a job on this host that Kafka does not know."""
    return Ended(supervise.final_outcome(folder), log=supervise.log_tail(folder, _TAIL))


def forget(pipeline: Settings, identity: Identity, *, asked: bool) -> None:
    """Remove what is left of an ended job: its folder, if it is on this host, and its record. A failure is only logged.

    :param asked: see :func:`airflow_bottledwater.jobs.submitted.forget`.
    """
    from airflow_bottledwater.jobs import submitted

    identities.forget(identity)
    try:
        submitted.forget(pipeline, identity["id"], asked=asked)
    except BottledWaterError as error:
        log.info("The record of the job stays for a while: %s", error)


def still_runs(pipeline: Settings, identity: Identity, *, start_timeout: float = 0.0) -> Ended | None:
    """Find out whether the job of an earlier try lives; returns None if it does. This takes some heartbeats if it does
    not.

    A job of this or another host that has not begun within that time counts as lost; one that was sent to a cluster may
    wait there, and counts as alive.

    :param start_timeout: seconds that it still has to begin, if they are more.
    :raises Outage: Kafka does not answer.
    """
    longest = max(longest_silence(), start_timeout)
    watch = JobWatch(pipeline, identity, start_timeout=longest, write=lambda level, line: None, past=0)
    try:
        while (
            (found := watch.fetch()) is None and not watch.reported and not (watch.announced and not identity["folder"])
        ):
            time.sleep(0.5)
        return found
    finally:
        watch.close()
