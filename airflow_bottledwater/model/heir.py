"""A table that is to get the topic of one that was dropped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heir:
    """A table that was created under the name of one that was dropped.

    :param name: its name, for messages.
    :param lsn: everything of the dropped table was committed before it: when the stream has passed it, nothing of that is left.
    """

    name: str
    lsn: int
