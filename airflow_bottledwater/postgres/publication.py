"""A pipeline's publications: always two, and never one that would make UPDATE or DELETE fail in the source.

PostgreSQL refuses UPDATE and DELETE on a published table without a replica identity (55000), or whose column list or
row filter does not cover it (42P10): CheckCmdReplicaIdentity, src/backend/executor/execReplication.c.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import locks, partitions, row_filter
from airflow_bottledwater.postgres.connect import Connection, defining, quoted


def names(publication: str) -> tuple[str, str]:
    """The names of the publications for keyed and for unkeyed tables.

    Both must always exist, even if the second is empty: with a publication that was created after the slot, the slot
    gets stuck when WAL from before is read.
    """
    return publication, f"{publication}_unkeyed"


#: by major version, the first release that tells transactions in progress, too, of a publication that was altered
#: (https://www.postgresql.org/docs/release/16.9/: "Avoid data loss when DDL operations that don't take a strong lock
#: affect tables that are being logically replicated")
_TOLD = {14: 140018, 15: 150013, 16: 160009, 17: 170005}


def forgets_writers(version: int) -> bool:
    """Whether a server forgets those who write to a table while it is added to a publication, or gets another row
    filter there: a walsender that sends such a transaction goes by the publication of before from then on, so that it
    sends no change of the table, until its session ends."""
    return version < _TOLD.get(version // 10000, 0)


def repeats_invalidations(version: int) -> bool:
    """Whether a server's transactions in progress also tell each other, at each DDL statement that commits, what they
    have been told of earlier ones. That grows until a walsender fails each time it reads the same WAL ("invalid memory
    alloc request size"): only the first releases that tell them do so
    (https://www.postgresql.org/docs/release/17.6/)."""
    return version in _TOLD.values()


def as_option(publications: Sequence[str], connection: Connection) -> str:
    """Publications as pgoutput's option ``publication_names`` has them
    (https://www.postgresql.org/docs/current/protocol-logical-replication.html)."""
    return sql.SQL(",").join(map(sql.Identifier, publications)).as_string(connection)


#: the tables that a publication sends, with the columns and the filter that apply, as pg_get_publication_tables would
#: return them (src/backend/catalog/pg_publication.c). That function is not used, because it locks each table, and so
#: may have to wait. Of a filter, it says which columns it uses, by its dependencies: pg_get_expr would lock the table,
#: too. FirstNormalObjectId is 16384 (src/include/access/transam.h)
_TABLES = """
WITH RECURSIVE p AS (SELECT * FROM pg_publication WHERE pubname = %s),
whole AS (SELECT pnnspid AS schema FROM pg_publication_namespace JOIN p ON pnpubid = p.oid),
listed AS (
    SELECT r.prrelid AS oid, r.prattrs, r.prqual, r.oid AS row FROM pg_publication_rel r JOIN p ON r.prpubid = p.oid
    WHERE NOT p.puballtables
),
-- since PostgreSQL 19, FOR ALL TABLES EXCEPT: the only rows of pg_publication_rel that such a publication has
excepted AS (
    SELECT r.prrelid AS oid FROM pg_publication_rel r JOIN p ON r.prpubid = p.oid WHERE p.puballtables
    UNION SELECT i.inhrelid FROM excepted e JOIN pg_class c ON c.oid = e.oid AND c.relkind = 'p'
          JOIN pg_inherits i ON i.inhparent = e.oid
),
roots AS (
    SELECT oid FROM listed
    UNION SELECT c.oid FROM pg_class c JOIN whole ON schema = c.relnamespace
          WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
    UNION SELECT c.oid FROM pg_class c JOIN p ON p.puballtables
          WHERE c.relkind IN ('r', CASE WHEN p.pubviaroot THEN 'p'::"char" END) AND c.relpersistence = 'p'
          AND c.oid >= 16384 AND c.oid NOT IN (SELECT oid FROM excepted)
),
tree AS (
    SELECT oid, false AS below FROM roots
    UNION SELECT i.inhrelid, true
          FROM tree t JOIN pg_class c ON c.oid = t.oid AND c.relkind = 'p' JOIN pg_inherits i ON i.inhparent = t.oid
),
sent AS (
    SELECT DISTINCT t.oid FROM tree t JOIN pg_class c ON c.oid = t.oid CROSS JOIN p
    WHERE CASE WHEN p.pubviaroot THEN NOT EXISTS (SELECT FROM tree b WHERE b.oid = t.oid AND b.below)
          ELSE c.relkind <> 'p' END
)
SELECT s.oid,
       CASE WHEN l.prattrs IS NOT NULL THEN ARRAY(
           SELECT attname FROM pg_attribute a WHERE a.attrelid = s.oid AND a.attnum = ANY (l.prattrs::int2[])
           ORDER BY attnum
       ) END,
       CASE WHEN l.prqual IS NOT NULL THEN ARRAY(
           SELECT attname FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
           WHERE d.classid = 'pg_publication_rel'::regclass AND d.objid = l.row AND d.refobjid = s.oid AND attnum > 0
       ) END,
       ARRAY(SELECT attname FROM pg_attribute a
             WHERE a.attrelid = s.oid AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum)
FROM sent s JOIN pg_class c ON c.oid = s.oid
LEFT JOIN listed l ON l.oid = s.oid AND c.relnamespace NOT IN (SELECT schema FROM whole)
"""


@dataclass(frozen=True, slots=True)
class Published:
    """A publication as it is in the catalog.

    :param all_tables: whether it is FOR ALL TABLES.
    :param inserts: whether it sends inserts; ``updates``, ``deletes`` and ``truncates`` likewise.
    :param tables: table oid → its column list (None: all columns), and the columns that its row filter uses (None: it
        has no filter).
    :param schemas: the names of the schemas of which it has all tables.
    :param generated: the oids of tables whose stored generated columns it sends, too (from PostgreSQL 18 on).
    :param via_root: ``publish_via_partition_root``: whether a partitioned table is among ``tables`` instead of its
        partitions.
    :param listed: the oids of tables whose column lists have all of today's columns, and no generated one.
    """

    name: str
    all_tables: bool
    inserts: bool
    updates: bool
    deletes: bool
    truncates: bool
    tables: dict[int, tuple[tuple[str, ...] | None, frozenset[str] | None]]
    via_root: bool = False
    schemas: frozenset[str] = frozenset()
    generated: frozenset[int] = frozenset()
    listed: frozenset[int] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether it has whole schemas or all tables, so that tables that are created later are in it at once."""
        return self.all_tables or bool(self.schemas)

    def takes_in(self, table: SourceTable) -> bool:
        """Whether it has a table whether it names it or not, so that it cannot have a row filter for it."""
        return self.all_tables or table.schema in self.schemas

    def filters(self, oid: int) -> bool:
        """Whether it has a row filter for a table."""
        return self.tables.get(oid, (None, None))[1] is not None


def read(connection: Connection, name: str) -> Published | None:
    """The publication; None if it does not exist."""
    row = connection.execute(
        "SELECT oid, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot FROM pg_publication WHERE "
        "pubname = %s",
        (name,),
    ).fetchone()
    if row is None:
        return None
    tables: dict[int, tuple[tuple[str, ...] | None, frozenset[str] | None]] = {}
    schemas, listed = frozenset[str](), set[int]()
    if connection.info.server_version >= 150000:
        for oid, columns, filtered, total in connection.execute(_TABLES, (name,)):
            used = None if filtered is None else frozenset(filtered)
            tables[oid] = (tuple(columns) if columns else None, used)
            listed |= {oid} if columns == total else set()
        named = connection.execute(
            "SELECT nspname FROM pg_namespace n JOIN pg_publication_namespace ON pnnspid = n.oid WHERE pnpubid = %s",
            (row[0],),
        )
        schemas = frozenset(schema for (schema,) in named)
    else:
        for (oid,) in connection.execute("SELECT relid FROM pg_get_publication_tables(%s) AS t(relid)", (name,)):
            tables[oid] = (None, None)
    generated: frozenset[int] = frozenset()
    if connection.info.server_version >= 180000:
        made = connection.execute(
            "SELECT DISTINCT attrelid FROM pg_attribute WHERE attrelid = ANY (%s) AND attgenerated = 's' AND NOT "
            "attisdropped AND EXISTS (SELECT FROM pg_publication WHERE oid = %s AND pubgencols <> 'n')",
            (list(tables), row[0]),
        )
        generated = frozenset(oid for (oid,) in made)
    _, everything, inserts, updates, deletes, truncates, via_root = row
    sends = (everything, inserts, updates, deletes, truncates)
    return Published(name, *sends, tables, via_root, schemas, generated, frozenset(listed))


def existing(connection: Connection, publication: str) -> list[Published]:
    """Both publications, as far as they exist."""
    found = (read(connection, name) for name in names(publication))
    return [each for each in found if each is not None]


def split(tables: Sequence[SourceTable]) -> tuple[list[SourceTable], list[SourceTable]]:
    """The tables for the first publication, and those for the second, which have neither a key nor the full old row: of
    these, no updates and deletes may be sent."""
    return [t for t in tables if t.identifiable], [t for t in tables if not t.identifiable]


def _only(table: SourceTable) -> sql.Composed:
    """A table in a publication statement, without the tables that inherit from it, which are published only if they are
    named."""
    return sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name))


def member(table: SourceTable) -> sql.Composed:
    """A table that a statement publishes, with its row filter."""
    return _only(table) + row_filter.clause(table)


def addition(publication: str, tables: Sequence[SourceTable]) -> sql.Composed:
    """The statement that adds tables to a publication that exists."""
    members = sql.SQL(", ").join(map(member, tables))
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(publication), members)


def statements(publication: str, tables: Sequence[SourceTable], *, via_root: bool) -> list[sql.Composed]:
    """The statements that create both publications.

    :param via_root: whether partitioned tables are published as one; also with none among ``tables``, since one may be
        added later.
    """
    made = []
    option = sql.SQL(", publish_via_partition_root = true" if via_root else "")
    for name, members, events in zip(
        names(publication), split(tables), ("insert, update, delete, truncate", "insert, truncate"), strict=True
    ):
        target = sql.SQL(" FOR TABLE " if members else "") + sql.SQL(", ").join(map(member, members))
        make = sql.SQL("CREATE PUBLICATION {}{} WITH (publish = {}{})")
        made.append(make.format(sql.Identifier(name), target, sql.Literal(events), option))
    return made


def _define(
    connection: Connection,
    oids: Sequence[int],
    conflicting: Sequence[str],
    attempt: Callable[[], None],
    *,
    what: str,
    timeout: float,
) -> None:
    """Run DDL in rounds: see :func:`locks.in_rounds`.

    :raises Refused: an event trigger forbids it.
    :raises Outage: see :func:`create`.
    """

    def defined() -> None:
        with defining(what):
            attempt()

    locks.in_rounds(connection, oids, conflicting, defined, what=what, timeout=timeout)


def create(
    connection: Connection, publication: str, tables: Sequence[SourceTable], *, via_root: bool, timeout: float
) -> None:
    """Create both publications in one transaction; one that exists is left as it is (see :func:`problems`).

    :raises Outage: other sessions (VACUUM, CREATE INDEX, ALTER TABLE) had locks on the tables for ``timeout`` seconds.
    """

    def make() -> None:
        with connection.transaction():
            locks.limit(connection, len(tables))
            for name, statement in zip(
                names(publication), statements(publication, tables, via_root=via_root), strict=True
            ):
                if read(connection, name) is None:
                    connection.execute(statement)

    what = f"Creating publication {publication!r}"
    _define(connection, [t.oid for t in tables], locks.PUBLISH, make, what=what, timeout=timeout)


def extend(
    connection: Connection,
    publication: str,
    there: Sequence[Published],
    added: Sequence[SourceTable],
    *,
    timeout: float,
    alone: bool = False,
) -> None:
    """Add each table to the publication that it belongs to, unless it is in there already; one that is there gets its
    row filter of now.

    :param there: both publications, as far as they exist (:func:`existing`): to read them takes as long as they have
        tables.
    :param alone: whether nobody may write to a table meanwhile, on a server that would forget them
        (:func:`forgets_writers`).
    :raises Outage: see :func:`create`.
    """
    alone = alone and forgets_writers(connection.info.server_version)

    def locked(table: SourceTable) -> list[int]:
        return locks.with_partitions(connection, [table.oid]) if alone else [table.oid]

    def lock(table: SourceTable) -> None:
        locks.limit(connection, len(locked(table)))
        if alone:
            name = sql.Identifier(table.schema, table.name) if table.partitioned else _only(table)
            connection.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(name))

    def add(name: str, table: SourceTable) -> None:
        with connection.transaction():
            lock(table)
            connection.execute(addition(name, [table]))

    def renew(name: str, table: SourceTable) -> None:
        with connection.transaction() as renewed:
            lock(table)
            before = row_filter.read(connection, name, table.oid)
            connection.execute(sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(name), _only(table)))
            connection.execute(addition(name, [table]))
            if row_filter.read(connection, name, table.oid) == before:
                raise psycopg.Rollback(renewed)

    first, _ = names(publication)
    for present in there:
        name = present.name
        for table in added:
            known = present.tables.get(table.oid)
            if known is None and table.identifiable != (name == first):
                continue
            if known is not None and not (present.filters(table.oid) or table.where):
                continue
            _define(
                connection,
                locked(table),
                (*locks.PUBLISH, *(locks.WRITE if alone else ())),
                functools.partial(add if known is None else renew, name, table),
                what=f"{'Adding' if known is None else 'Filtering'} {table.qualified} in publication {name!r}",
                timeout=timeout,
            )


def remove(connection: Connection, name: str, table: SourceTable, *, timeout: float) -> None:
    """Take a table out of a publication.

    :raises Outage: see :func:`create`.
    """
    statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(name), _only(table))

    def take_out() -> None:
        with connection.transaction():
            locks.limit(connection, 1)
            connection.execute(statement)

    what = f"Taking {table.qualified} out of publication {name!r}"
    _define(connection, [table.oid], locks.PUBLISH, take_out, what=what, timeout=timeout)


def drop(connection: Connection, publication: str) -> tuple[list[str], list[str]]:
    """Drop both publications, if they exist; returns the names of those that were dropped, and of those that belong to
    another role by now, which only that role can drop."""
    dropped, kept = [], []
    for name in names(publication):
        if read(connection, name) is None:
            continue
        try:
            with defining(f"Dropping publication {name!r}"):
                connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
        except psycopg.errors.InsufficientPrivilege:
            kept.append(name)
        else:
            dropped.append(name)
    return dropped, kept


def others_problems(published: Published, others: Sequence[SourceTable]) -> list[str]:
    """Why an existing publication must not be used, given that it also publishes these tables, which are not the
    pipeline's."""
    remedy = (
        "Take it out (ALTER PUBLICATION … DROP TABLE; where it inherits from a published table, ALTER PUBLICATION … "
        "SET TABLE ONLY …), or add it to the pipeline's tables."
    )
    found = problems(published, [t for t in others if not t.identifiable])
    if published.whole:
        return found  # with such a publication, the pipeline chooses what it follows
    return found + [
        f"Publication {published.name!r} also publishes {table.qualified}, which is not a table of the pipeline: its "
        f"changes would be left out. {remedy}"
        for table in others
    ]


def mode_problems(
    connection: Connection, published: Published, tables: Sequence[SourceTable], *, via_root: bool
) -> list[str]:
    """Why an existing publication must not be used for these tables, given that it sends partitioned ones otherwise: as
    one where the pipeline publishes the partitions, or the other way round.

    :param via_root: whether the pipeline publishes a partitioned table as one.
    """
    below = partitions.names(connection, [table.oid for table in tables if table.partitioned])
    if published.tables.keys() & below.keys():
        names = ", ".join(table.qualified for table in tables if table.partitioned)
        return [
            f"Publication {published.name!r} sends the partitions of {names} under their own names, but the pipeline "
            f"publishes a partitioned table as one. Run: ALTER PUBLICATION {quoted(published.name)} SET "
            "(publish_via_partition_root = true); or set partitioned_tables to leaves."
        ]
    above = partitions.names(connection, published.tables)
    if hidden := [table.qualified for table in tables if table.oid in above and table.oid not in published.tables]:
        remedy = (
            "Take them out of that table (ALTER TABLE … DETACH PARTITION), or name that table instead."
            if via_root
            else f"Run: ALTER PUBLICATION {quoted(published.name)} SET (publish_via_partition_root = false); or set "
            "partitioned_tables to root."
        )
        return [
            f"Publication {published.name!r} sends {', '.join(hidden)} as parts of their partitioned table, but the "
            f"pipeline publishes them under their own names. {remedy}"
        ]
    return []


def problems(published: Published, tables: Sequence[SourceTable]) -> list[str]:
    """Why an existing publication must not be used for these tables; empty if it can be."""
    changes = published.updates or published.deletes
    return [
        *other_columns([published], tables).values(),
        *(
            f"Publication {published.name!r} sends updates or deletes of {table.qualified}, which has no usable key "
            f"({table.key_problem}): UPDATE and DELETE on it would fail for the application. Give it a primary key, or "
            "publish it with publish = 'insert, truncate' only."
            for table in tables
            if table.oid in published.tables and changes and not table.identifiable
        ),
    ]


def other_columns(publications: Iterable[Published | None], tables: Sequence[SourceTable]) -> dict[int, str]:
    """The tables among these of which a publication sends other columns than are read from them, or lets UPDATE and
    DELETE fail by its column list: by oid, why, and what can be done."""
    found = {}
    for published in filter(None, publications):
        for table in tables:
            columns, _ = published.tables.get(table.oid, (None, None))
            if columns is not None:
                if why := _listed(published, table, columns):
                    found[table.oid] = f"{why} {_unlisted(published, table)}"
            elif table.oid in published.generated:
                found[table.oid] = (
                    f"Publication {published.name!r} sends the generated columns of {table.qualified}, which are not "
                    f"read from the table. Run: ALTER PUBLICATION {quoted(published.name)} SET "
                    f"(publish_generated_columns = none); {_afterwards(table)}"
                )
    return found


def listed(published: Published, tables: Sequence[SourceTable]) -> list[str]:
    """Warnings of column lists of these tables that have all columns of today."""
    return [
        f"The column list of {table.qualified} in publication {published.name!r} has all of its columns, and a column "
        f"that is added later is not sent. {_unlisted(published, table)}"
        for table in tables
        if table.oid in published.listed
    ]


def _listed(published: Published, table: SourceTable, columns: Sequence[str]) -> str:
    """What is wrong with a table's column list; empty if nothing is yet."""
    why, old_rows = "", published.updates or published.deletes
    if old_rows and (lacking := [name for name in table.key if name not in columns]):
        why = f"does not cover its key ({', '.join(lacking)}): UPDATE and DELETE would fail for the application"
    elif old_rows and table.identity == "f":
        why = "does not go with REPLICA IDENTITY FULL: UPDATE and DELETE would fail for the application"
    elif table.oid not in published.listed:
        why = "is not of the columns that are read from the table: what it lacks is not sent"
    return why and f"The column list of {table.qualified} in publication {published.name!r} {why}."


def _unlisted(published: Published, table: SourceTable) -> str:
    """How a table's column list is removed."""
    return (
        f"Remove it; run: BEGIN; ALTER PUBLICATION {quoted(published.name)} DROP TABLE "
        f"{_only(table).as_string(None)}; {addition(published.name, [table]).as_string(None)}; COMMIT; "
        f"{_afterwards(table)}"
    )


def _afterwards(table: SourceTable) -> str:
    """What a stream does when its publication is altered, since it cannot know what was not sent before."""
    if table.keyed:
        return "a stream that follows the table then reads its rows again."
    return (
        "a stream that follows the table cannot read its rows again, without a key, and needs a new slot then, with a "
        "snapshot under another topic_prefix."
    )


def uncovered(connection: Connection, published: Published, tables: Sequence[SourceTable]) -> dict[int, str]:
    """The tables among these whose row filters use columns that the old rows do not have, so that UPDATE and DELETE
    fail for the application as long as they are published: by oid, why, and what can be done.

    :param tables: those that updates and deletes can be published of.
    """
    of = {table.oid: table for table in tables if published.filters(table.oid)}
    if not of or not (published.updates or published.deletes):
        return {}
    # not the keys: an outbox has none, and yet an identity
    own = partitions.identity_columns(connection, of)
    below = partitions.below(connection, [table.oid for table in of.values() if table.partitioned])
    found = {}
    for oid, table in of.items():
        used = published.tables[oid][1] or frozenset()
        parts = [(each.identity, each.identity_columns) for each in below.get(oid, ()) if each.leaf]
        for identity, columns in parts if table.partitioned else [(table.identity, own.get(oid, []))]:
            if identity != "f" and (lacking := sorted(used - set(columns))):
                found[oid] = not_covered(table, columns, lacking)
    return found


def not_covered(table: SourceTable, identity: Sequence[str], lacking: Sequence[str]) -> str:
    """What is said of a table whose row filter uses columns that its replica identity does not have."""
    return (
        f"The row filter of {table.qualified} uses column {lacking[0]!r}, which is not in its replica identity "
        f"({', '.join(identity) or 'none'}): UPDATE and DELETE on the table would fail for the application. Use "
        f"columns of the key only (where in table_options); or run: ALTER TABLE {quoted(table.schema, table.name)} "
        "REPLICA IDENTITY FULL;"
    )
