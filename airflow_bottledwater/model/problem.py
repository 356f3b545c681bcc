"""What is not as it is meant in a pipeline whose job goes on: told by the job, and red wherever a person looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wanted and not done, or not done as it is meant, although the job runs: a table that is not
    followed, say.

    :param kind: a short, stable name of what is wrong, for programs: ``not-followed``, ``throttled``, ``dead-letters``,
        …
    :param subject: the table, topic, subject or server that it is about.
    :param reason: why, as a full sentence.
    :param remedy: what the reader can do, as a full sentence; empty if it mends itself.
    :param since: seconds since 1970 when it was first seen, by the clock of the job's host.
    :param count: how many there are: one stands for those that a status has no room for.
    """

    kind: str
    subject: str
    reason: str
    remedy: str = ""
    since: float = 0.0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}{' ' if self.remedy else ''}{self.remedy}"
