"""Records which catalog rows publish a table, so that it is noticed if a table was removed from its publication for a
while.

pgoutput decides by the catalog as it was at the time of each change: what was written while a table was not published
is never sent. The catalog rows that publish a table (pg_publication_rel, pg_publication_namespace) are created anew
when it is added again, and so have other oids. A partition that only the rows of its parents publish is not published
while it is detached: the row that attaches it (pg_inherits) is created anew, and so has another xmin.

Neither is what was written while a table was unlogged. PostgreSQL refuses that for a table that a publication names
(src/backend/commands/tablecmds.c, ATPrepChangePersistence), but not for one that is in a publication of all tables or
of its schema: there, only its files show that it may have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from psycopg import sql

from airflow_bottledwater.postgres.connect import Connection

_PUBLICATIONS = """
SELECT pubname, oid, xmin::text, pubowner, puballtables, concat_ws(', ', CASE WHEN pubinsert THEN 'insert' END,
       CASE WHEN pubupdate THEN 'update' END, CASE WHEN pubdelete THEN 'delete' END,
       CASE WHEN pubtruncate THEN 'truncate' END)
FROM pg_publication WHERE pubname = ANY (%(names)s)
"""

#: a row that publishes a partition as one of its parents counts together with the transactions that have attached it
#: there: with each of them, another multiple of this is added to the row's oid
_ATTACHED = 1 << 32
#: of each table whose changes are in the WAL, the rows that publish it, and whether it is sent as a table above it. A
#: partition is also published by the rows that publish its parents; a partitioned table is sent only where it is as one
_ROWS = """
SELECT t.oid, array_agg(up.attached * %(attached)s + {row}::bigint), bool_or(up.oid <> t.oid AND p.pubviaroot)
FROM unnest(%(oids)s::oid[]) t(oid)
CROSS JOIN LATERAL (
    SELECT t.oid, 0::bigint AS attached UNION
    SELECT relid, mod(coalesce(sum(i.xmin::text::bigint) OVER (ORDER BY n ROWS BETWEEN UNBOUNDED PRECEDING
                                                               AND 1 PRECEDING), 0), 2147483647)::bigint
    FROM pg_partition_ancestors(t.oid) WITH ORDINALITY a(relid, n) LEFT JOIN pg_inherits i ON i.inhrelid = relid
) up(oid, attached)
JOIN {source} JOIN pg_class s ON s.oid = t.oid
WHERE p.pubname = ANY (%(names)s) AND CASE s.relkind WHEN 'p' THEN p.pubviaroot ELSE s.relpersistence = 'p' END
GROUP BY t.oid
"""
_RELATIONS = _ROWS.format(
    row="r.oid",
    source="pg_publication_rel r ON r.prrelid = up.oid"
    " JOIN pg_publication p ON p.oid = r.prpubid AND NOT p.puballtables",
)
_SCHEMAS = _ROWS.format(
    row="n.oid",
    source="pg_class c ON c.oid = up.oid JOIN pg_publication_namespace n ON n.pnnspid = c.relnamespace"
    " JOIN pg_publication p ON p.oid = n.pnpubid",
)
#: since PostgreSQL 19, the rows of pg_publication_rel that such a publication has are its exceptions
_EVERYTHING = _ROWS.format(
    row="p.oid",
    source="pg_publication p ON p.puballtables AND NOT EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid"
    " AND (r.prrelid = t.oid OR r.prrelid IN (SELECT pg_partition_ancestors(t.oid))))",
)

#: the files of tables that no publication names. ALTER TABLE, which makes a table unlogged and logged again, gives it
#: another TOAST table with each new file; TRUNCATE, VACUUM FULL and CLUSTER keep that one (finish_heap_swap in
#: src/backend/commands/cluster.c)
_FILES = """
SELECT oid, relfilenode, reltoastrelid FROM pg_class
WHERE oid = ANY (%(oids)s::oid[]) AND relkind = 'r' AND oid NOT IN (
    SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE NOT p.puballtables)
"""

#: rows of a catalog that are of transactions whose end a slot's reader may not have seen
_LATE = sql.SQL(
    "SELECT oid FROM {} WHERE age(xmin) BETWEEN 0 AND (SELECT age(catalog_xmin) FROM pg_replication_slots "
    "WHERE slot_name = %s)"
)


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication's own catalog row.

    :param xmin: the row's xmin, which changes when ALTER PUBLICATION writes a new version of the row.
    :param sends: the operations that it sends, as in the option ``publish``.
    """

    oid: int
    xmin: str
    owner: int
    all_tables: bool
    sends: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """How publications cover the tables of a pipeline.

    :param publications: the publications by name.
    :param tables: table oid → oids of the catalog rows that publish it, for a row of its parents with how it was
        attached (:data:`_ATTACHED`).
    :param files: of the tables that no publication names: file and TOAST table (0: it has none), by table oid.
    """

    publications: dict[str, Publication]
    tables: dict[int, frozenset[int]]
    files: dict[int, tuple[int, int]] = field(default_factory=dict)

    def with_new(self, today: Coverage) -> Coverage:
        """This coverage, extended by the tables and publications of ``today`` that it does not contain."""
        files = {oid: each for oid, each in today.files.items() if oid not in self.tables}
        return Coverage(
            {**today.publications, **self.publications}, {**today.tables, **self.tables}, {**files, **self.files}
        )

    def renewed(self, today: Coverage) -> Coverage:
        """This coverage, with the tables of ``today`` as they are covered there."""
        others = {oid: each for oid, each in self.files.items() if oid not in today.tables}
        return Coverage(self.publications, {**self.tables, **today.tables}, {**others, **today.files})

    def lacking(self, today: Coverage, name: str) -> list[str]:
        """The operations that a publication has sent when this coverage was recorded, and does not send now."""
        before, now = self.publications.get(name), today.publications.get(name)
        if before is None or now is None:
            return []
        return [each for each in before.sends.split(", ") if each not in now.sends.split(", ")]

    def altered(self, today: Coverage, name: str, *, keyed: bool) -> str:
        """Why changes of all tables of a publication may have been left out of the stream since this coverage was
        recorded, as the end of a sentence that begins with a table's name; empty if none can be. A publication that was
        dropped, or dropped and created again, is not among the reasons: its tables are published by other catalog rows
        then, or by none.

        :param keyed: whether the tables have keys. One without cannot be read again, and would lack changes for ever:
            of those, what was altered in the same pause as the publication's owner is not noticed.
        """
        before, now = self.publications.get(name), today.publications.get(name)
        if before is None or now is None or now.oid != before.oid or now.xmin == before.xmin:
            return ""
        # what it sends is the same after an alteration there and back
        if not keyed and now.owner != before.owner and now.sends == before.sends:
            return ""
        return f"lacks what publication {name!r} has not sent until it was altered"

    def lost(self, today: Coverage, oid: int) -> str:
        """Why changes of one table may have been left out of the stream since this coverage was recorded, as the end of
        a sentence; empty if none can be."""
        rows, now = self.tables.get(oid, frozenset()), today.tables.get(oid, frozenset())
        if not rows or rows & now:
            return ""
        if now:
            return "was removed from its publication and added again"
        return "is no longer published"

    def by_parents(self, oid: int) -> bool:
        """Whether a table is a partition that only rows of its parents publish."""
        rows = self.tables.get(oid, frozenset())
        return bool(rows) and min(rows) >= _ATTACHED

    def rewritten(self, today: Coverage, oid: int) -> str:
        """Why changes of one table may not have been in the WAL since this coverage was recorded, as the end of a
        sentence; empty if all were."""
        if oid not in self.files or oid not in today.files:
            return ""
        (file, toast), (file_now, toast_now) = self.files[oid], today.files[oid]
        if toast == toast_now if toast and toast_now else file == file_now:
            return ""
        return "was rewritten, and may have been unlogged meanwhile"


def late(connection: Connection, publications: Sequence[str], tables: Mapping[int, str], slot: str) -> list[str]:
    """What of the publications was made when a slot may have had changes already that it has not confirmed: PostgreSQL
    never sends those. Each is the end of a sentence that begins with "from before".

    What the slot has confirmed is later than all transactions below its ``catalog_xmin``.

    :param tables: the tables' names by their oids.
    :param slot: the name of a slot that nobody reads from.
    """
    catalogs = ["pg_publication", "pg_publication_rel"]
    catalogs += ["pg_publication_namespace"] if connection.info.server_version >= 150000 else []
    queries = [_LATE.format(sql.Identifier(each)) for each in catalogs]
    rows = {oid for query in queries for (oid,) in connection.execute(query, (slot,))}
    today = read(connection, publications, list(tables))
    return [
        *(f"publication {name!r} was made or altered" for name, each in today.publications.items() if each.oid in rows),
        *(
            f"{tables[oid]} was added to its publication"
            for oid, by in today.tables.items()
            if {row % _ATTACHED for row in by} <= rows
        ),
    ]


def read(connection: Connection, publications: Sequence[str], oids: Sequence[int]) -> Coverage:
    """How these publications cover these tables now; a table is left out if none of them sends its changes, or if one
    sends them as those of a partitioned table above it, since they are sent only once."""
    parameters = {"names": list(publications), "oids": list(oids), "attached": _ATTACHED}
    found = {
        name: Publication(oid, xmin, owner, everything, sends)
        for name, oid, xmin, owner, everything, sends in connection.execute(_PUBLICATIONS, parameters)
    }
    queries = [_RELATIONS, *([_SCHEMAS] if connection.info.server_version >= 150000 else [])]
    if any(each.all_tables for each in found.values()):
        queries.append(_EVERYTHING)
    tables: dict[int, set[int]] = {}
    as_another = set()
    for query in queries:
        for oid, rows, above in connection.execute(query, parameters):
            tables.setdefault(oid, set()).update(rows)
            as_another |= {oid} if above else set()
    covered = {oid: frozenset(rows) for oid, rows in tables.items() if oid not in as_another}
    files = {oid: (file, toast) for oid, file, toast in connection.execute(_FILES, parameters) if oid in covered}
    return Coverage(found, covered, files)
