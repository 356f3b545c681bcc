"""A table of the pipeline whose changes are sent as those of another one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttachedTable:
    """A table of the pipeline that was attached below another one of its tables, which is published as one. PostgreSQL
    sends its changes as that one's: its own topic lacks them.

    :param root: the other one's name, for messages.
    """

    root: str
