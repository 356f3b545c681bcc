"""Writers that log every change inside its own transaction, and what the checker needs from database and topics."""

from __future__ import annotations

import bisect
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psycopg
from psycopg import errors

from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.store import state_topic_name
from tests.support import outboxes
from tests.support.checker import Checker, Report, uncommitted_rule
from tests.support.forms import before, decoders, unwrapped
from tests.support.history import DELETE, INSERT, TRUNCATE, Change, Record, Truncation
from tests.support.options import COLUMNS, Readable, filters, hashed, options_of
from tests.support.partitions import check_partitions
from tests.support.together import check_ends, check_messages, plain_topics
from tests.support.topics import Flow, Message, read, read_all

#: whether a key fulfils a table's row filter, by table
Filters = Mapping[str, Callable[[int], bool]]

_SCHEMA = (
    "CREATE SEQUENCE checker_n",
    "CREATE SEQUENCE checker_version",
    "CREATE TABLE checker_log (n bigint, xid bigint, tbl text, old bigint, new bigint, op text, version bigint, large "
    "bigint)",
    "CREATE TABLE checker_messages (n bigint, xid bigint, transactional bool)",
)
#: a logical message, and its line in a log of its own; one of no transaction is also there if that is rolled back
_EMIT = (
    "WITH m AS (SELECT nextval('checker_n') AS n), c AS MATERIALIZED"
    " (SELECT n, pg_logical_emit_message({transactional}, 'checker', n::text) AS lsn FROM m)"
    " INSERT INTO checker_messages"
    " SELECT n, pg_current_xact_id()::text::bigint, {transactional} FROM c WHERE lsn > '0/0'"
)
#: the log's line of each row that ``c`` returns: numbered when the row is written, and so while it is locked
_LOG = (
    " INSERT INTO checker_log SELECT nextval('checker_n'), pg_current_xact_id()::text::bigint, '{table}', {old}, "
    "{new}, '{op}',"
    " version, large FROM c"
)
#: a value that is stored out of line, and by what it is known
_LARGE_BYTES = 2100
_LARGE = f"nextval('checker_version') || ':' || repeat('x', {_LARGE_BYTES})"
_KNOWN_BY = "coalesce(split_part(left(large, 20), ':', 1)::bigint, 0) AS large"
_INSERT = (
    "WITH c AS (INSERT INTO {table} (id, version, name, n, large) SELECT g, nextval('checker_version'), {text}, 0,"
    f" CASE WHEN g % 3 = 0 THEN {_LARGE} END"
    " FROM generate_series({first}::bigint, {last}::bigint) g ON CONFLICT DO NOTHING"
    f" RETURNING id, version, {_KNOWN_BY})" + _LOG.format(table="{table}", old="NULL", new="id", op="c")
)
_UPDATE = (
    "WITH c AS (UPDATE {table} SET version = nextval('checker_version'), n = n + 1, at = clock_timestamp(){large}"
    " WHERE id BETWEEN {first} AND {last}"
    f" RETURNING id, version, {_KNOWN_BY})" + _LOG.format(table="{table}", old="id", new="id", op="u")
)
_DELETE = "WITH c AS (DELETE FROM {table} WHERE id = {first} RETURNING id, 0 AS version, 0 AS large)" + _LOG.format(
    table="{table}", old="id", new="NULL", op="d"
)
_MOVE = (
    "WITH c AS (UPDATE {table} SET id = {last}, version = nextval('checker_version') WHERE id = {first}"
    f" AND NOT EXISTS (SELECT FROM {{table}} WHERE id = {{last}}) RETURNING id, version, {_KNOWN_BY})"
    + _LOG.format(table="{table}", old="{first}", new="id", op="k")
)
#: a key change that moves the row to another partition: a delete and an insert
_MOVE_ACROSS = (
    "WITH c AS (UPDATE {table} SET id = {last}, version = nextval('checker_version') WHERE id = {first}"
    f" AND NOT EXISTS (SELECT FROM {{table}} WHERE id = {{last}}) RETURNING id, version, {_KNOWN_BY})"
    " INSERT INTO checker_log"
    " SELECT nextval('checker_n'), pg_current_xact_id()::text::bigint, '{table}', {first}, NULL, 'd', 0, 0 FROM c "
    "UNION ALL"
    " SELECT nextval('checker_n'), pg_current_xact_id()::text::bigint, '{table}', NULL, id, 'c', version, large FROM c"
)
#: the name of a partitioned table, and the keys at which its partitions begin, but for the first; a third of the rows
#: are in each of the first three, and new keys in the last two
PARTED = "parted"
_BEGIN = (500, 1000, 10_000_000, 90_000_000)
#: what other writers or a stopping server do to a transaction; it is rolled back
LOSSES = (
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.UniqueViolation,
    errors.SerializationFailure,
    errors.QueryCanceled,
)


def make_tables(flow: Flow, tables: Sequence[str], rows: int) -> None:
    """Tables with rows that are in the log, and an outbox if the pipeline has one."""
    flow.execute(*_SCHEMA, *(outboxes.SCHEMA if outboxes.has_outbox(flow) else ()))
    for table in tables:
        flow.execute(*table_of(table, rows))


def table_of(table: str, rows: int) -> tuple[str, ...]:
    """One of these tables, as statements."""
    return (
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, version bigint NOT NULL, name text, n integer, large text, "
        "at timestamptz DEFAULT clock_timestamp())" + (" PARTITION BY RANGE (id)" if table == PARTED else ""),
        f"ALTER TABLE {table} ALTER large SET STORAGE EXTERNAL",
        *(_partitions() if table == PARTED else ()),
        _INSERT.format(table=table, first=0, last=rows - 1, text="'row number ' || g"),
        f"ANALYZE {table}",
    )


def _partitions() -> Iterator[str]:
    """Partitions of two levels, one of them with its columns in another order."""
    limits = ["MINVALUE", *map(str, _BEGIN), "MAXVALUE"]
    columns = "large text, gone text, at timestamptz, n integer, name text, version bigint NOT NULL, id bigint NOT NULL"
    yield f"CREATE TABLE {PARTED}_1 ({columns})"
    yield f"ALTER TABLE {PARTED}_1 DROP COLUMN gone, ALTER large SET STORAGE EXTERNAL"
    yield f"ALTER TABLE {PARTED} ATTACH PARTITION {PARTED}_1 FOR VALUES FROM ({limits[1]}) TO ({limits[2]})"
    yield (
        f"CREATE TABLE {PARTED}_new PARTITION OF {PARTED} FOR VALUES FROM ({limits[3]}) TO ({limits[5]}) PARTITION BY "
        "RANGE (id)"
    )
    for number, parent in ((0, PARTED), (2, PARTED), (3, f"{PARTED}_new"), (4, f"{PARTED}_new")):
        bounds = f"FROM ({limits[number]}) TO ({limits[number + 1]})"
        yield f"CREATE TABLE {PARTED}_{number} PARTITION OF {parent} FOR VALUES {bounds}"


@dataclass(frozen=True, slots=True)
class Habit:
    """How a session behaves.

    :param open_for: seconds that a transaction stays open, from and to.
    :param prepared: share of transactions that are prepared first.
    :param asynchronous: ``synchronous_commit = off``.
    :param hot: also touches rows that all sessions touch.
    """

    open_for: tuple[float, float] = (0.0, 0.01)
    prepared: float = 0.0
    asynchronous: bool = False
    hot: bool = False


SHORT = Habit(hot=True)
LONG = Habit(open_for=(0.3, 0.8))
PREPARING = Habit(open_for=(0.0, 0.05), prepared=0.7)
ASYNCHRONOUS = Habit(asynchronous=True, hot=True)
#: sixteen keep transactions open, so that some are in progress at every boundary
CROWD = (*[LONG] * 16, SHORT, ASYNCHRONOUS, PREPARING)


@dataclass(slots=True)
class Writers:
    """Sessions beside the block: inserts, updates, deletes, key changes, savepoints, roll-backs, prepared transactions.
    Keys that were given up are used again, by other rows too, and large values are mostly left as they are.

    They survive the server's death: the log says what became of their transactions.

    :param rows: rows that the tables begin with.
    :param pause: seconds between two transactions, from and to.
    :param messages: whether they write logical messages, too; ``outbox``: events into an outbox.
    """

    dsn: str
    tables: Sequence[str]
    seed: int
    rows: int
    habits: Sequence[Habit] = CROWD
    pause: tuple[float, float] = (0.0, 0.01)
    messages: bool = False
    outbox: bool = False
    errors: list[BaseException] = field(default_factory=list)
    _freed: dict[int, list[int]] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Writers:
        self._threads = [
            threading.Thread(target=self._session, args=(number, habit), name=f"writer-{number}", daemon=True)
            for number, habit in enumerate(self.habits)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the sessions, and decide what is still prepared."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not self.errors, self.errors
        dice = random.Random(self.seed)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            left = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall()
            for (gid,) in left:
                connection.execute(f"{dice.choice(('COMMIT', 'ROLLBACK'))} PREPARED '{gid}'")  # type: ignore[arg-type]

    def _session(self, number: int, habit: Habit) -> None:
        dice = random.Random(self.seed * 1000 + number)
        self._freed[number] = []
        fresh = iter(range((number + 1) * 10_000_000, (number + 2) * 10_000_000))
        while not self._stopped.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as connection:
                    connection.execute("SET lock_timeout = '300ms'")
                    connection.execute(f"SET synchronous_commit = {'off' if habit.asynchronous else 'on'}")
                    while not self._stopped.is_set():
                        self._transaction(connection, dice, number, habit, fresh)
                        time.sleep(dice.uniform(*self.pause))
            except psycopg.OperationalError:
                time.sleep(0.1)  # the server is away
            except BaseException as error:
                self.errors.append(error)
                return

    def _transaction(
        self, connection: psycopg.Connection, dice: random.Random, number: int, habit: Habit, fresh: Iterator[int]
    ) -> None:
        rolled_back = dice.random() < 0.15
        gid = uuid.uuid4().hex if dice.random() < habit.prepared else ""
        try:
            connection.execute("BEGIN")
            self._change(connection, dice, number, habit, fresh)
            time.sleep(dice.uniform(*habit.open_for))
            for _ in range(dice.randrange(0, 5)):
                self._change(connection, dice, number, habit, fresh)
            if dice.random() < 0.25:
                self._savepoint(connection, dice, number, habit, fresh)
            # last, since the checker knows the places of rows in a transaction
            for statement in outboxes.events(dice, number) if self.outbox else ():
                connection.execute(statement)  # type: ignore[arg-type]
            if self.messages:
                for transactional in (True, False):
                    connection.execute(_EMIT.format(transactional=transactional))  # type: ignore[arg-type]
            if gid:
                connection.execute(f"PREPARE TRANSACTION '{gid}'")  # type: ignore[arg-type]
                time.sleep(dice.uniform(0.0, 0.3))
                connection.execute(f"{'ROLLBACK' if rolled_back else 'COMMIT'} PREPARED '{gid}'")  # type: ignore[arg-type]
            else:
                connection.execute("ROLLBACK" if rolled_back else "COMMIT")
        except LOSSES:
            connection.execute("ROLLBACK")

    def _savepoint(
        self, connection: psycopg.Connection, dice: random.Random, number: int, habit: Habit, fresh: Iterator[int]
    ) -> None:
        connection.execute("SAVEPOINT s")
        for _ in range(dice.randrange(1, 4)):
            self._change(connection, dice, number, habit, fresh)
        connection.execute(dice.choice(("ROLLBACK TO SAVEPOINT s", "RELEASE SAVEPOINT s")))
        self._change(connection, dice, number, habit, fresh)

    def _change(
        self, connection: psycopg.Connection, dice: random.Random, number: int, habit: Habit, fresh: Iterator[int]
    ) -> None:
        table = dice.choice(self.tables)
        hot = habit.hot and dice.random() < 0.3
        row = dice.randrange(0, 20) if hot else dice.randrange(20 + number, self.rows, len(self.habits))
        freed = self._freed[number]
        if freed and dice.random() < 0.3:
            row = dice.choice(freed)  # a row that was moved, or another one that has its key
        act = dice.random()
        if act < 0.25:
            new = dice.choice([row, next(fresh), *freed[-1:]])  # a key that was given up may come back
            statement = _INSERT.format(table=table, first=new, last=new, text="'new'")
        elif act < 0.7:
            statement = _UPDATE.format(
                table=table, first=row, last=row, large=f", large = {_LARGE}" if dice.random() < 0.2 else ""
            )
        elif act < 0.82:
            statement = _DELETE.format(table=table, first=row)
            freed.append(row)
        else:
            new = dice.choice([next(fresh), *freed[-3:]])
            across = table == PARTED and bisect.bisect(_BEGIN, row) != bisect.bisect(_BEGIN, new)
            statement = (_MOVE_ACROSS if across else _MOVE).format(table=table, first=row, last=new)
            freed += [row, new]
        del freed[:-20]
        connection.execute(statement)  # type: ignore[arg-type]


def insert(table: str, first: int, last: int) -> str:
    """A logged insert of a range of keys, as a statement."""
    return _INSERT.format(table=table, first=first, last=last, text="'inserted'")


def truncate(table: str) -> tuple[str, ...]:
    """A logged TRUNCATE, as the statements of one transaction."""
    line = f"nextval('checker_n'), pg_current_xact_id()::text::bigint, '{table}', NULL, NULL, '{TRUNCATE}', 0, 0"
    return f"TRUNCATE {table}", f"INSERT INTO checker_log VALUES ({line})"


def update(table: str, first: int, last: int) -> str:
    """A logged update of a range of keys, as a statement."""
    return _UPDATE.format(table=table, first=first, last=last, large="")


def delete(table: str, key: int) -> str:
    """A logged delete, as a statement."""
    return _DELETE.format(table=table, first=key)


def move(table: str, key: int, new: int) -> str:
    """A logged change of a key, as a statement."""
    return _MOVE.format(table=table, first=key, last=new)


def large_transaction(flow: Flow, table: str, first: int, count: int) -> None:
    """One transaction of many logged inserts."""
    flow.execute(_INSERT.format(table=table, first=first, last=first + count - 1, text="repeat('x', 200)"))


def read_log(flow: Flow) -> list[Change]:
    """What was committed."""
    return [
        Change(*row)
        for row in flow.execute("SELECT n, xid, tbl, old, new, op, version, large FROM checker_log ORDER BY n")
    ]  # fmt: skip


def replayed(log: Sequence[Change], table: str) -> dict[int, int]:
    """Key → version as the log says that the table is: the checker's own check."""
    rows: dict[int, int] = {}
    for change in log:
        if change.table == table:
            if change.op == TRUNCATE:
                rows.clear()
            if change.old is not None:
                rows.pop(change.old, None)
            if change.new is not None:
                rows[change.new] = change.version
    return rows


def sent(log: Iterable[Change], filters: Filters) -> list[Change]:
    """What PostgreSQL sends of the changes of tables with row filters: an update that brings a row into the filter is
    an insert, and one that takes it out a delete.

    :param filters: whether a key fulfils the filter, by table.
    """
    found = []
    for change in log:
        fulfils = filters.get(change.table, lambda _: True)
        old = change.old if change.old is not None and fulfils(change.old) else None
        new = change.new if change.new is not None and fulfils(change.new) else None
        if change.op == TRUNCATE or (old, new) == (change.old, change.new):
            found.append(change)
        elif new is not None:
            found.append(replace(change, old=None, op=INSERT, entered=True))
        elif old is not None:
            found.append(replace(change, new=None, op=DELETE, version=0, large=0))
    return found


def records(flow: Flow, tables: Sequence[str], *, committed: bool = True) -> list[Record]:
    """All records of the tables' topics, per partition in the order of their offsets."""
    return _records(read_rows(flow, tables, committed=committed))


def _records(found: Mapping[str, Sequence[Message]]) -> list[Record]:
    return [
        Record(
            table,
            m.partition,
            m.offset,
            m.key["id"],
            m.value and m.value["version"],
            m.op,
            m.pos,
            int(m.xid or 0),
            int(m.value["large"].partition(":")[0]) if m.value and m.value["large"] else 0,
            m.toast == "reread",
            bool(m.snapshot),
            parse_lsn(m.snapshot.partition("/")[2]) if m.snapshot else 0,
            before(m.before),
        )
        for table, some in found.items()
        for m in some
    ]


def readable(flow: Flow, tables: Sequence[str]) -> dict[str, Readable]:
    """What consumers can read of each table."""
    texts = dict[str, str]()
    if any(mask == "hash" for table in tables for mask in options_of(flow, table).mask.values()):
        for numbers in flow.execute("SELECT old, new, version, large FROM checker_log"):
            *plain, large = [number or 0 for number in numbers]
            for text in (*map(str, plain), f"{large}:{'x' * _LARGE_BYTES}"):
                texts[hashed(text)] = text
    return {table: Readable.of(flow, table, texts) for table in tables}


def read_rows(flow: Flow, tables: Sequence[str], *, committed: bool = True) -> dict[str, list[Message]]:
    """The records of the tables' topics by table, without envelopes and with the columns' own names, see
    :meth:`~tests.support.options.Readable.source`."""
    return _by_columns(_read_as_published(flow, tables, committed=committed), readable(flow, tables))


def _by_columns(found: Mapping[str, Sequence[Message]], rows: Mapping[str, Readable]) -> dict[str, list[Message]]:
    return {
        table: [
            replace(
                m,
                key=rows[table].source(m.key),
                value=rows[table].source(m.value, whole=True),
                before=rows[table].source(m.before),
            )
            for m in some
        ]
        for table, some in found.items()
    }


def _read_as_published(flow: Flow, tables: Sequence[str], *, committed: bool = True) -> dict[str, list[Message]]:
    """The records of the tables' topics, without envelopes, by table."""
    topics = [flow.topic(table) for table in tables]
    found = read_all(flow.kafka, topics, committed=committed, decoders=decoders(flow.pipeline))
    by_table = dict(zip(tables, found.values(), strict=True))
    for table, some in by_table.items():
        check_partitions(flow, table, some)
    if flow.pipeline.envelope == "none":
        return by_table
    return {table: unwrapped(some, table, committed=committed) for table, some in by_table.items()}


def state_topic(flow: Flow) -> str:
    """The topic of the pipeline's facts."""
    database = flow.execute("SELECT current_database()")[0][0]
    return state_topic_name(database, flow.pipeline.slot)


def positions(flow: Flow) -> list[Position]:
    """Every P that was committed."""
    found = read(flow.kafka, state_topic(flow))
    return [Position(m.value["lsn"], m.value["ordinal"]) for m in found if m.key == "position" and m.value]


def truncations(flow: Flow) -> list[Truncation]:
    """What the events topic tells."""
    found = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    return [
        Truncation(name.removeprefix("public."), m.value["pos"], m.value["xid"])
        for m in found
        for name in m.value.get("relations", ())
    ]


def audit(
    flow: Flow,
    tables: Sequence[str],
    *,
    resumed: bool = False,
    complete: bool = True,
    cut_from: int = 0,
    since: Snapshot | None = None,
) -> Report:
    """Compare topics and log, and the last record of each key with what its row is under the options of its table; the
    writers have stopped, and the pipeline has finished.

    :param tables: of others that were written to, nothing is said.
    :param since: without a snapshot: what the stream begins after.
    """
    known = read_state(flow.pipeline, state_topic(flow))
    log = read_log(flow)
    others = {change.table for change in log} - set(tables)
    by_name = {pinned.table.name: oid for oid, pinned in known.tables.items()}
    if since is None:
        boundaries = {table: known.boundaries[by_name[table]].snapshot for table in {*tables, *others}}
        assert all(known.boundaries[by_name[table]].filtered for table in tables)
    else:
        boundaries = dict.fromkeys({*tables, *others}, since)
    for table in tables:
        rows = dict(flow.execute(f"SELECT id, version FROM {table}"))
        assert replayed(log, table) == rows, f"the log of {table} is not what happened: the checker is wrong"
    published, rows = sent(log, filters(flow, [*tables, *sorted(others)])), readable(flow, tables)
    checker = Checker(
        published,
        boundaries,
        snapshot=since is None,
        resumed=resumed,
        oldest_xid=max(known.tables[by_name[table]].oldest_xid for table in tables),
        complete=complete,
        superseded=known.counters["superseded"],
        cut_from=cut_from,
        cut_from_large=flow.pipeline.max_transaction_bytes // _LARGE_BYTES,
        positions=positions(flow),
        truncations=truncations(flow) if any(change.op == TRUNCATE for change in log) else (),
        tables=tables,
        told=_told(flow, tables),
        large=lambda table, number: rows[table].large(number) if table in rows else number,
    )
    as_published = _read_as_published(flow, tables)
    committed = _records(_by_columns(as_published, rows))
    report = checker.check(committed)
    report.findings = [found for found in report.findings if found.table not in others]
    if flow.pipeline.transaction_topic:
        check_ends(flow, tables, published, known.counters["superseded"], others)
    assert known.slot is not None
    if plain_topics(flow):
        check_messages(flow, known.slot.oldest_xid)
    if outboxes.has_outbox(flow):
        outboxes.check_events(flow, max(known.slot.oldest_xid, known.tables[by_name[outboxes.OUTBOX]].oldest_xid))
    _check_uncommitted(records(flow, tables, committed=False), committed)
    if complete and not report.findings:
        _check_values(flow, as_published, rows, every=since is None)
    return report


def check_last(flow: Flow, table: str) -> None:
    """The last record of each key is what PostgreSQL has of its row under the options of the table, and no other key
    has a row: for a table of which not every change is published."""
    found, rows = _read_as_published(flow, [table]), readable(flow, [table])
    _check_values(flow, found, rows, every=True)
    last = {m.key[rows[table].name("id")]: m for m in found[table]}
    passes = filters(flow, [table]).get(table, lambda _: True)
    count = sum(passes(id) for (id,) in flow.execute(f"SELECT id FROM {table}"))
    assert sum(m.value is not None for m in last.values()) == count, f"{table} has {count} rows that are published"


def _check_values(
    flow: Flow, found: Mapping[str, Sequence[Message]], rows: Mapping[str, Readable], *, every: bool
) -> None:
    """The last record of each key is what PostgreSQL has of the row, under the options of the table.

    :param every: each row has a record.
    """
    columns = ("id", "version", *COLUMNS)
    texts = "id::text, version::text, name, large, n::text, (at AT TIME ZONE 'UTC')::text || '+00'"
    for table, passes in ({table: lambda _: True for table in found} | filters(flow, found)).items():
        one = rows[table]
        last = {m.key[one.name("id")]: m for m in found[table]}
        for values in flow.execute(f"SELECT {texts} FROM {table}"):
            if not passes(int(values[0])):
                continue
            expected = one.row(dict(zip(columns, values, strict=True)))
            record = last.get(expected[one.name("id")])
            assert record is not None or not every, f"{table} has {values}, of which there is no record"
            if record is not None:
                read = {name: value for name, value in (record.value or {}).items() if name in expected}
                assert read == expected, f"{table} has {values}, and {record} is to have {expected}"
            if "large" not in one.columns:
                assert record is None or not record.toast, f"{record}: a value that is left out was looked up"


def _told(flow: Flow, tables: Sequence[str]) -> dict[str, str]:
    """What the records of tables tell of old rows, see :class:`Checker`."""
    form = flow.pipeline.before if flow.pipeline.envelope == "none" else "envelope"
    full = {
        table
        for table, identity in flow.execute("SELECT relname, relreplident FROM pg_class WHERE relkind IN ('r', 'p')")
        if identity == "f"
    }
    return {table: f"{form}, {'whole' if table in full else 'key'}" for table in tables}


def _check_uncommitted(everything: Sequence[Record], committed: Sequence[Record]) -> None:
    """A reader of uncommitted records, who compares positions, comes to the same history.

    But for changes whose large value was read from the table afterwards: an attempt that was aborted may have found the
    row, which is gone for the next (the change is superseded then), or the other way round. Whatever came of them, the
    last change of each key is the same.
    """
    reread = {(r.table, r.key, r.pos) for r in everything if r.reread}
    seen = {(r.table, r.key, r.pos) for r in uncommitted_rule(everything) if r.pos}
    true = {(r.table, r.key, r.pos) for r in committed if r.pos}
    differing = sorted((seen ^ true) - reread)
    assert not differing, (
        f"a reader of uncommitted records, who compares positions, sees another history: {differing[:10]}"
    )
    assert _last(seen) == _last(true)


def _last(changes: Iterable[tuple[str, int, str]]) -> dict[tuple[str, int], str]:
    return {(table, key): pos for table, key, pos in sorted(changes)}
