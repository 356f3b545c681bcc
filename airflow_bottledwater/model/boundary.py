"""The snapshot's boundary: which transactions its rows already contain."""

from __future__ import annotations

from dataclasses import dataclass


def widen_xid(xid: int, near: int) -> int:
    """The 64-bit transaction id nearest to ``near`` whose low half is ``xid``.

    Its high half is not simply that of ``near``: around a wrap the transaction may belong to the neighbouring epoch.
    The signed 32-bit difference is what PostgreSQL itself orders ids by (TransactionIdPrecedes,
    src/backend/access/transam/transam.c).
    """
    difference = (xid - near) & 0xFFFFFFFF
    return near + (difference - 0x1_0000_0000 if difference >= 0x8000_0000 else difference)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ``pg_snapshot``: everything below ``xmin`` has ended, nothing from ``xmax`` on is visible, and of those
    between, the ones in ``running`` are not."""

    xmin: int
    xmax: int
    running: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Parse PostgreSQL's text ``xmin:xmax:xip,…`` (64-bit ids).

        :raises ValueError: if the text has another form.
        """
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(x) for x in running.split(",") if x))

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.running))}"

    def sees(self, xid: int) -> bool:
        """Whether rows of the (32-bit) top-level transaction are in the snapshot, if it committed."""
        wide = widen_xid(xid, self.xmax)
        return wide < self.xmax and (wide < self.xmin or wide not in self.running)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Which transactions the stream skips for one table.

    :param snapshot: B; the table is read under it (or, after a resume, partly under later snapshots).
    :param insert_lsn: L, the WAL insert position read after B: a transaction that B sees has its commit record before
        it.
    :param oldest_xid: X0; the boundary is valid only if ``snapshot.xmin >= X0``.
    :param filtered: whether the stream leaves out what B sees. False if rows of the table were published before, and it
        has a key.
    """

    snapshot: Snapshot
    insert_lsn: int
    oldest_xid: int
    filtered: bool

    def contains(self, final_lsn: int, xid: int) -> bool:
        """Whether the snapshot already contains the transaction's rows. Both conditions are needed: the LSN makes the
        filter expire by itself, the snapshot decides."""
        return self.filtered and final_lsn < self.insert_lsn and self.snapshot.sees(xid)
