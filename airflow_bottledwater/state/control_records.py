"""The records of the shared state topic, typed: a submitted job, the status of a pipeline, requests to both, and the
owner of a data topic.

Keys: ``job/<id>`` and ``stop/<id>``, ``status/<pipeline>``, ``verified/<pipeline>``, ``untold/<pipeline>``,
``request/<pipeline>`` and ``stopped/<pipeline>``,
``snapshot/<pipeline>/<id>`` and ``reading/<pipeline>/<id>``, ``tables/<pipeline>/<id>``, and
``owner/<topic>/<pipeline>``. Others may write to this topic, too: a record that is malformed is read as if it were not
there. A field that this version does not know is left out; one that is missing has its default.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar, get_args

import msgspec

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.errors import Refused, StateError
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.model.problem import Problem

#: the kind of a job that a stream continues, and the kinds of jobs that write a status
SNAPSHOT = "snapshot"
REPORTED = frozenset({SNAPSHOT, "stream"})
#: the last states of a job that ended in order, and of one that did not
_IN_ORDER, _FAILED = frozenset({"stopped", "finished"}), "failed"
#: who has stopped a job: see :class:`StatusRecord`
REQUEST: Final = "request"
TASK: Final = "task"
REPLACEMENT: Final = "replacement"
StoppedBy = Literal["", "request", "task", "replacement"]
#: the last states of a live snapshot
SNAPSHOT_ENDS = frozenset({"finished", "cancelled", "failed"})

#: the prefix of the keys of all pipelines' statuses
STATUSES = "status/"
#: the key of which tombstones are written, to find out whether the topic takes records
PROBE = "probe"


def status_key(name: str) -> str:
    """The key of a pipeline's status."""
    return f"{STATUSES}{name}"


def verified_key(name: str) -> str:
    """The key of a pipeline's last verification."""
    return f"verified/{name}"


def untold_key(name: str) -> str:
    """The key of what Airflow was not told of a pipeline."""
    return f"untold/{name}"


def request_key(name: str) -> str:
    """The key of a request to a pipeline's job."""
    return f"request/{name}"


#: the prefix of the keys of all pipelines' last requests to stop
STOPPED = "stopped/"


def stopped_key(name: str) -> str:
    """The key of the last request to stop a pipeline, which stays when it is answered, and when the slot is dropped."""
    return f"{STOPPED}{name}"


#: the prefixes of the keys of all submitted jobs, and of requests to them
JOBS, STOPS = "job/", "stop/"


def job_key(job_id: str) -> str:
    """The key of a submitted job; the id is made by whoever submits it."""
    return f"{JOBS}{job_id}"


def stop_key(job_id: str) -> str:
    """The key of a request to a submitted job."""
    return f"{STOPS}{job_id}"


def snapshots_prefix(name: str) -> str:
    """The prefix of the keys of all live snapshots that a pipeline was asked for."""
    return f"snapshot/{name}/"


def snapshot_key(name: str, request_id: str) -> str:
    """The key of a request for a live snapshot; the id is made by whoever asks for it."""
    return f"{snapshots_prefix(name)}{request_id}"


def table_requests_prefix(name: str) -> str:
    """The prefix of the keys of all requests about single tables of a pipeline."""
    return f"tables/{name}/"


def reading_key(name: str, request_id: str) -> str:
    """The key of the report on a live snapshot."""
    return f"reading/{name}/{request_id}"


def is_below(prefix: str, key: str) -> bool:
    """Whether a key is a pipeline's prefix with an id behind it. Ids have no slash: behind one, there is another
    pipeline, of a database whose name has a slash and begins with this one's and the slot's."""
    return key.startswith(prefix) and "/" not in key[len(prefix) :]


def owner_key(topic: str, name: str) -> str:
    """The key of a pipeline's ownership of a data topic."""
    return f"owner/{topic}/{name}"


def topic_owned(key: str, name: str = "") -> str:
    """The topic of a key that :func:`owner_key` made for a pipeline; empty for any other key.

    :param name: the pipeline's; empty for any.
    """
    kind, topic, owner = (*key.split("/", 2), "", "")[:3]
    return topic if kind == "owner" and owner and name in ("", owner) else ""


@dataclass(frozen=True, slots=True)
class GuardStep:
    """A step that the guard has taken to spare the source.

    :param at: seconds since 1970, by the clock of the job's host.
    :param limit: what it is about: wal, xmin, replica or locks.
    :param step: rested, renewed, stopped or dropped.
    :param reason: why, as a full sentence.
    """

    at: float
    limit: str
    step: str
    reason: str


@dataclass(slots=True)
class StatusRecord:
    """The status that a job reports of itself, at every heartbeat.

    :param state: starting, snapshot, streaming, waiting, stopped, finished or failed.
    :param job: the job that reports it.
    :param permanent: whether it failed for good; otherwise the same job may be submitted again.
    :param retired: whether the pipeline was stopped for good, so that its slot may be dropped.
    :param stopped_by: who has stopped the job: :data:`REQUEST`, the pipeline was asked to stop, and is not to run;
        :data:`TASK`, its task in Airflow was ended; :data:`REPLACEMENT`, another job is about to take its place. Empty
        if nobody has.
    :param first: when the first job of the pipeline has started, in seconds since 1970.
    :param began: the position at the job's start.
    :param behind_since: since when there has been a change beyond that position that is not published, in seconds since
        1970; 0 if the job before has not measured that.
    :param repeats: how many stream jobs before this one have failed in a row without publishing anything.
    :param problems: what is not as it is meant although the job runs; see :class:`Problem`.
    :param lag: bytes of WAL that a stream had not published yet when it was measured last; None if PostgreSQL has not
        answered for a while, or for another job.
    :param delay: how old the oldest of these changes was, in seconds.
    :param pressure: how near the job is to each limit of the guard (wal, xmin, replica, locks): 1 is at the limit.
    :param guard: the last steps of the guard, the oldest first.
    :param heartbeat: seconds after which the job writes its status again.
    :param at: seconds since 1970, by the clock of the job's host.
    :param reported: when the job itself has reported last, if others have told something since; None if not.
    """

    state: str
    job: Job
    slot: str = ""
    on_error: str = ""
    position: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    error: str = ""
    permanent: bool = False
    retired: bool = False
    stopped_by: StoppedBy = ""
    first: float = 0.0
    began: str = ""
    behind_since: float = 0.0
    repeats: int = 0
    lag: int | None = None
    delay: float | None = None
    pressure: dict[str, float] = field(default_factory=dict)
    guard: list[GuardStep] = field(default_factory=list)
    at: float = 0.0
    heartbeat: float = 2.0
    reported: float | None = None

    def told(self, **changes: Any) -> StatusRecord:
        """The status with what others tell now, in place of a job that does not any more. What the job has measured is
        of when it has reported last."""
        return replace(self, **changes, at=time.time(), reported=self.reported or self.at)

    @property
    def wanted(self) -> bool:
        """Whether the pipeline is meant to run: it was neither asked to stop nor retired."""
        return not self.retired and self.stopped_by != REQUEST

    @property
    def open_dead_letters(self) -> int:
        """How many dead letters of the pipeline nobody has re-driven or dismissed yet."""
        return self.counters.get("open_dead_letters", 0)

    @property
    def ended(self) -> bool:
        """Whether it is the job's last status."""
        return self.ended_in_order or self.failed

    @property
    def ended_in_order(self) -> bool:
        """Whether the job has ended without an error."""
        return self.state in _IN_ORDER

    @property
    def failed(self) -> bool:
        """Whether the job has ended with an error."""
        return self.state == _FAILED

    @property
    def standing(self) -> list[Problem]:
        """The problems that still stand: a bounded run leaves those that it had when it finished, until the next one. A
        job that was stopped, or has failed, says nothing of them any more."""
        return self.problems if not self.ended or self.state == "finished" else []

    @property
    def not_begun(self) -> bool:
        """Whether no job could begin since the last one has ended in order."""
        return self.ended_in_order and bool(self.error)

    @property
    def over(self) -> bool:
        """Whether the job has ended, and none continues it: a stream continues a finished snapshot, and the same job
        one that failed for a transient reason."""
        if self.state == "finished":
            return self.job.kind != SNAPSHOT
        if self.stopped_by == REPLACEMENT:
            return False
        return self.ended_in_order or (self.failed and self.permanent)


@dataclass(slots=True)
class JobRecord:
    """A submitted job: announced by whoever submits it, then written by its driver at every heartbeat, wherever that
    runs, until its end. It says whether the job lives and how it ended; what the job works on is in the
    :class:`StatusRecord` of its pipeline.

    :param kind: snapshot, stream, pipeline or verify.
    :param host: the host of the driver; empty until it runs.
    :param folder: in client mode its run directory, once its driver runs; otherwise empty.
    :param application: what the cluster's manager calls it: YARN's application id, or on Kubernetes namespace and pod
        of the driver, with a colon between them; empty in client mode.
    :param outcome: how it ended; None until then.
    :param pipeline: the name of the pipeline that it works on; empty until it is known.
    :param claim: the id of the :class:`Job` with which it has claimed the slot; empty before that.
    :param asked: whether this submission was asked to stop (and not the pipeline, whichever job works on it).
    :param lines: how many lines it has logged.
    :param log: the last of them; left out when nothing was logged for a while.
    :param heartbeat: seconds after which it writes this again.
    :param at: seconds since 1970, by the clock of the job's host.
    """

    kind: str
    slot: str
    owner: Owner | None = None
    host: str = ""
    pid: int = 0
    folder: str = ""
    application: str = ""
    pipeline: str = ""
    claim: str = ""
    outcome: Outcome | None = None
    asked: bool = False
    lines: int = 0
    log: list[str] = field(default_factory=list)
    heartbeat: float = 2.0
    at: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether it has reported its end."""
        return self.outcome is not None


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop, see :mod:`airflow_bottledwater.jobs.requests`: to whichever job works for a pipeline
    (:func:`request_key`), or to one that was submitted (:func:`stop_key`); or that somebody has asked a pipeline to
    stop, and when (:func:`stopped_key`).

    :param by: who has asked, see :class:`StatusRecord`.
    :param epoch: of a request to a pipeline, the epoch of the job that was seen last.
    :param pipeline: of a request to a submitted job, the name of the pipeline that is to stop with all its jobs; one of
        another pipeline does not obey. Empty if this job alone is meant.
    :param retire: whether the pipeline is to stop for good.
    :param interrupted: the number of a signal from outside the pipeline that the request passes on; 0 if a stop was
        requested.
    :param at: seconds since 1970; without it, a request to a pipeline holds only for the job of its epoch.
    """

    by: Literal["request", "task", "replacement"]
    epoch: int = 0
    pipeline: str = ""
    retire: bool = False
    interrupted: int = 0
    at: float | None = None


#: what can be done about a request where no job of the pipeline runs
TAKEN_NOW = (
    "To have it taken now, unpause the DAG bottledwater_bounded, or run bottledwater with the settings "
    "of the pipeline and --bounded."
)


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A request to read tables, or rows of them, while the stream runs, and to publish these rows again. Written by
    whoever asks; the pipeline's job removes it at the snapshot's end.

    :param tables: names or patterns, as in the pipeline's settings.
    :param where: a condition on the tables' own columns, as SQL; empty for all rows.
    :param sweep: whether keys that a table does not have (any more) get a tombstone.
    :param by_key: whether rows are read in the order of their keys instead of their blocks.
    :param rows_per_second: how many rows are read in a second at most; 0 for as many as there is time for.
    :param bytes_per_second: the same in bytes.
    :param paused: whether it is to wait; ``cancelled``: whether it is to end. What is published stays.
    :param at: seconds since 1970; the oldest request comes first.
    """

    tables: tuple[str, ...]
    where: str = ""
    sweep: bool = False
    by_key: bool = False
    rows_per_second: float = 0.0
    bytes_per_second: float = 0.0
    paused: bool = False
    cancelled: bool = False
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A request to publish no more changes of tables, or to go on with them. Written by whoever asks; the pipeline's
    job removes it when it is carried out.

    :param tables: their oids.
    :param paused: whether they are to be paused; otherwise they go on.
    :param by: who asks; ``why`` is the reason that was given.
    :param at: seconds since 1970; the oldest request comes first.
    """

    tables: tuple[int, ...]
    paused: bool
    by: str = ""
    why: str = ""
    at: float = 0.0


@dataclass(slots=True)
class SnapshotReport:
    """How far a live snapshot is; written by the pipeline's job.

    :param state: waiting, reading, sweeping, paused; or at its end finished, cancelled or failed.
    :param what: what it waits for, or reads.
    :param rows: rows published. ``superseded`` are rows that were left out since the stream has published newer ones;
        ``tombstones`` were published for keys that the tables do not have.
    :param bytes: the size of the tables' blocks that were read, of ``total_bytes``, both without TOAST. ``total_bytes``
        is 0 if it is not known: while nothing is read, and inside of a table that is read in the order of its keys.
    :param boundary: the LSN up to which the rows that were published last show the table.
    :param rows_per_second: since it is read without a break; 0 while no rows are read.
    :param seconds_left: until all rows are read (without the sweep), at that pace; None if it is not known.
    :param at: seconds since 1970, by the clock of the job's host.
    """

    state: str
    what: str = ""
    tables: list[str] = field(default_factory=list)
    rows: int = 0
    superseded: int = 0
    dead_letters: int = 0
    tombstones: int = 0
    bytes: int = 0
    total_bytes: int = 0
    rows_per_second: float = 0.0
    seconds_left: float | None = None
    boundary: str = ""
    error: str = ""
    at: float = 0.0

    @classmethod
    def removed(cls) -> SnapshotReport:
        """The end of a live snapshot that has neither a request nor a last report any more."""
        return cls("cancelled", error="its request was removed with the pipeline's saved state: the slot was dropped")

    @property
    def ended(self) -> bool:
        """Whether the snapshot has ended."""
        return self.state in SNAPSHOT_ENDS


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """What verifications have found of a pipeline, see :meth:`Verification.known_after`.

    :param rows: how many the last one of all rows of all tables has compared.
    :param different: the tables whose topics differ; of those that are ``unverified``, not all is known, and that was
        not accepted.
    :param at: when the last one of all rows of all tables has ended, in seconds since 1970; 0 if there was none.
    """

    rows: int = 0
    different: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class UntoldRecord:
    """That a pipeline has published something which no task of Airflow tells: the next bounded run does.

    :param begun: where that begins, see :meth:`ChangeRange.as_event`.
    """

    begun: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """A pipeline that publishes to a data topic; of several, the one that was written first owns it.

    :param at: seconds since 1970.
    :param dropped: whether the pipeline was dropped, or has no table any more whose rows are published to the topic: it
        does not own the topic any more, but the topic's records are known to be those of a pipeline.
    :param shared: whether other programs may write to the topic as well (``share_topics``, at the pipeline's last
        start): then its records are not known to be those of a pipeline.
    """

    pipeline: str
    at: float = 0.0
    dropped: bool = False
    shared: bool = False


ControlRecord = (
    StatusRecord | VerifiedRecord | StopRequest | OwnerRecord | JobRecord | SnapshotRequest | SnapshotReport
    | TableRequest | UntoldRecord
)  # fmt: skip

R = TypeVar("R", bound=ControlRecord)
prepare(*get_args(ControlRecord))


def encode(record: ControlRecord) -> dict[str, Any]:
    """A record as plain JSON values; fields that are None are left out."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    return {name: value for name, value in found.items() if value is not None}


def check(record: ControlRecord) -> None:
    """See that a record is read again as it is: :func:`decode` finds none where a value has another type.

    :raises Refused: it is not.
    """
    try:
        msgspec.convert(encode(record), type(record))
    except msgspec.ValidationError as error:
        raise Refused(
            f"No job could read this {type(record).__name__}: {error}.",
            "Give text as text. In a DAG with render_template_as_native_obj, a template makes a number of what looks "
            "like one; '{{ params.reason | pprint }}' gives it as it is.",
        ) from None


def decode(kind: type[R], raw: Mapping[str, Any] | None) -> R | None:
    """The inverse of :func:`encode`; None if there is no record, or it is not a valid one of this kind."""
    try:
        return None if raw is None else msgspec.convert(raw, kind)
    except (msgspec.ValidationError, OverflowError):
        return None


def last_status(name: str, raw: Mapping[str, Any] | None) -> StatusRecord | None:
    """The last status of a pipeline; None if there is none.

    :param name: the pipeline's.
    :raises StateError: this version cannot read it, so that its job may be alive.
    """
    found = decode(StatusRecord, raw)
    if found is None and raw is not None:
        raise StateError(
            f"The status of pipeline {name!r} was written by another version of the provider, and cannot be read by "
            "this one: whether its job is alive is not known.",
            "Install the version of its jobs here, too. If none of them runs any more, the next one writes it anew.",
        )
    return found
