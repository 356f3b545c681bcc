"""Exactly once, in order, transactions whole: topics against a log that knows every committed version of every row.

The log (``fix_writers``) is written inside the transactions that it tells of, so it is as durable as they are. This is
the comparison only: plain values in, a report out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.lsn import Position
from tests.support.history import DELETE, MOVE, TRUNCATE, UPDATE, Before, Change, Record, Truncation, rows_before


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise.

    :param kind: lost, duplicated, order, invented, stale or torn.
    """

    kind: str
    table: str
    key: int | None
    version: int | None
    xid: int
    text: str

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.text} (table {self.table}, key {self.key}, version {self.version}, transaction "
            f"{self.xid})"
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """Whether the run proves anything.

    :param in_progress: transactions of the log that ran at the boundary and committed later.
    :param skipped: that committed after the slot was made and that the snapshot contains: the stream left them out.
    :param after: that began after the boundary.
    """

    in_progress: int = 0
    skipped: int = 0
    after: int = 0
    snapshot_rows: int = 0
    stream_records: int = 0
    live_rows: int = 0
    truncated: int = 0


@dataclass(slots=True)
class Report:
    """What the checker found; ``ahead`` and ``superseded`` are the named exceptions, not errors."""

    findings: list[Finding] = field(default_factory=list)
    ahead: list[Finding] = field(default_factory=list)
    superseded: list[Finding] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def kinds(self) -> set[str]:
        """The kinds of what is wrong."""
        return {f.kind for f in self.findings}

    def __str__(self) -> str:
        counts = Counter(f.kind for f in self.findings)
        shown = [f for kind in counts for f in [f for f in self.findings if f.kind == kind][:5]]
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing wrong"
        exceptions = f"{len(self.ahead)} ahead, {len(self.superseded)} superseded"
        return "\n".join([f"{summary}; {exceptions}; {self.statistics}", *(f"  {f}" for f in shown)])

    def check(self) -> Report:
        """Fail where a promise is broken."""
        assert not self.findings, str(self)
        return self


def _sees(boundary: Snapshot, xid: int) -> bool:
    """Whether a committed transaction is visible: not the product's own comparison, and the log's ids have 64 bits."""
    return xid < boundary.xmax and xid not in boundary.running


@dataclass(frozen=True, slots=True)
class _Expected:
    """A record that a change must become; a change of the key becomes two under one position."""

    change: Change
    ordinal: int
    op: str
    key: int
    version: int | None

    def is_it(self, record: Record) -> bool:
        return (self.change.table, self.op, self.key, self.version) == (
            record.table, record.op, record.key, record.version,
        )  # fmt: skip


def _records_of(change: Change, ordinal: int) -> list[_Expected]:
    if change.op == TRUNCATE:
        return []
    if change.op == DELETE:
        assert change.old is not None
        return [_Expected(change, ordinal, "d", change.old, None)]
    assert change.new is not None
    row = _Expected(change, ordinal, "u" if change.op == MOVE else change.op, change.new, change.version)
    if change.op == MOVE:
        assert change.old is not None
        return [_Expected(change, ordinal, "d", change.old, None), row]
    return [row]


class Checker:
    """Compares the records of all topics of a pipeline with the log.

    :param boundaries: per table B; the stream leaves out what B sees, the snapshot has it.
    :param snapshot: whether there was one; if not, what B sees is simply not expected.
    :param resumed: the snapshot was resumed: rows may be ahead, or only in the stream.
    :param oldest_xid: X0, for the statistics.
    :param complete: everything that was committed must be there; otherwise transactions may be missing, but not parts.
    :param superseded: how many versions the stream says that it left out.
    :param cut_from: transactions of so many changes may be cut (0: none), and with ``cut_from_large``, those of so many
        changes of rows with large values, which an update does not bring along.
    :param positions: every P that was committed, where they are known.
    :param truncations: of the events topic.
    :param tables: those whose changes are to be there; None: all.
    :param told: what the records of a table tell of old rows: ``none``, ``header`` or ``envelope``; and behind a comma
        whether its replica identity has the ``whole`` old row, or the ``key`` only. Tables that are missing here tell
        nothing.
    :param large: what the records of a table tell of a large value, which may be masked, by the value's number.
    """

    def __init__(
        self,
        log: Iterable[Change],
        boundaries: Mapping[str, Snapshot],
        *,
        snapshot: bool = True,
        resumed: bool = False,
        oldest_xid: int = 0,
        complete: bool = True,
        superseded: int = 0,
        cut_from: int = 0,
        cut_from_large: int = 0,
        positions: Sequence[Position] = (),
        truncations: Sequence[Truncation] = (),
        tables: Collection[str] | None = None,
        told: Mapping[str, str] | None = None,
        large: Callable[[str, int], int] = lambda _, number: number,
    ) -> None:
        self._tables = boundaries.keys() if tables is None else tables
        self._log = sorted(log, key=lambda c: c.n)
        self._boundaries = boundaries
        self._snapshot, self._resumed, self._complete = snapshot, resumed, complete
        self._oldest_xid, self._may_supersede = oldest_xid, superseded
        self._cut_from, self._cut_from_large, self._positions = cut_from, cut_from_large, positions
        self._transactions: dict[int, list[Change]] = defaultdict(list)
        for change in self._log:
            self._transactions[change.xid & 0xFFFFFFFF].append(change)
        self._truncations = truncations
        #: per table, the place and the LSN of each TRUNCATE that was published
        self._emptied: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._report = Report()
        self._told, self._shown = told or {}, large
        #: the row that each change has changed or deleted, by the change's place
        self._rows_before = rows_before(self._log)
        #: every large value that was ever committed under a key
        self._large: dict[tuple[str, int], set[int]] = defaultdict(set)
        for change in self._log:
            if change.new is not None:
                self._large[change.table, change.new].add(self._large_of(change))

    def check(self, records: Sequence[Record]) -> Report:
        """:param records: of all tables; per partition in the order of their offsets."""
        rows = [r for r in records if not r.pos and not r.live]
        stream = [r for r in records if r.pos]
        if self._snapshot:
            self._check_snapshot(rows)
        else:
            for row in rows:
                self._wrong("invented", row, "a snapshot row, but no snapshot was taken")
        found = self._identify(stream)
        self._check_truncations()
        self._check_missing(found)
        self._check_order([r for r in records if not r.live], found)
        self._check_live(records, found)
        if self._complete:
            self._check_last(records)
            self._check_view(records)
        self._check_whole(records, found)
        self._report.statistics = self._count(len(rows), len(stream), len(records) - len(rows) - len(stream))
        return self._report

    def _large_of(self, change: Change) -> int:
        return self._shown(change.table, change.large)

    # ------------------------------------------------------------------ the parts
    def _sees(self, change: Change) -> bool:
        return _sees(self._boundaries[change.table], change.xid)

    def _check_snapshot(self, rows: Sequence[Record]) -> None:
        """Each key once, in the version that B sees; where the snapshot was resumed, perhaps a newer one."""
        by_version = {(c.table, c.version): c for c in self._log if c.version}
        at_boundary: dict[tuple[str, int], Change] = {}
        later: set[tuple[str, int]] = set()
        for change in self._log:
            for key in (change.old, change.new):
                if key is not None and self._sees(change):
                    at_boundary.pop((change.table, key), None)
                elif key is not None:
                    later.add((change.table, key))
            if change.new is not None and self._sees(change):
                at_boundary[change.table, change.new] = change
            if change.op == TRUNCATE and self._sees(change):
                at_boundary = {key: row for key, row in at_boundary.items() if key[0] != change.table}
        seen: set[tuple[str, int, int | None]] = set()
        for row in rows:
            identity = (row.table, row.key, row.version)
            if identity in seen:
                self._wrong("duplicated", row, f"{row} comes twice")
                continue
            seen.add(identity)
            change = by_version.get((row.table, row.version or 0))
            if change is None or change.new != row.key:
                self._wrong("invented", row, f"{row} was never committed")
            elif not self._sees(change):
                self._report.ahead.append(_finding("ahead", row, f"{row} is newer than the boundary"))
            elif at_boundary.get((row.table, row.key)) is not change:
                self._wrong("stale", row, f"{row} was changed or deleted before the boundary")
            if change is not None and row.large != (large := self._large_of(change)):
                self._wrong("invented", row, f"{row} has the large value {row.large}, not {large}")
        for (table, key), change in at_boundary.items():
            if (table, key, change.version) not in seen and not (self._resumed and (table, key) in later):
                self._miss(change, "the snapshot does not have what its boundary sees")

    def _identify(self, stream: Sequence[Record]) -> dict[tuple[int, int, str], tuple[Record, _Expected]]:
        """Each stream record's place in the log: its transaction and the number of its change."""
        found: dict[tuple[int, int, str], tuple[Record, _Expected]] = {}
        lsns: dict[int, int] = {}
        for record in stream:
            position = Position.parse(record.pos)
            changes = self._transactions.get(record.xid)
            if changes is None:
                self._wrong("invented", record, f"{record} is of a transaction that did not commit")
                continue
            if lsns.setdefault(record.xid, position.lsn) != position.lsn:
                self._wrong("invented", record, f"{record} is at another position than the rest of its transaction")
                continue
            number = position.ordinal
            change = changes[number - 1] if 0 < number <= len(changes) else None
            expected = [e for e in _records_of(change, number) if e.is_it(record)] if change else []
            if change is None or not expected:
                self._wrong("invented", record, f"{record} is not what was committed there: {change}")
                continue
            self._check_large(record, change)
            self._check_before(record, change)
            identity = (record.xid, number, record.op)
            if identity in found:
                before = found[identity][0]
                self._wrong("duplicated", record, f"{record} was at offset {before.partition}/{before.offset} already")
            elif self._sees(change):
                self._wrong("duplicated", record, f"{record} is in the snapshot already")
            else:
                found[identity] = (record, expected[0])
        return found

    def _check_truncations(self) -> None:
        """Each TRUNCATE that the boundary does not see is told once, at its place."""
        told = Counter((t.xid, Position.parse(t.pos).ordinal, t.table) for t in self._truncations)
        lsns = {t.xid: Position.parse(t.pos).lsn for t in self._truncations}
        for xid, changes in self._transactions.items():
            for number, change in enumerate(changes, 1):
                if change.op != TRUNCATE or self._sees(change):
                    continue
                times = told.pop((xid, number, change.table), 0)
                if times:
                    self._emptied[change.table].append((change.n, lsns[xid]))
                if times > 1:
                    self._report.findings.append(
                        Finding("duplicated", change.table, None, None, xid, f"a TRUNCATE is told {times} times")
                    )
                elif not times and self._complete:
                    self._miss(change, f"change {change.n}, a TRUNCATE, was committed")
        for xid, ordinal, table in told:
            text = f"the TRUNCATE at {ordinal} was not committed there"
            self._report.findings.append(Finding("invented", table, None, None, xid, text))

    def _check_large(self, record: Record, change: Change) -> None:
        """The value that the change left the row with; read afterwards, any that the key ever had."""
        if record.version is None:
            return
        allowed = self._large[record.table, record.key] if record.reread else {self._large_of(change)}
        if record.large not in allowed:
            self._wrong(
                "invented", record, f"{record} has the large value {record.large}; it could be {sorted(allowed)}"
            )

    def _check_before(self, record: Record, change: Change) -> None:
        """The old row, as far as PostgreSQL tells it: with updates and deletions only, also that of a changed key."""
        form, _, identity = self._told.get(record.table, "none, key").partition(", ")
        row, moved = self._rows_before.get(change.n), change.op == MOVE
        expected = None
        if form != "none" and row is not None and (record.op == "d" or not moved):
            if identity == "whole":
                expected = Before(change.old, row.version, self._large_of(row))
            elif form == "envelope" and record.op == "d":
                expected = Before(change.old, None)
        if record.before != expected:
            self._wrong("invented", record, f"{record} tells of {record.before} before it, and it was {expected}")

    def _final(self) -> dict[tuple[str, int], Change]:
        """The change that left each row of the tables as it is now."""
        final: dict[tuple[str, int], Change] = {}
        for change in self._log:
            if change.old is not None:
                final.pop((change.table, change.old), None)
            if change.new is not None:
                final[change.table, change.new] = change
            if change.op == TRUNCATE:
                final = {key: row for key, row in final.items() if key[0] != change.table}
        return final

    def _check_last(self, records: Sequence[Record]) -> None:
        """What is read afterwards may be newer than its record, but the last record of a key has the last value."""
        last = {(r.table, r.key): r for r in sorted(records, key=lambda r: r.offset)}
        for key, change in self._final().items():
            record = last.get(key)
            if record is not None and record.version is not None and record.large != (large := self._large_of(change)):
                self._wrong("stale", record, f"{record} ends with the large value {record.large}, not {large}")

    def _check_view(self, records: Sequence[Record]) -> None:
        """A consumer that follows the rules (docs/message-format.md) has the table: what a TRUNCATE deletes has no
        tombstone."""
        emptied = {t: max(x.pos for x in self._truncations if x.table == t) for t in self._emptied}
        view: dict[tuple[str, int], Record] = {}
        for record in sorted(records, key=lambda r: r.offset):
            view[record.table, record.key] = record
        rows = {
            key: record
            for key, record in view.items()
            if record.version is not None and not _deleted(record, emptied.get(record.table, ""))
        }
        final = self._final()
        for key, record in rows.items():
            if key not in final:
                self._wrong("stale", record, f"{record} is the last one of its key, which the table does not have")
            elif record.version != final[key].version:
                self._wrong("stale", record, f"{record} is the last one of its key, whose row is {final[key]}")
        known = {(f.table, f.version) for f in self._report.findings if f.kind == "lost"}
        for key in final.keys() - rows.keys():
            # without a snapshot, only what was changed since is in the topic
            expected = self._snapshot or not self._sees(final[key])
            if expected and (key[0], final[key].version) not in known:
                self._miss(final[key], f"the last record of the row is {view.get(key)}")

    def _check_missing(self, found: Mapping[tuple[int, int, str], object]) -> None:
        """Every record of every transaction that the boundary does not see."""
        candidates: list[Change] = []
        tombstones: set[int] = set()
        published: dict[tuple[str, int], int] = {}
        emptied = {table: max(n for n, _ in some) for table, some in self._emptied.items()}
        for xid, changes in self._transactions.items():
            expected = [
                e
                for i, c in enumerate(changes)
                if c.table in self._tables and not self._sees(c)
                for e in _records_of(c, i + 1)
            ]  # fmt: skip
            missing = [e for e in expected if (xid, e.ordinal, e.op) not in found]
            lost = {e.change.n for e in missing}
            bare = {e.change.n for e in missing if e.op == "d"}  # not even the old key's tombstone is there
            for e in expected:
                if e not in missing:
                    key = (e.change.table, e.key)
                    published[key] = max(published.get(key, 0), e.change.n)
            if missing and (self._complete or len(missing) < len(expected)):
                candidates += [c for c in changes if c.n in lost]
                tombstones |= bare
        for change in candidates:
            # a value that had to be read again when the row was gone: a later change of the key, or a TRUNCATE, has
            # come instead
            key = (change.table, change.new if change.new is not None else -1)
            if (
                (change.op in (UPDATE, MOVE) or change.entered)
                and change.n not in tombstones
                and len(self._report.superseded) < self._may_supersede
                and max(published.get(key, 0), emptied.get(change.table, 0)) > change.n
            ):
                self._report.superseded.append(
                    Finding("superseded", change.table, change.new, change.version, change.xid, f"{change}")
                )
                continue
            self._miss(change, f"change {change.n} ({change.op}) was committed")
        self._check_torn(candidates, found)

    def _check_torn(self, missing: Sequence[Change], found: Mapping[tuple[int, int, str], object]) -> None:
        excused = {f.version for f in self._report.superseded}
        partly = {c.xid & 0xFFFFFFFF for c in missing if c.version not in excused}
        for xid in sorted(partly & {xid for xid, _, _ in found}):
            there = sum(1 for other, _, _ in found if other == xid)
            self._report.findings.append(
                Finding("torn", "", None, None, xid, f"only {there} records of it are there, others are missing")
            )

    def _check_order(
        self, records: Sequence[Record], found: Mapping[tuple[int, int, str], tuple[Record, _Expected]]
    ) -> None:
        """Per key one partition, and the order of the log."""
        numbers = {id(record): expected.change.n for record, expected in found.values()}
        last: dict[tuple[str, int], tuple[Record, int]] = {}
        homes: dict[tuple[str, int], int] = {}
        for record in sorted(records, key=lambda r: (r.table, r.partition, r.offset)):
            key = (record.table, record.key)
            if homes.setdefault(key, record.partition) != record.partition:
                self._wrong("order", record, f"{record}, but the key was in partition {homes[key]} before")
            if not record.pos:
                if key in last:
                    self._wrong("order", record, f"{record} follows {last[key][0]}")
                continue
            n = numbers.get(id(record))
            if n is None:
                continue  # it is a finding already
            if key in last and (last[key][1] >= n or last[key][0].pos >= record.pos):
                self._wrong("order", record, f"{record} follows {last[key][0]}")
            last[key] = (record, n)

    def _check_live(
        self, records: Sequence[Record], found: Mapping[tuple[int, int, str], tuple[Record, _Expected]]
    ) -> None:
        """A row that is read again is what its topic has already: neither older nor newer, and no row that was deleted.
        (Newer it may be than a version that was left out since it had to be read again.)"""
        numbers = {id(record): expected.change.n for record, expected in found.values()}
        by_version = {(c.table, c.version): c for c in self._log if c.version}
        left_out = {(f.table, f.version) for f in self._report.superseded}
        last: dict[tuple[str, int], tuple[Record, int]] = {}
        for record in sorted(records, key=lambda r: (r.table, r.partition, r.offset)):
            key = (record.table, record.key)
            if not record.live:
                row = by_version.get((record.table, record.version or 0))
                n = numbers.get(id(record), 0 if row is None else row.n)
                last[key] = (record, n)
                continue
            change = by_version.get((record.table, record.version or 0))
            before, n = last.get(key, (None, 0))
            emptied = max((at for at, lsn in self._emptied.get(record.table, ()) if lsn < record.shown), default=0)
            if record.version is None:
                if before is None or before.version is None or emptied <= n:
                    self._wrong("invented", record, f"{record} was swept, but is there, behind {before}")
                last[key] = (record, n)
            elif change is None or change.new != record.key or self._large_of(change) != record.large:
                self._wrong("invented", record, f"{record} is read again, but is not what was committed: {change}")
            elif change.n < n:
                self._wrong("order", record, f"{record} is read again behind {before}")
            elif change.n < emptied:
                self._wrong("stale", record, f"{record} says that it was read behind the TRUNCATE that deleted it")
            elif change.n > n and (record.table, record.version) not in left_out:
                self._wrong("order", record, f"{record} is read again before its change was published, behind {before}")

    def _check_whole(
        self, records: Sequence[Record], found: Mapping[tuple[int, int, str], tuple[Record, _Expected]]
    ) -> None:
        """A transaction's records are in one Kafka transaction: nothing (no marker, no aborted record) lies between
        them in a partition, and no P lies inside it."""
        offsets: dict[tuple[str, int], set[int]] = defaultdict(set)
        for record in records:
            offsets[record.table, record.partition].add(record.offset)
        spans: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        lsns: dict[int, tuple[int, int]] = {}
        for (xid, ordinal, _), (record, _) in found.items():
            spans[xid, record.table, record.partition].append(record.offset)
            lsn = Position.parse(record.pos).lsn
            lsns[lsn] = (xid, max(ordinal, lsns.get(lsn, (xid, 0))[1]))
        for (xid, table, partition), held in spans.items():
            first, last = min(held), max(held)
            gaps = [o for o in range(first, last) if o not in offsets[table, partition]]
            if gaps and not self._may_be_cut(xid):
                text = (
                    f"its records at offsets {partition}/{first} to {last} are of several Kafka transactions"
                    f" ({gaps[0]} is between)"
                )
                self._report.findings.append(Finding("torn", table, None, None, xid, text))
        for position in self._positions:
            xid, ordinal = lsns.get(position.lsn, (0, 0))
            if 0 < position.ordinal < ordinal and not self._may_be_cut(xid):
                self._report.findings.append(Finding("torn", "", None, None, xid, f"P was {position}, inside it"))

    def _may_be_cut(self, xid: int) -> bool:
        changes = self._transactions[xid]
        large = sum(change.large > 0 for change in changes)
        return 0 < self._cut_from <= len(changes) or 0 < self._cut_from_large <= large

    # ------------------------------------------------------------------ words
    def _wrong(self, kind: str, record: Record, text: str) -> None:
        self._report.findings.append(_finding(kind, record, text))

    def _miss(self, change: Change, text: str) -> None:
        key = change.new if change.new is not None else change.old
        self._report.findings.append(Finding("lost", change.table, key, change.version or None, change.xid, text))

    def _count(self, rows: int, stream: int, live: int) -> Statistics:
        in_progress, skipped, after = set(), set(), set()
        for change in self._log:
            boundary = self._boundaries[change.table]
            if change.xid in boundary.running:
                in_progress.add(change.xid)
            elif _sees(boundary, change.xid):
                # an id from X0 on was given after the slot's start, so it committed after it
                if change.xid >= self._oldest_xid > 0:
                    skipped.add(change.xid)
            else:
                after.add(change.xid)
        truncated = sum(len(some) for some in self._emptied.values())
        return Statistics(len(in_progress), len(skipped), len(after), rows, stream, live, truncated)


def _finding(kind: str, record: Record, text: str) -> Finding:
    return Finding(kind, record.table, record.key, record.version, record.xid, text)


def _deleted(record: Record, truncate: str) -> bool:
    """Whether the row of a record is one of those that a TRUNCATE at this position has deleted, as
    docs/message-format.md says."""
    if not truncate:
        return False
    if record.pos:
        return record.pos < truncate
    return record.shown <= Position.parse(truncate).lsn


def uncommitted_rule(records: Iterable[Record]) -> list[Record]:
    """What a consumer keeps that reads uncommitted and drops, per key, whatever has no higher position."""
    highest: dict[tuple[str, int], str] = {}
    kept = []
    for record in records:
        key = (record.table, record.key)
        if record.pos and record.pos <= highest.get(key, ""):
            continue
        highest[key] = max(record.pos, highest.get(key, ""))
        kept.append(record)
    return kept


def recovery_times(kills: Iterable[float], arrivals: Iterable[float]) -> list[float | None]:
    """Per kill the seconds to the first record that became visible after it; None if none did."""
    times = sorted(arrivals)
    return [next((t - kill for t in times if t > kill), None) for kill in kills]
