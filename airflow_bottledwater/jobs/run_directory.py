"""The records in a job's run directory, typed: its id in Kafka, its processes, the request to stop it, its progress,
and how it ended.

Each is a JSON file. A file that does not exist yet and one that a full disk has left empty are both read as no record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from airflow_bottledwater.model.outcome import Outcome

#: the prefix of the run directories of the command's jobs, in the folder for temporary files
RUN_FOLDER = "bottledwater-run-"


@dataclass(frozen=True, slots=True)
class Submission:
    """What is in Kafka of the job, so that the supervisor can report the end of one that was killed.

    :param id: the job's id in the shared topic, see :func:`airflow_bottledwater.state.control_records.job_key`.
    :param kind: snapshot, stream or pipeline.
    """

    FILE: ClassVar[str] = "submission.json"
    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The job's supervisor, the leader of the process group that all processes of the job belong to.

    :param started: see :func:`airflow_bottledwater.processes.started`; None if it had ended before this could be read.
    :param host: the name of the host that its processes are on; empty if it is not known.
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
class Claimed:
    """The last claim of the job on its slot.

    :param id: see :class:`airflow_bottledwater.model.job.Job`.
    """

    FILE: ClassVar[str] = "claimed.json"
    id: str


@dataclass(frozen=True, slots=True)
class PreparedPipeline:
    """Slot, topics and schemas are made: a job that was started meanwhile may begin.

    :param snapshot: whether there is one to take.
    """

    FILE: ClassVar[str] = "prepared.json"
    snapshot: bool


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Written when the job is asked to stop, before the signal is sent: a signal alone may come from anywhere.

    :param at: seconds since 1970.
    """

    FILE: ClassVar[str] = "stop.json"
    at: float


@dataclass(frozen=True, slots=True)
class Exit:
    """How spark-submit, the job's first process, has ended.

    :param code: its exit code; if negative, the number of the signal that killed it.
    :param at: seconds since 1970.
    """

    FILE: ClassVar[str] = "exit.json"
    code: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Unreported:
    """The job could not report its outcome in Kafka: the supervisor tries it once more."""

    FILE: ClassVar[str] = "unreported.json"


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """How far a snapshot is (:class:`airflow_bottledwater.snapshot.progress.SnapshotProgress`), for a progress bar.

    :param rows_per_second: of this attempt.
    """

    FILE: ClassVar[str] = "progress.json"
    rows: int
    bytes: int
    total_bytes: int
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class Differences:
    """What a verification has found, with values of rows, which it reports nowhere else.

    :param shown: see :meth:`airflow_bottledwater.state.verification.Verification.shown`.
    """

    FILE: ClassVar[str] = "differences.json"
    shown: dict[str, Any]


RunRecord = (
    Submission
    | Unreported
    | Supervisor
    | Driver
    | Claimed
    | PreparedPipeline
    | StopAsked
    | Exit
    | ProgressReport
    | Differences
    | Outcome
)

R = TypeVar("R", bound=RunRecord)


def write(folder: Path, record: RunRecord) -> None:
    """Write a record into a run directory, completely or not at all.

    :raises OSError: the folder does not exist, or the disk is full.
    """
    temporary = folder / f".{record.FILE}-{os.getpid()}"
    # see read
    temporary.write_text(json.dumps(asdict(record)))
    temporary.rename(folder / record.FILE)


def read(folder: Path, kind: type[R]) -> R | None:
    """A record of a run directory; None if it does not exist, or is malformed."""
    try:
        # a supervisor lives as long as its job, and shall be small: it needs this only to read
        from airflow_bottledwater.decoding import from_json

        return from_json((folder / kind.FILE).read_bytes(), kind)
    # the last if this Python's packages were removed while a job ran, whose supervisor goes on
    except (OSError, ValueError, OverflowError, ImportError):
        return None


def present(folder: Path, kind: type[RunRecord]) -> bool:
    """Whether a record exists, even if it is malformed."""
    return (folder / kind.FILE).exists()
