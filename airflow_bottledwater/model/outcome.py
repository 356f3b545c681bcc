"""How a job has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job has ended, as it reports itself.

    :param ok: whether it ended without an error.
    :param stopped: whether it ended early, because it was asked to stop.
    :param kind: the class of its error.
    :param error: the error's message.
    :param transient: whether the same job may be submitted again.
    :param counts: what a job without an error reports of its work.
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
        """The result of a job that ended without an error: its counts, and whether it was stopped."""
        return {**self.counts, **({"stopped": True} if self.stopped else {})}
