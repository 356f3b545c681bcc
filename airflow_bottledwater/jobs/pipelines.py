"""Whether all pipelines of a Kafka are as they are meant to be, as their records say: for a watch that does not live in
what it watches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_bottledwater.errors import DOCS, BottledWaterError, StateError
from airflow_bottledwater.jobs import alive
from airflow_bottledwater.model.amounts import duration, size
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.patterns import fits
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state import letters, problems
from airflow_bottledwater.state.control_records import (
    JOBS,
    REPLACEMENT,
    STATUSES,
    TASK,
    JobRecord,
    StatusRecord,
    VerifiedRecord,
    decode,
    last_status,
    verified_key,
)

#: a job that has begun so often without publishing anything repeats: it does not get further
REPEATS = 3

#: the command is given there, not here: it is for a source that is gone, and these may only be away
_GONE = f"If its source is gone for good, see {DOCS}operations.html#a-source-that-is-gone."


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """From when on something is wrong; None: never.

    :param silence: seconds in which a job has to follow one that has ended, or has to begin to work: at most as long as
        restarts take.
    :param pause: seconds between two bounded runs.
    :param lag: bytes of WAL that a stream, or a slot, may be behind.
    :param delay: how old the oldest change may be that a stream has not published, in seconds.
    :param dead_letters: how many may be open.
    :param unverified: seconds since the last verification of all rows of all tables.
    """

    silence: float = 600.0
    pause: float | None = 3600.0
    lag: int | None = None
    delay: float | None = None
    dead_letters: int | None = 0
    unverified: float | None = None


def statuses(records: Mapping[str, Any], chosen: Sequence[str] = ()) -> dict[str, StatusRecord]:
    """The last status of each pipeline, by its name (system identifier, database and slot, with slashes between them);
    but for those of :func:`unreadable`.

    :param records: those of the shared topic.
    :param chosen: patterns of slots, or of whole names; empty for all.
    """
    found = {name: decode(StatusRecord, raw) for name, raw in _of(records, chosen)}
    return {name: status for name, status in found.items() if status is not None}


def unreadable(records: Mapping[str, Any], chosen: Sequence[str] = ()) -> dict[str, str]:
    """The pipelines whose last status this version cannot read, with what to do about each; see :func:`statuses`."""
    found = {}
    for name, raw in _of(records, chosen):
        try:
            last_status(name, raw)
        except StateError as error:
            found[name] = str(error)
    return found


def _of(records: Mapping[str, Any], chosen: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key, raw in records.items():
        name = key.removeprefix(STATUSES)
        if name != key and (not chosen or _chosen(name, chosen)):
            yield name, raw


def missing(found: Iterable[str], chosen: Sequence[str]) -> list[str]:
    """The patterns that no pipeline has: one that is watched by name must not be missed because it never began."""
    named = list(found)
    return [pattern for pattern in chosen if not any(_chosen(name, [pattern]) for name in named)]


def _chosen(name: str, patterns: Sequence[str]) -> bool:
    return any(fits(pattern, each) for each in (name, name.rpartition("/")[2]) for pattern in patterns)


def wrong(
    name: str,
    status: StatusRecord,
    records: Mapping[str, Any],
    limits: HealthLimits,
    *,
    alive: bool,
    now: float | None = None,
) -> list[str]:
    """What is wrong with a pipeline by its records, each in a sentence or two; nothing is with one that is not meant to
    run.

    :param alive: whether its job has reported lately.
    :param now: seconds since 1970.
    """
    if not status.wanted:
        return []
    now = time.time() if now is None else now
    found = [_ahead(status, now, limits)]
    found.append(_ended(status, now, limits) if status.ended else _works(status, now, limits, alive))
    if alive and not status.ended:
        found.append(_behind(status, now, limits))
    if status.repeats >= REPEATS:
        found.append(f"{status.repeats} jobs in a row have ended without publishing anything. {status.error}")
    found += [str(each) for each in _told(status) if each.kind != letters.KIND]
    if limits.dead_letters is not None and (count := status.open_dead_letters) > limits.dead_letters:
        found.append(f"{letters.are_open(count)}, more than {limits.dead_letters}: re-drive, or dismiss.")
        found += [str(each) for each in status.problems if each.kind == letters.KIND]
    found.append(_verified(decode(VerifiedRecord, records.get(verified_key(name))), status, now, limits))
    return [each.strip() for each in found if each]


def _told(status: StatusRecord) -> list[Problem]:
    """The problems that count. A bounded run may be shorter than the time that a problem is given: what it has left
    counts at once."""
    return status.standing if status.ended else problems.lasting(status.standing, status.at)


def _ahead(status: StatusRecord, now: float, limits: HealthLimits) -> str:
    """Whether the clock of the job's host is ahead, so that nothing is old enough to be a problem; empty if it is not."""
    if (ahead := max(status.at, status.job.started) - now) <= limits.silence:
        return ""
    return (
        f"The clock of host {status.job.host} is {ahead:.0f} s ahead of this host's, so that it is not known how long ago "
        "its job has ended or begun. Set the clocks of both."
    )


def _ended(status: StatusRecord, now: float, limits: HealthLimits) -> str:
    """Why it matters that no job runs; empty if it does not."""
    ago = now - status.at
    remedy = (
        "Run its DAG again (unpause it, if it is paused); or, if it is not to run, stop it: bottledwater stop, or the DAG "
        f"bottledwater_control. {_GONE}"
    )
    if status.failed and status.permanent:
        return f"The job failed for good {_ago(ago)}: {status.error} {remedy}"
    if status.not_begun:
        return f"No job could begin {_ago(ago)}: {status.error} Then run its DAG again (unpause it, if it is paused). {_GONE}"
    if status.state == "finished" and status.job.kind == "stream":
        if limits.pause is None or ago <= limits.pause:
            return ""
        return f"The last bounded run ended {_ago(ago)}, and none has followed. {remedy}"
    if ago <= limits.silence:
        return ""
    if status.failed:
        return f"The job failed {_ago(ago)}, and none has followed: {status.error} {remedy}"
    why = {TASK: "with its task", REPLACEMENT: "to be replaced"}.get(status.stopped_by, "")
    how = f"was stopped {why}".strip() if status.state == "stopped" else "has finished"
    return f"The {status.job.kind} job {how} {_ago(ago)}, and none has followed. {remedy}"


def _works(status: StatusRecord, now: float, limits: HealthLimits, alive: bool) -> str:
    job = status.job
    if not alive:
        return (
            f"The job has not reported for {now - status.at:.0f} s: it was killed, it hangs, or its host is gone "
            f"(job {job.id[:8]}, epoch {job.epoch}, process {job.pid} on {job.host}). Run its DAG again (unpause it, if it "
            f"is paused), or clear the task; it goes on where it was. {_GONE}"
        )
    if status.error:
        return f"The job reports an error: {status.error}"
    if status.state == "starting" and now - job.started > limits.silence:
        return f"The job is starting since {now - job.started:.0f} s."
    return ""


def _behind(status: StatusRecord, now: float, limits: HealthLimits) -> str:
    """Whether the stream is behind by more than it may, as it has measured, or has not been able to for a while; empty
    if it is not."""
    limited = limits.lag is not None or limits.delay is not None
    if limited and status.state == "streaming" and status.delay is None and now - status.job.started > limits.silence:
        return (
            "How far the stream is behind is not known: PostgreSQL does not answer its job's session for metrics. The "
            "job's log says why."
        )
    lag, delay = status.lag or 0, status.delay or 0.0
    if (limits.lag is None or lag <= limits.lag) and (limits.delay is None or delay <= limits.delay):
        return ""
    allowed = [size(limits.lag)] if limits.lag is not None else []
    allowed += [duration(limits.delay)] if limits.delay is not None else []
    return (
        f"The stream is {size(lag)} and {duration(delay)} behind; {' and '.join(allowed)} are allowed. Its log says how "
        "fast it is, and its problems what it waits for."
    )


def _verified(last: VerifiedRecord | None, status: StatusRecord, now: float, limits: HealthLimits) -> str:
    last = last or VerifiedRecord()
    if last.different:
        return (
            f"A verification found differences in {', '.join(last.different)}. Mend them as its log says, and verify "
            "these tables again, all rows of them."
        )
    if last.unverified:
        return (
            f"A verification could not prove that the topics of {', '.join(last.unverified)} are equal to the tables: "
            "its log says why, and what to do. Then verify these tables again, all rows of them."
        )
    since = last.at or status.first
    if limits.unverified is None or now - since <= limits.unverified:
        return ""
    when = f"Verified last {_ago(now - since)}" if last.at else "Never verified"
    return (
        f"{when} (all rows of all tables), which is longer than {limits.unverified / 3600:g} hours: unpause the DAG "
        "bottledwater_verify, or run bottledwater verify."
    )


def wrong_slot(found: SlotState | None, status: StatusRecord, limits: HealthLimits) -> list[str]:
    """What is wrong with the slot of a pipeline. That of one which was stopped is kept, and so is its WAL.

    :param found: the slot; None if there is none.
    """
    if found is None:
        return [f"There is no slot {status.slot!r}."] if status.wanted else []
    if status.retired:
        return [_retired(found, status)] if time.time() - status.at > limits.silence else []
    try:
        slot.check(found, found.database)
    except BottledWaterError as error:
        return [str(error)]
    if limits.lag is not None and found.lag > limits.lag:
        stopped = "" if status.wanted else " The pipeline was stopped on request: start it again, or retire it."
        return [f"The slot is {found.lag:,} bytes behind, more than {limits.lag:,}.{stopped}"]
    return []


def _retired(found: SlotState, status: StatusRecord) -> str:
    return (
        f"The pipeline was retired {_ago(time.time() - status.at)}, and {slot.retained(found)}: drop it with "
        "'bottledwater drop-slot'."
    )


def unread(found: SlotState, status: StatusRecord) -> str:
    """What a pipeline that was stopped on request costs its source, in one sentence."""
    return (
        f"It was stopped on request {_ago(time.time() - status.at)}, and {slot.retained(found)}, until it is started "
        "again or dropped."
    )


def submitted(records: Mapping[str, Any], name: str, status: StatusRecord) -> dict[str, JobRecord]:
    """The jobs of a pipeline that a task of Airflow has submitted, and that have not ended, by their ids."""
    from airflow_bottledwater.jobs import submitted

    found = {key: raw for key, raw in records.items() if key.startswith(JOBS)}
    return {
        each: job
        for each, job in submitted.unfinished(found, status.slot, name).items()
        if job.owner is not None and job.host and not alive.suspect(job, time.time())
    }


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} minutes ago" if seconds < 7200 else f"{seconds / 3600:.0f} hours ago"
