"""The records in a job's run directory, typed: for whom it runs, its processes, the request to stop it, its progress, and how it ended.

Each is a file of JSON. Whoever reads one may find that it is not there yet, or that a full disk has left it empty: both are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec


@dataclass(frozen=True, slots=True)
class Owner:
    """The run of a DAG that the job works for: by it, another task of the run finds what was left of it."""

    FILE: ClassVar[str] = "owner.json"
    dag_id: str
    run_id: str
    slot: str
    postgres_conn_id: str


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The job's supervisor, whose process group is the job.

    :param started: see :func:`airflow_bottledwater.processes.started`; None: it was gone before it could be looked at.
    :param host: which host its processes are on; empty: it is not known.
    """

    FILE: ClassVar[str] = "supervisor.json"
    pid: int
    started: int | None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """Spark's driver: the process that a stop is sent to."""

    FILE: ClassVar[str] = "driver.json"
    pid: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Slot, topics and schemas are made: a job that was started meanwhile may begin.

    :param snapshot: whether there is one to take.
    """

    FILE: ClassVar[str] = "prepared.json"
    snapshot: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Left by whoever asks the job to stop, before the signal: a signal alone may come from anywhere.

    :param at: seconds since 1970.
    """

    FILE: ClassVar[str] = "stop.json"
    at: float


@dataclass(frozen=True, slots=True)
class Exit:
    """How the job's first process has ended.

    :param code: of its exit; negative: the signal that killed it.
    :param at: seconds since 1970.
    """

    FILE: ClassVar[str] = "exit.json"
    code: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a snapshot is (:class:`airflow_bottledwater.snapshot.progress.SnapshotProgress`), for a bar.

    :param rows_per_second: of this attempt.
    """

    FILE: ClassVar[str] = "progress.json"
    rows: int
    bytes: int
    total_bytes: int
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job has ended, as it says itself.

    :param ok: without an error.
    :param stopped: before its end, because somebody asked it to.
    :param kind: the class of its error.
    :param error: its message.
    :param transient: the same job may be submitted again.
    :param counts: what a job without an error reports of its work; in the file they stand beside the other fields.
    """

    FILE: ClassVar[str] = "outcome.json"
    ok: bool
    stopped: bool = False
    kind: str = ""
    error: str = ""
    transient: bool = False
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> dict[str, Any]:
        """What a job without an error gives to whoever waits for it."""
        return {**self.counts, **({"stopped": True} if self.stopped else {})}


RunRecord = Owner | Supervisor | Driver | Prepared | StopAsked | Exit | Progress | Outcome

R = TypeVar("R", bound=RunRecord)


_OWN = frozenset(each.name for each in fields(Outcome)) - {"counts"}


def _encode(record: RunRecord) -> dict[str, Any]:
    if isinstance(record, Outcome):
        if record.ok:
            return {"ok": True, **record.result}
        return {"ok": False, "kind": record.kind, "error": record.error, "transient": record.transient}
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found


def _decode(kind: type[R], raw: Mapping[str, Any]) -> R:
    """:raises msgspec.ValidationError: it is malformed."""
    if kind is Outcome:
        counts = {name: value for name, value in raw.items() if name not in _OWN}
        raw = {**{name: raw[name] for name in _OWN & raw.keys()}, "counts": counts}
    return msgspec.convert(raw, kind)


def write(folder: Path, record: RunRecord) -> None:
    """Leave a record in a run directory: all of it, or nothing.

    :raises OSError: there is no such folder, or no place.
    """
    temporary = folder / f".{record.FILE}-{os.getpid()}"
    temporary.write_text(json.dumps(_encode(record)))
    temporary.rename(folder / record.FILE)


def read(folder: Path, kind: type[R]) -> R | None:
    """A record of a run directory; None if it is not there, or malformed."""
    try:
        return _decode(kind, msgspec.convert(json.loads((folder / kind.FILE).read_text()), dict[str, Any]))
    except (OSError, ValueError, OverflowError):
        return None


def present(folder: Path, kind: type[RunRecord]) -> bool:
    """Whether there is such a record, whatever it says."""
    return (folder / kind.FILE).exists()
