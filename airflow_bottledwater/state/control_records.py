"""The records of the shared state topic, typed: the status of a pipeline's job, a request to it, and the owner of a data topic.

Keys: ``status/<pipeline>``, ``request/<pipeline>`` and ``owner/<topic>/<pipeline>``. Others may write to this topic, too: a record that
is malformed is read as if it were not there. A field that this version does not know is left out; one that is missing has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from airflow_bottledwater.model.job import Job

#: the last states of a job that ended in order, and of one that did not
_IN_ORDER, _FAILED = frozenset({"stopped", "finished"}), "failed"


def status_key(name: str) -> str:
    """The key of a pipeline's status."""
    return f"status/{name}"


def request_key(name: str) -> str:
    """The key of a request to a pipeline's job."""
    return f"request/{name}"


def owners_prefix(topic: str) -> str:
    """The prefix of the keys of all owners of a data topic."""
    return f"owner/{topic}/"


def owner_key(topic: str, name: str) -> str:
    """The key of a pipeline's ownership of a data topic."""
    return f"{owners_prefix(topic)}{name}"


@dataclass(slots=True)
class StatusRecord:
    """The status that a job reports of itself, at every heartbeat.

    :param state: starting, snapshot, streaming, waiting, stopped, finished or failed; any other state is one that a newer version
        writes, and means that the job runs.
    :param job: the job that reports it.
    :param permanent: whether it failed for good; otherwise the same job may be submitted again.
    :param retired: whether the pipeline was stopped for good, so that its slot may be dropped.
    :param heartbeat: seconds after which the job writes its status again; None: a version that did not say so, mostly two.
    :param at: seconds since 1970, by the clock of the job's host.
    """

    state: str
    job: Job
    slot: str = ""
    on_error: str = ""
    engine: str = ""
    position: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    permanent: bool = False
    retired: bool = False
    at: float = 0.0
    heartbeat: float | None = None

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
    def over(self) -> bool:
        """Whether the job has ended, and none continues it."""
        return self.ended_in_order or (self.failed and self.permanent)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to a pipeline's job to stop; for which job obeys it, see :class:`airflow_bottledwater.state.control.Controller`.

    :param command: what is requested; a command that this version does not know is not obeyed.
    :param epoch: the epoch of the job that is asked.
    :param retire: whether the pipeline is to stop for good.
    :param interrupted: the number of a signal from outside the pipeline that the request passes on; 0 if a stop was requested.
    :param at: seconds since 1970; without it, the request holds only for the job that it names.
    """

    command: Literal["stop"] = field(default="stop", kw_only=True)
    epoch: int
    retire: bool = False
    interrupted: int = 0
    at: float | None = None


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """A pipeline that publishes to a data topic; of several, the one that was written first owns it.

    :param at: seconds since 1970.
    """

    pipeline: str
    at: float = 0.0


ControlRecord = StatusRecord | StopRequest | OwnerRecord

R = TypeVar("R", bound=ControlRecord)


def encode(record: ControlRecord) -> dict[str, Any]:
    """A record as plain JSON values; fields that are None are left out."""
    found: dict[str, Any] = msgspec.to_builtins(record)
    return {name: value for name, value in found.items() if value is not None}


def decode(kind: type[R], raw: Mapping[str, Any] | None) -> R | None:
    """The inverse of :func:`encode`; None if there is no record, or it is not a valid one of this kind."""
    try:
        return None if raw is None else msgspec.convert(raw, kind)
    except (msgspec.ValidationError, OverflowError):
        return None
