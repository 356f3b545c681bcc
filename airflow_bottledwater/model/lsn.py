"""Log sequence numbers and positions in the stream."""

from __future__ import annotations

import re
from typing import NamedTuple

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
#: sixteen hex digits of LSN, eight of ordinal
POSITION = re.compile(r"([0-9A-Fa-f]{16})/([0-9A-Fa-f]{8})")


def parse_lsn(text: str) -> int:
    """``16/B374D848`` as the byte position it stands for (``pg_lsn``, src/backend/utils/adt/pg_lsn.c).

    :raises ValueError: if it is not an LSN.
    """
    match = _LSN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an LSN such as 16/B374D848")
    return (int(match[1], 16) << 32) | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """The byte position as PostgreSQL prints it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


class Position(NamedTuple):
    """How far the stream has come: inside a transaction (its final LSN, the ordinal of the last published change, from
    1); after a transaction or at a keepalive (that LSN, 0). Positions compare as tuples."""

    lsn: int
    ordinal: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        """The inverse of ``str(position)``.

        :raises ValueError: if it is not sixteen hex digits, a slash and eight.
        """
        match = POSITION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a position such as 00000000016B3748/0000000C")
        return cls(int(match[1], 16), int(match[2], 16))

    def __str__(self) -> str:
        """Fixed-width hex, so that two positions compare as text in the same order."""
        return f"{self.lsn:016X}/{self.ordinal:08X}"

    def passed(self, final_lsn: int, ordinal: int) -> bool:
        """Whether a change was already published, if this position is P.

        A transaction is skipped if its final LSN is below P's; if the two are equal, its changes up to P's ordinal are
        skipped. End LSNs are never compared: an end LSN or a keepalive may equal the next transaction's final LSN.
        """
        return final_lsn < self.lsn or (final_lsn == self.lsn and ordinal <= self.ordinal)
