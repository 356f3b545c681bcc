"""Cutting batches, held against a slow model of what must be in them."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.encoding.masks import Mask
from airflow_bottledwater.errors import (
    BottledWaterError,
    CredentialsRefused,
    Outage,
    ProtocolError,
    Refused,
    TableRefused,
)
from airflow_bottledwater.model.boundary import Boundary, Snapshot
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import Column
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import ddl, pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.assemble import TABLE
from airflow_bottledwater.stream.assembler import TransactionAssembler
from tests.support import wire as w
from tests.support.examples import examples

pytestmark = pytest.mark.slow

OIDS = (16384, 16390, 2**32 - 5)


# ------------------------------------------------------------------ a history, and how PostgreSQL would send it
@dataclass(frozen=True)
class Row:
    message: bytes
    oid: int
    version: int


@dataclass(frozen=True)
class Truncate:
    oids: tuple[int, ...]
    versions: tuple[int, ...]
    options: int


@dataclass(frozen=True)
class Again:
    """A Relation message that says nothing new."""

    oid: int
    version: int


@dataclass(frozen=True)
class Logical:
    """A logical message; one of no transaction has its place in the WAL, from ``begin`` to ``end``."""

    message: bytes
    #: as what it is published; None if it is not
    published: bytes | None
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class Keepalive:
    lsn: int


@dataclass(frozen=True)
class Transaction:
    final: int
    end: int
    xid: int
    micros: int
    items: tuple[Row | Truncate | Again | Keepalive | Logical, ...]


History = list[Transaction | Keepalive | Logical]


def relation(oid: int, version: int) -> bytes:
    return w.relation(oid, [(True, "id", w.INT4, -1), (False, f"v{version}", w.TEXT, -1)])


def served(history: History, start: int) -> Iterator[bytes]:
    """What a session that starts at an LSN receives: transactions whose commit record lies at or after it."""
    announced: dict[int, int] = {}

    def announce(oid: int, version: int, always: bool = False) -> Iterator[bytes]:
        if always or announced.get(oid) != version:
            announced[oid] = version
            yield w.xlog(relation(oid, version))

    for item in history:
        if isinstance(item, Keepalive | Logical):
            if isinstance(item, Logical) and item.begin >= start:
                yield w.xlog(item.message)
            elif isinstance(item, Keepalive) and item.lsn >= start:
                yield w.keepalive(item.lsn)
            continue
        if item.final < start:
            continue
        yield w.xlog(w.begin(item.final, item.xid & 0xFFFFFFFF, item.micros))
        for part in item.items:
            if isinstance(part, Keepalive):
                yield w.keepalive(part.lsn, True)
            elif isinstance(part, Again):
                yield from announce(part.oid, part.version, True)
            elif isinstance(part, Logical):
                yield w.xlog(part.message)
            elif isinstance(part, Row):
                yield from announce(part.oid, part.version)
                yield w.xlog(part.message)
            else:
                for oid, version in zip(part.oids, part.versions, strict=True):
                    yield from announce(oid, version)
                yield w.xlog(w.truncate(part.oids, part.options))
        yield w.xlog(b"Y" + b"\0" * 8)
        yield w.xlog(w.commit(item.final, item.end))


#: when the server has sent each message, in milliseconds
SENT = 946_684_800_000

#: (kind, bytes, table and version, final LSN, ordinal, xid, milliseconds)
Change = tuple[int, bytes, tuple[int, int], int, int, int, int]


def expected(history: History, start: Position, boundaries: dict[int, Boundary]) -> list[Change]:
    """The model: every change but those that P has passed and those that a boundary contains."""
    changes: list[Change] = []
    for transaction in history:
        if isinstance(transaction, Keepalive):
            continue
        if isinstance(transaction, Logical):
            if transaction.published is not None and transaction.begin >= start.lsn:
                changes.append((ord("M"), transaction.published, (0, 0), transaction.end - 1, 1, 0, SENT))
            continue
        ordinal = 0
        millis = (transaction.micros + 946_684_800_000_000) // 1000
        for item in transaction.items:
            if isinstance(item, Again | Keepalive):
                continue
            ordinal += 1
            if start.passed(transaction.final, ordinal):
                continue
            xid = transaction.xid & 0xFFFFFFFF
            if isinstance(item, Logical):
                if item.published is not None:
                    changes.append((ord("M"), item.published, (0, 0), transaction.final, ordinal, xid, millis))
                continue
            oids = [item.oid] if isinstance(item, Row) else list(item.oids)
            left = [
                oid for oid in oids if oid not in boundaries or not boundaries[oid].contains(transaction.final, xid)
            ]
            if not left:
                continue
            if isinstance(item, Row):
                message, version = item.message, item.version
            else:
                message, version = w.truncate(left, item.options), item.versions[item.oids.index(left[0])]
            changes.append((message[0], message, (left[0], version), transaction.final, ordinal, xid, millis))
    return changes


def resolver(
    calls: list[tuple[int, int]], foreign: int = 0
) -> Callable[[pgoutput.RelationMessage, Version | None], Version | None]:
    def resolve(message: pgoutput.RelationMessage, current: Version | None) -> Version | None:
        if message.oid == foreign:
            return None
        version = int(message.columns[1].name[1:])
        assert current is None or current.table.oid == message.oid
        calls.append((message.oid, version))
        table = w.table(("id", w.plain(w.INT4)), (f"v{version}", w.plain(w.TEXT)), key=["id"], oid=message.oid)
        return Version(table, f"topic {message.oid}", 0, version)

    return resolve


def content(batch: Batch) -> list[Change]:
    """A batch as the model's changes."""
    found: list[Change] = []
    for row in batch.changes:
        version = batch.versions[row["relation"]]
        at = row["offset"]
        message = bytes(batch.data[at : at + row["length"]])
        key = (version.table.oid, version.value_schema)
        found.append((row["kind"], message, key, row["lsn"], row["ordinal"], row["xid"], row["time"]))
    return found


#: as what messages are published, by their prefixes
MESSAGES = {
    "mail": Version(w.table(oid=0), "mails"),
    "mail 2": Version(w.table(oid=0), "mails"),
    ddl.PREFIX: Version(w.table(oid=0), "statements"),
}


def statement(content: bytes, _: Callable[[int], Version | None]) -> bytes:
    """What is published of a DDL statement: shorter, as long, or longer."""
    return bytes(len(content) * 17 % 41)


@dataclass
class Run:
    batches: list[Batch] = field(default_factory=list)
    resolved: list[tuple[int, int]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    assembler: TransactionAssembler | None = None

    @property
    def changes(self) -> list[Change]:
        return [change for batch in self.batches for change in content(batch)]


def run(
    history: History,
    start: Position,
    boundaries: dict[int, Boundary],
    *,
    limit: int,
    most: int,
    sizes: list[int],
    empty: bool = False,
    restarts: tuple[int, ...] = (),
    rests: bool = False,
    foreign: int = 0,
) -> Run:
    """Cut the history; ``restarts`` are numbers of blocks after which the connection breaks, ``rests`` whether memory
    is given up after each block, ``foreign`` is a table that is left out."""
    made = Run()
    assembler = made.assembler = TransactionAssembler(
        start, boundaries, resolver(made.resolved, foreign), batch_bytes=limit, largest_transaction=most,
        unknown=lambda message: made.left_out.append(message.oid), 
    )  # fmt: skip
    assembler.take_messages(MESSAGES.get, statement)
    blocks = itertools.count(1)
    while True:
        messages = list(served(history, assembler.position.lsn))
        lengths = itertools.cycle(sizes)
        broken = False
        while messages and not broken:
            size = next(lengths)
            assembler.add(w.block(messages[:size]))
            messages = messages[size:]
            while (batch := assembler.cut()) is not None:
                made.batches.append(batch)
            if empty and (batch := assembler.flush(empty=True)) is not None:
                made.batches.append(batch)
            if rests:
                assembler.rest()
            broken = next(blocks) in restarts
        if not broken:
            break
        assembler.restart()
    if (batch := assembler.flush(empty=True)) is not None:
        made.batches.append(batch)
    return made


# ------------------------------------------------------------------ generated histories
@st.composite
def logicals(draw: st.DrawFn, begin: int) -> Logical:
    """:param begin: where it begins in the WAL; 0 for one of a transaction."""
    prefix = draw(st.sampled_from([*MESSAGES, "other", ""]))
    end = begin and begin + draw(st.integers(24, 50))
    content = bytes(draw(st.integers(0, 40)))
    message = w.logical(prefix, content, end, transactional=not begin)
    shown = statement(content, {}.get) if prefix == ddl.PREFIX else content
    published = w.logical(prefix, shown, end, transactional=not begin) if prefix in MESSAGES else None
    return Logical(message, published, begin, end)


@st.composite
def histories(draw: st.DrawFn) -> History:
    lsn = draw(st.sampled_from([1, 2**32 - 50]))
    xid = draw(st.sampled_from([700, 3 * 2**32 - 3, 2**31 - 2]))
    versions = dict.fromkeys(OIDS, 0)
    history: History = []
    for _ in range(draw(st.integers(1, 7))):
        lsn += draw(st.integers(0, 5))
        if draw(st.booleans()):
            history.append(Keepalive(lsn))
        if draw(st.integers(0, 2)) == 0:
            history.append(draw(logicals(lsn)))
            lsn = history[-1].end  # type: ignore[union-attr]
        begun = lsn + 1
        final = begun + draw(st.integers(0, 20))
        items: list[Row | Truncate | Again | Keepalive | Logical] = []
        for _ in range(draw(st.integers(0, 8))):
            oid = draw(st.sampled_from(OIDS))
            what = draw(st.sampled_from("IIIUUDTAVKM"))
            value = bytes(draw(st.integers(0, 40)))
            if what == "V":
                versions[oid] += 1
            elif what == "A":
                items.append(Again(oid, versions[oid]))
            elif what == "K":
                # inside a transaction it may be anywhere up to the commit record
                items.append(Keepalive(draw(st.integers(lsn, final))))
            elif what == "M":
                items.append(draw(logicals(0)))
            elif what == "T":
                oids = tuple(draw(st.lists(st.sampled_from(OIDS), min_size=1, max_size=3, unique=True)))
                items.append(Truncate(oids, tuple(versions[o] for o in oids), draw(st.integers(0, 3))))
            elif what == "I":
                items.append(Row(w.insert(oid, b"id", value), oid, versions[oid]))
            elif what == "U":
                items.append(
                    Row(
                        w.update(oid, b"id", value, old=draw(st.sampled_from([None, [b"id", None]]))),
                        oid,
                        versions[oid],
                    )
                )
            else:
                items.append(Row(w.delete(oid, b"id", None), oid, versions[oid]))
        lsn = final + draw(st.integers(1, 10))
        xid += draw(st.integers(1, 3))
        history.append(Transaction(final, lsn, xid, draw(st.integers(-(10**15), 10**15)), tuple(items)))
    if draw(st.booleans()):
        history.append(Keepalive(lsn + draw(st.integers(0, 5))))
    return history


@st.composite
def boundaries_of(draw: st.DrawFn, history: History) -> dict[int, Boundary]:
    transactions = [t for t in history if isinstance(t, Transaction)]
    xids = [t.xid for t in transactions]
    found = {}
    for oid in OIDS:
        if draw(st.booleans()):
            # one snapshot is shared by the tables of one holder
            running = tuple(sorted(draw(st.sets(st.sampled_from(xids), max_size=3))))
            xmax = max([draw(st.integers(xids[0] - 1, xids[-1] + 3)), *(x + 1 for x in running)])
            xmin = running[0] if running else xmax
            lsn = draw(st.sampled_from([0, 2**62] + [t.final + d for t in transactions for d in (0, 1)]))
            found[oid] = Boundary(Snapshot(xmin, xmax, running), lsn, xmin, draw(st.sampled_from([True, True, False])))
    return found


@st.composite
def starts(draw: st.DrawFn, history: History) -> Position:
    """Everything that P can be: nothing yet, after a transaction, at a keepalive, inside a transaction."""
    options = [Position(0, 0)]
    for item in history:
        if isinstance(item, Keepalive):
            options.append(Position(item.lsn, 0))
        elif isinstance(item, Logical):
            options += [Position(item.begin, 0), Position(item.end, 0)]
        else:
            options += [Position(item.end, 0), *(Position(item.final, n) for n in range(1, len(item.items) + 2))]
    return draw(st.sampled_from(options))


@st.composite
def cases(draw: st.DrawFn) -> tuple[History, Position, dict[int, Boundary]]:
    history = draw(histories())
    return history, draw(starts(history)), draw(boundaries_of(history))


small = st.sampled_from([1, 30, 60, 100, 200, 10**6])
blocks = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@settings(max_examples=examples(100))
@given(cases(), small, small, blocks, st.booleans(), st.lists(st.integers(1, 20), max_size=3), st.booleans())
def test_batches_are_contiguous_and_hold_what_the_model_says(
    case: tuple[History, Position, dict[int, Boundary]],
    limit: int,
    most: int,
    sizes: list[int],
    empty: bool,
    restarts: list[int],
    rests: bool,
) -> None:
    history, start, boundaries = case
    made = run(
        history,
        start,
        boundaries,
        limit=limit,
        most=most,
        sizes=sizes,
        empty=empty,
        restarts=tuple(restarts),
        rests=rests,
    )
    assert made.changes == expected(history, start, boundaries)
    reached = start
    for batch in made.batches:
        assert batch.start == reached
        assert batch.end > batch.start
        for change in batch.changes:
            position = Position(change["lsn"], change["ordinal"])
            assert not batch.start.passed(*position)
            assert batch.end.passed(*position)
        reached = batch.end
    assert made.assembler is not None and made.assembler.position == reached
    last = [t.lsn if isinstance(t, Keepalive) else t.end for t in history][-1]
    assert reached.lsn >= last or start.lsn >= last


@settings(max_examples=examples(80))
@given(cases(), small, small, blocks, st.booleans())
def test_a_restart_at_any_batchs_end_gives_exactly_the_rest(
    case: tuple[History, Position, dict[int, Boundary]], limit: int, most: int, sizes: list[int], empty: bool
) -> None:
    history, start, boundaries = case
    made = run(history, start, boundaries, limit=limit, most=most, sizes=sizes, empty=empty)
    for i, batch in enumerate(made.batches):
        again = run(history, batch.end, boundaries, limit=10**6, most=10**6, sizes=[1000])
        assert again.changes == [c for b in made.batches[i + 1 :] for c in content(b)]


@settings(max_examples=examples(80))
@given(cases(), small, small, blocks)
def test_only_a_transaction_over_the_limit_is_cut_inside(
    case: tuple[History, Position, dict[int, Boundary]], limit: int, most: int, sizes: list[int]
) -> None:
    history, start, boundaries = case
    bytes_of: dict[int, int] = {}
    for change in expected(history, start, boundaries):
        bytes_of[change[3]] = bytes_of.get(change[3], 0) + len(change[1])
    ends = {t.end for t in history if isinstance(t, Transaction)} | {k.lsn for k in history if isinstance(k, Keepalive)}
    ends |= {m.end for m in history if isinstance(m, Logical)}
    for batch in run(history, start, boundaries, limit=limit, most=most, sizes=sizes).batches:
        finals = set(batch.changes["lsn"].tolist())
        if batch.end.ordinal:
            assert finals == {batch.end.lsn}
            assert bytes_of[batch.end.lsn] > most
            # a TRUNCATE is small and goes along
            sized = [c for c in content(batch) if c[0] != pgoutput.TRUNCATE]
            assert len(sized) <= 1 or sum(len(c[1]) for c in sized) <= most
        else:
            assert batch.end.lsn in ends


@settings(max_examples=examples(80))
@given(histories(), blocks)
def test_a_repeated_relation_message_is_no_new_version(history: History, sizes: list[int]) -> None:
    made = run(history, Position(0, 0), {}, limit=10**6, most=10**6, sizes=sizes)
    changed: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    for message in served(history, 0):
        if message[:1] == b"w" and message[25:26] == b"R":
            decoded = pgoutput.relation(message[25:])
            version = int(decoded.columns[1].name[1:])
            if known.get(decoded.oid) != version:
                known[decoded.oid] = version
                changed.append((decoded.oid, version))
    assert made.resolved == changed


def test_changes_before_and_behind_a_repeated_relation_message_have_numbers_of_their_own() -> None:
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=1 << 30, largest_transaction=1 << 30)
    row, again = w.xlog(w.insert(1, b"id", b"a")), w.xlog(relation(1, 0))
    for final in range(10, 40, 10):
        parts = [w.xlog(w.begin(final, 1)), again, again, row, row, again, row, again, again, row]
        assembler.add(w.block([*parts, w.xlog(w.commit(final, final + 1))]))
        assert assembler.cut() is None
        batch = assembler.flush(empty=False)
        assert batch is not None
        first, same, second, third = batch.changes["relation"].tolist()
        assert first == same and len({first, second, third}) == 3
        # the numbers are used again, since the message is repeated for as long as the stream runs
        assert len(assembler._versions) == 3
        assert len(set(map(id, batch.versions))) == 1


def test_a_table_with_arrays_is_looked_at_when_its_message_is_repeated() -> None:
    """ALTER TABLE can declare another number of dimensions, which a Relation message does not have."""
    calls, dimensions = list[int](), 1

    def resolve(message: pgoutput.RelationMessage, current: Version | None) -> Version:
        calls.append(message.oid)
        made = w.table(("id", w.plain(w.INT4)), ("v0", w.array(w.plain(w.TEXT), dimensions)), oid=message.oid)
        return current if current is not None and current.table == made else Version(made, "t", 0, dimensions)

    assembler = TransactionAssembler(Position(0, 0), {}, resolve, batch_bytes=1 << 30, largest_transaction=1 << 30)
    row, again = w.xlog(w.insert(1, b"id", b"a")), w.xlog(relation(1, 0))
    for final, dimensions in enumerate((1, 1, 2, 2), start=10):  # noqa: B007
        assembler.add(w.block([w.xlog(w.begin(final, 1)), again, row, w.xlog(w.commit(final, final + 1))]))
        assert assembler.cut() is None
    batch = assembler.flush(empty=False)
    assert batch is not None and calls == [1, 1, 1, 1]
    assert [each[2] for each in content(batch)] == [(1, 1), (1, 1), (1, 2), (1, 2)]
    # changes on both sides of a repeated message have numbers of their own
    assert len(set(batch.changes["relation"].tolist())) == 4


@given(histories())
def test_a_truncate_brings_the_versions_of_all_its_tables(history: History) -> None:
    truncated = 0
    for batch in run(history, Position(0, 0), {}, limit=60, most=60, sizes=[5]).batches:
        known = {v.table.oid for v in batch.versions}
        for change in content(batch):
            if change[0] == pgoutput.TRUNCATE:
                assert set(pgoutput.truncate(change[1]).oids) <= known
                truncated += 1
    assume(truncated)


@given(histories(), st.integers(0, 10**3))
def test_the_part_of_a_batch_before_a_transaction_ends_where_that_begins(history: History, which: int) -> None:
    for batch in run(history, Position(0, 0), {}, limit=10**6, most=10**6, sizes=[100]).batches:
        finals = sorted(set(batch.changes["lsn"].tolist()))
        if finals:
            final = finals[which % len(finals)]
            before = batch.before(final)
            assert content(before) == [c for c in content(batch) if c[3] < final]
            again = run(history, before.end, {}, limit=10**6, most=10**6, sizes=[100])
            assert again.changes == [c for c in content(batch) if c[3] >= final]


@given(cases())
def test_the_statistics_count_what_boundaries_leave_out(case: tuple[History, Position, dict[int, Boundary]]) -> None:
    history, _, boundaries = case
    only_rows: History = [
        Transaction(t.final, t.end, t.xid, t.micros, tuple(i for i in t.items if not isinstance(i, Truncate)))
        if isinstance(t, Transaction)
        else t
        for t in history
    ]
    made = run(only_rows, Position(0, 0), boundaries, limit=10**6, most=10**6, sizes=[7])
    assert made.assembler is not None
    everything, left = expected(only_rows, Position(0, 0), {}), expected(only_rows, Position(0, 0), boundaries)
    hidden = [c for c in everything if c not in left]
    assert made.assembler.statistics["transactions"] == sum(isinstance(t, Transaction) for t in only_rows)
    assert made.assembler.statistics["skipped_changes"] == len(everything) - len(left)
    assert made.assembler.statistics["skipped_transactions"] == len({c[3] for c in hidden})


def test_what_is_left_out_of_tables_that_bore_one_name_is_added_up() -> None:
    assembler = object.__new__(TransactionAssembler)
    assembler._tables = np.zeros(3, dtype=TABLE)
    assembler._tables["oid"], assembler._tables["skipped_transactions"] = (1, 2, 3), (5, 7, 0)
    assembler._messages = {oid: pgoutput.RelationMessage(oid, "public", "staging", "d", ()) for oid in (1, 2, 3)}
    assert assembler.skipped_by_table == {"public.staging": 12}


@settings(max_examples=examples(80))
@given(cases(), small, small, blocks, st.lists(st.integers(1, 20), max_size=3))
def test_a_table_that_is_not_followed_is_left_out_and_nothing_else_is(
    case: tuple[History, Position, dict[int, Boundary]], limit: int, most: int, sizes: list[int], restarts: list[int]
) -> None:
    history, start, boundaries = case
    foreign = OIDS[1]
    boundaries.pop(foreign, None)
    last = max(t.xid for t in history if isinstance(t, Transaction)) + 1
    everything = {foreign: Boundary(Snapshot(last, last, ()), 2**62, last, filtered=True)}
    made = run(
        history, start, boundaries, limit=limit, most=most, sizes=sizes, restarts=tuple(restarts), foreign=foreign
    )
    # as if a boundary held all that it ever had: ordinals are counted, and the other tables are as they were
    assert made.changes == expected(history, start, boundaries | everything)
    assert made.left_out in ([], [foreign])  # asked once
    others = run(history, start, boundaries, limit=limit, most=most, sizes=sizes, foreign=1)
    assert others.left_out == [] and others.changes == expected(history, start, boundaries)


@pytest.mark.parametrize("message", [w.insert(OIDS[1], b"id", b"v"), w.truncate([OIDS[1], OIDS[0]])])
def test_what_is_whole_before_a_change_that_cannot_be_published_is_published_before_the_stream_ends(
    message: bytes,
) -> None:
    def refuse(message: pgoutput.RelationMessage, current: Version | None) -> Version | None:
        if message.oid == OIDS[1]:
            raise TableRefused("its key changed")
        return resolver([])(message, current)

    assembler = TransactionAssembler(Position(0, 0), {}, refuse, batch_bytes=10**6, largest_transaction=10**6)
    row = w.xlog(w.insert(OIDS[0], b"id", b"v"))
    whole = [w.xlog(w.begin(9, 1)), w.xlog(relation(OIDS[0], 0)), row, w.xlog(w.commit(9, 10))]
    begun = [w.xlog(w.begin(20, 2)), row, w.xlog(relation(OIDS[1], 0)), w.xlog(message), w.xlog(w.commit(20, 21))]
    assembler.add(w.block([*whole, *begun]))
    batch = assembler.cut()
    assert batch is not None and (len(batch), batch.end) == (1, Position(10, 0))
    with pytest.raises(TableRefused, match="its key changed"):
        assembler.cut()
    assert assembler.position == Position(10, 0)


def test_a_table_that_is_set_aside_is_left_out_until_the_stream_begins_anew() -> None:
    keys = iter([None, "its key changed", None])

    def resolve(message: pgoutput.RelationMessage, current: Version | None) -> Version | None:
        if message.oid == OIDS[1] and (why := next(keys)):
            raise TableRefused(why)
        return resolver([])(message, current)

    told: list[int] = []
    assembler = TransactionAssembler(
        Position(0, 0), {}, resolve, batch_bytes=10**6, largest_transaction=10**6, aside=lambda oid, _: told.append(oid)
    )
    rows = [w.xlog(w.insert(oid, b"id", b"v")) for oid in OIDS[:2]]
    known = [w.xlog(relation(oid, 0)) for oid in OIDS[:2]]
    for number, change in enumerate([[], [w.xlog(relation(OIDS[1], 1))], [w.xlog(relation(OIDS[1], 0))]]):
        lsn = 10 * number + 9
        truncated = [w.xlog(w.truncate([OIDS[1]]))] if number == 2 else []
        messages = [w.xlog(w.begin(lsn, 1)), *(known if not number else []), *change, *rows, *truncated]
        assembler.add(w.block([*messages, w.xlog(w.commit(lsn, lsn + 1))]))
        while (batch := assembler.cut()) is not None:
            assert len(batch)
        batch = assembler.flush(empty=False)
        assert batch is not None and len(batch) == (1 if told else 2)
        assert told == ([] if not number else [OIDS[1]])


def test_a_keepalive_inside_a_transaction_moves_nothing() -> None:
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.add(
        w.block([w.xlog(w.begin(100, 7)), w.keepalive(99), w.xlog(relation(1, 0)), w.xlog(w.insert(1, b"", b""))])
    )
    assert assembler.cut() is None
    assert assembler.flush(empty=True) is None


@pytest.mark.parametrize("size", [1, 100])
def test_a_partition_is_known_by_the_message_before_its_own_and_the_change_behind_it(size: int) -> None:
    """Those of tables that are truncated together come behind each other, too."""
    told: list[tuple[int, int, int]] = []
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.partition = lambda above, message: told.append((above.oid, message.oid, assembler.next_place.ordinal))
    root, part, other = (w.xlog(relation(oid, 0)) for oid in OIDS[:3])
    row, others = (w.xlog(w.insert(oid, b"id", b"v")) for oid in (OIDS[0], OIDS[2]))
    messages = [
        w.xlog(w.begin(9, 1)),
        *(root, other, part, w.xlog(w.truncate([OIDS[0], OIDS[2], OIDS[1]]))),
        *(root, other, others),
        *(root, part, w.keepalive(5), row, row),
        w.xlog(w.commit(9, 10)),
    ]
    for at in range(0, len(messages), size):
        assembler.add(w.block(messages[at : at + size]))
        assert assembler.cut() is None
    assert told == [(OIDS[0], OIDS[1], 3)]


@pytest.mark.parametrize("first", [0, 1], ids=["a changed table", "the first message"])
@pytest.mark.parametrize("error", [Outage, CredentialsRefused, Refused])
def test_a_relation_message_that_met_an_outage_is_resolved_when_it_comes_again(
    first: int, error: type[BottledWaterError]
) -> None:
    """The next session sends it again, as it was."""
    calls: list[tuple[int, int]] = []
    resolved, outages = resolver(calls), [error("It is no table's fault.")]

    def resolve(message: pgoutput.RelationMessage, current: Version | None) -> Version:
        if message.columns[1].name == "v1" and outages:
            raise outages.pop()
        return resolved(message, current)

    def transaction(final: int, version: int) -> list[bytes]:
        sent = [w.xlog(w.begin(final, 7)), w.xlog(relation(1, version)), w.xlog(w.insert(1, b"1", b"x"))]
        return [*sent, w.xlog(w.commit(final, final + 1))]

    assembler = TransactionAssembler(Position(0, 0), {}, resolve, batch_bytes=10**6, largest_transaction=10**6)
    if not first:
        assembler.add(w.block(transaction(100, 0)))
        assert assembler.cut() is None
        assert assembler.flush(empty=False) is not None
    assembler.add(w.block(transaction(200, 1)))
    with pytest.raises(error):
        assembler.cut()
    assembler.restart()
    assembler.add(w.block(transaction(200, 1)))
    assert assembler.cut() is None
    batch = assembler.flush(empty=False)
    assert batch is not None
    assert [change[2] for change in content(batch)] == [(1, 1)]


def test_a_keepalive_between_transactions_moves_the_position_in_an_empty_batch() -> None:
    assembler = TransactionAssembler(Position(5, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.add(w.block([w.keepalive(99)]))
    assert assembler.cut() is None
    assert assembler.flush(empty=False) is None
    batch = assembler.flush(empty=True)
    assert batch is not None and (len(batch), batch.start, batch.end) == (0, Position(5, 0), Position(99, 0))


def test_what_a_large_transaction_took_is_given_up_when_nothing_waits() -> None:
    large = w.insert(1, b"id", bytes(3 << 20))
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=1 << 30, largest_transaction=1 << 30)
    parts = [w.xlog(w.begin(9, 1)), w.xlog(relation(1, 0)), w.xlog(large)]
    tracemalloc.start()
    try:
        assembler.add(w.block(parts))
        assert assembler.cut() is None
        assembler.rest()  # a change waits
        assembler.add(w.block([w.xlog(w.commit(9, 10))]))
        assert assembler.cut() is None
        batch = assembler.flush(empty=False)
        assert batch is not None and [c[1] for c in content(batch)] == [large]
        del batch
        before = tracemalloc.get_traced_memory()[0]
        assembler.rest()
        assert before - tracemalloc.get_traced_memory()[0] > 2 << 20
    finally:
        tracemalloc.stop()


def test_a_message_larger_than_all_buffers_is_taken_whole() -> None:
    large = w.insert(1, b"id", bytes(3 << 20))
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=1, largest_transaction=1)
    assembler.add(
        w.block([w.xlog(w.begin(9, 1)), w.xlog(relation(1, 0)), w.xlog(large), w.xlog(large), w.xlog(w.commit(9, 10))])
    )
    part = assembler.cut()
    rest = assembler.cut()
    assert part is not None and rest is not None
    assert [c[1] for c in content(part) + content(rest)] == [large, large]
    assert (part.end, rest.end) == (Position(9, 1), Position(10, 0))


@pytest.mark.parametrize(
    "message",
    [
        w.xlog(w.insert(1, b"x")),
        w.xlog(w.begin(9, 1)[:-1]),
        w.xlog(w.commit(9, 10)[:-1]),
        w.xlog(b"I\0\0\0\1"),
        w.xlog(b""),
        w.xlog(relation(1, 0)[:-1]),
        w.xlog(w.truncate([1])[:-1]),
        w.xlog(w.truncate([1])),
        w.xlog(b"T"),
        b"w",
        b"k",
        b"x" + bytes(40),
        w.keepalive(1)[:-1],
    ],
)
def test_what_does_not_follow_the_protocol_is_a_protocol_error(message: bytes) -> None:
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.add(w.block([w.xlog(w.begin(9, 1)), message]))
    with pytest.raises(ProtocolError):
        assembler.cut()


@pytest.mark.parametrize("kind", [b"Y", b"O", b"M"])
def test_messages_that_say_nothing_of_rows_are_left_out(kind: bytes) -> None:
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.add(w.block([w.xlog(w.begin(9, 1)), w.xlog(kind + bytes(12)), w.xlog(w.commit(9, 10))]))
    assert assembler.cut() is None
    batch = assembler.flush(empty=True)
    assert batch is not None
    assert len(batch) == 0


@pytest.mark.parametrize("kind", [b"b", b"P", b"K", b"r", b"p", b"S", b"E", b"c", b"A", b"?"])
def test_a_message_of_an_unknown_kind_is_an_error_and_nothing_of_it_is_published(kind: bytes) -> None:
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.add(w.block([w.xlog(w.begin(9, 1)), w.xlog(w.commit(9, 10)), w.xlog(kind + bytes(40))]))
    with pytest.raises(ProtocolError, match=f"message of kind '{re.escape(kind.decode())}'.*two_phase"):
        assembler.cut()


def fields(count: int) -> st.SearchStrategy[list[pgoutput.Field]]:
    sent = st.builds(pgoutput.Field, st.sampled_from("bt"), st.text("aé€😀", max_size=5).map(str.encode))
    absent = st.sampled_from([pgoutput.Field("n"), pgoutput.Field("u")])
    return st.lists(sent | absent, min_size=count, max_size=count)


#: the id of a key of hashes
KEY = hashes.remember("0123456789abcdef").id
#: what is done to each column: None leaves it out
SHAPES = st.lists(
    st.sampled_from(
        [None, "", "", "null", "constant:", "constant:***", "first:2", "last:2", "first:0", "last:0", f"hash:{KEY}"]
    ),
    min_size=1,
    max_size=8,
)


@given(st.data(), SHAPES)
@settings(max_examples=examples(80), deadline=None)
def test_columns_that_are_left_out_or_masked_are_so_in_batches(data: st.DataObject, said: list[str | None]) -> None:
    """Rows of each kind, with old rows and without, lose these columns and values, and nothing else."""
    gone = [place for place, mask in enumerate(said) if mask is None]
    columns = [Column(f"c{place}", w.plain(w.TEXT), mask=mask or "") for place, mask in enumerate(said)]
    masks = [Mask.of(column) for column in columns]
    version = Version(replace(w.table(), columns=tuple(columns)).without(gone), "topic")
    messages = []
    for kind, tag in data.draw(st.lists(st.sampled_from([("I", ""), ("U", ""), ("U", "K"), ("U", "O"), ("D", "K")]))):
        old = data.draw(fields(len(said))) if tag else None
        new = None if kind == "D" else data.draw(fields(len(said)))
        messages.append(pgoutput.RowMessage(kind, OIDS[0], tag, old, new))
    sent = [w.begin(9, 1), w.relation(OIDS[0], [(True, c.name, w.TEXT, -1) for c in columns])]
    block = w.block([w.xlog(each) for each in (*sent, *(m.encode() for m in messages), w.commit(9, 10))])
    assembler = TransactionAssembler(
        Position(0, 0), {}, lambda *_: version, batch_bytes=10**6, largest_transaction=10**6
    )
    assembler.add(block)
    assembler.cut()
    batch = assembler.flush(empty=True)
    assert batch is not None
    ends = (batch.changes["offset"] + batch.changes["length"]).tolist()
    found = [bytes(batch.data[a:b]) for a, b in zip(batch.changes["offset"].tolist(), ends, strict=True)]
    assert found == [message.masked(masks).without(gone).encode() for message in messages]
    assert len(batch.data) == sum(map(len, found))


@pytest.mark.parametrize(
    "damage", [lambda row: row[:-1], lambda row: row[:7] + b"\x09" + row[8:], lambda row: row + b"N"]
)
def test_a_row_that_is_cut_short_is_not_taken_apart(damage: Callable[[bytes], bytes]) -> None:
    version = Version(w.table(("a", w.plain(w.TEXT)), ("b", w.plain(w.TEXT))).without([0]), "topic")
    assembler = TransactionAssembler(
        Position(0, 0), {}, lambda *_: version, batch_bytes=10**6, largest_transaction=10**6
    )
    relation = w.relation(OIDS[0], [(True, name, w.TEXT, -1) for name in "ab"])
    sent = [w.begin(9, 1), relation, damage(w.insert(OIDS[0], b"one", b"two")), w.commit(9, 10)]
    assembler.add(w.block([w.xlog(each) for each in sent]))
    with pytest.raises(ProtocolError, match="protocol"):
        assembler.cut()


@pytest.mark.parametrize("inside", [True, False])
def test_a_message_at_a_place_that_is_not_its_own_is_a_protocol_error(inside: bool) -> None:
    assembler = TransactionAssembler(Position(0, 0), {}, resolver([]), batch_bytes=10**6, largest_transaction=10**6)
    assembler.take_messages(MESSAGES.get)
    begun = [w.xlog(w.begin(9, 1))] if inside else []
    assembler.add(w.block([*begun, w.xlog(w.logical("mail", b"", 8, transactional=not inside))]))
    with pytest.raises(ProtocolError, match="not its own"):
        assembler.cut()


def test_a_message_of_no_transaction_is_a_whole_batch() -> None:
    """It is published at once, and the position behind it passes it and nothing else."""
    assembler = TransactionAssembler(Position(5, 0), {}, resolver([]), batch_bytes=1, largest_transaction=10**6)
    assembler.take_messages(MESSAGES.get)
    assembler.add(w.block([w.xlog(w.logical("mail", b"x", lsn, transactional=False)) for lsn in (50, 90, 200)]))
    batches = [assembler.cut() for _ in range(3)]
    assert [(batch.start, batch.end) for batch in batches if batch] == [
        (Position(5, 0), Position(50, 0)), (Position(50, 0), Position(90, 0)), (Position(90, 0), Position(200, 0))
    ]  # fmt: skip
    assert assembler.cut() is None and not assembler.unfinished
