"""Partitioned tables: what is below them, and what pgoutput needs of a partition whose changes it sends as the root's.

With ``publish_via_partition_root``, pgoutput sends every change of a partition as a change of the root, whose Relation
message comes with the root's columns and identity (maybe_send_schema, src/backend/replication/pgoutput/pgoutput.c). The
old row is what the *partition's* replica identity has written into the WAL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psycopg
from psycopg import sql

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.connect import Connection, quoted
from airflow_bottledwater.postgres.storage import DECODED

#: the columns of the index that is the replica identity of a relation ``c``
_IDENTITY = """ARRAY(
    SELECT a.attname FROM pg_index x JOIN pg_attribute a ON a.attrelid = x.indrelid
    WHERE x.indrelid = c.oid AND x.indisvalid AND a.attnum = ANY ((x.indkey::int2[])[0:x.indnkeyatts - 1])
    AND CASE c.relreplident WHEN 'd' THEN x.indisprimary WHEN 'i' THEN x.indisreplident END ORDER BY a.attnum)"""
_IDENTITIES = "SELECT c.oid, {} FROM pg_class c WHERE c.oid = ANY (%s::oid[])"

#: everything below partitioned tables, parents first. Nothing here takes a lock: pg_partition_tree would wait for
#: sessions that have one of the tables locked.
#:
#: CREATE TABLE … PARTITION OF writes the columns as inherited ones in the command that writes those of the system.
#: ATTACH writes the columns' rows anew (MergeAttributesIntoExisting, src/backend/commands/tablecmds.c), and so does
#: DETACH; the row of a system column is written with the table and never again. If all columns were altered since, a
#: partition counts as attached.
#:
#: The file is the one that the snapshot shows, as the other columns are: pg_relation_filenode would tell that of now
_BELOW = """
WITH RECURSIVE tree AS (
    SELECT c.oid AS root, c.oid, c.oid AS parent, true AS created, '' AS attached, 0 AS depth
    FROM pg_class c WHERE c.oid = ANY (%(oids)s::oid[]) AND c.relkind = 'p'
    UNION ALL
    SELECT t.root, i.inhrelid, t.oid,
           EXISTS (SELECT FROM pg_attribute s JOIN pg_attribute u ON u.attrelid = s.attrelid
                   WHERE s.attrelid = i.inhrelid AND s.attnum = -1 AND s.xmin = i.xmin
                   AND u.attnum > 0 AND u.attinhcount > 0 AND u.xmin = s.xmin AND u.cmin = s.cmin),
           i.xmin::text, t.depth + 1
    FROM tree t JOIN pg_class c ON c.oid = t.oid AND c.relkind = 'p'
    JOIN pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
)
SELECT t.root, t.oid, t.parent, n.nspname, c.relname, c.relkind, c.relpersistence,
       (SELECT a.amname IN {} FROM pg_am a WHERE a.oid = c.relam), c.relreplident, {},
       c.relfilenode, greatest(c.relpages, 0), c.relrowsecurity, c.xmin::text, t.created,
       t.attached
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.depth > 0 ORDER BY t.root, t.depth, t.oid
"""


class KnownPartition(NamedTuple):
    """A partition that a topic knows.

    :param name: for messages.
    :param filenode: 0 if its rows that the topic has may be of another file, or it is partitioned itself.
    :param attached: see :class:`Partition`; empty if that is not known.
    """

    name: str
    filenode: int
    attached: str = ""


#: the partitions that a topic knows, by oid
Known = Mapping[int, KnownPartition]


@dataclass(frozen=True, slots=True)
class Partition:
    """A table below a partitioned one, at any level.

    :param root: the partitioned table that was asked for.
    :param parent: the table that it is directly below.
    :param kind: ``relkind``: ``p`` if it is partitioned itself, so that it has no rows of its own.
    :param decoded: whether its access method is one whose changes are decoded; None if it has none.
    :param identity: ``relreplident``; ``identity_columns`` are those of its index.
    :param filenode: see :class:`~airflow_bottledwater.model.relation.SourceTable`; 0 if it is partitioned itself.
    :param xmin: of its row in pg_class.
    :param created: whether CREATE TABLE … PARTITION OF has made it and put it below its parent, so that it was empty
        then.
    :param attached: the transaction that has put it below its parent.
    """

    root: int
    oid: int
    parent: int
    schema: str
    name: str
    kind: str
    persistence: str
    decoded: bool | None
    identity: str
    identity_columns: list[str]
    filenode: int
    pages: int
    row_security: bool
    xmin: str
    created: bool
    attached: str

    @property
    def qualified(self) -> str:
        """``schema.table``, for messages; not quoted."""
        return f"{self.schema}.{self.name}"

    @property
    def leaf(self) -> bool:
        """Whether it has rows of its own."""
        return self.kind != "p"

    @property
    def logged(self) -> bool:
        """Whether the changes of its rows are in the WAL, so that they are decoded, if it has any."""
        return not self.leaf or (self.kind == "r" and self.persistence == "p" and bool(self.decoded))

    @property
    def rewritten(self) -> bool:
        """Whether it has another file than it was made with, by TRUNCATE, SET LOGGED, VACUUM FULL, CLUSTER or ALTER
        TABLE: the first one bears the table's oid."""
        return self.filenode not in (0, self.oid)

    @property
    def told(self) -> bool:
        """Whether it was made empty, and all that became of its rows is in the WAL."""
        return self.created and self.logged and not self.rewritten


def below(connection: Connection, oids: Iterable[int]) -> dict[int, list[Partition]]:
    """What is below these tables, by table, parents first; tables that are not partitioned are left out."""
    found: dict[int, list[Partition]] = {}
    for row in connection.execute(_BELOW.format(DECODED, _IDENTITY), {"oids": list(oids)}):  # type: ignore[arg-type]
        found.setdefault(row[0], []).append(Partition(*row))
    return found


def identity_columns(connection: Connection, oids: Iterable[int]) -> dict[int, list[str]]:
    """The columns of the indexes that are the replica identities of tables, by oid; none for one without an index."""
    return dict(connection.execute(_IDENTITIES.format(_IDENTITY), (list(oids),)).fetchall())  # type: ignore[arg-type]


def names(connection: Connection, oids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Schema and name of everything below these tables, by oid."""
    return {each.oid: (each.schema, each.name) for some in below(connection, oids).values() for each in some}


def parts(table: SourceTable, partitions: Sequence[Partition]) -> list[SourceTable]:
    """The tables that have a table's rows: itself, or its leaf partitions, with the columns and the key of the whole,
    since a partition may have its columns in another order."""
    if not table.partitioned:
        return [table]
    return [
        replace(
            table,
            oid=each.oid,
            schema=each.schema,
            name=each.name,
            filenode=each.filenode,
            pages=each.pages,
            row_security=each.row_security,
            partitioned=False,
        )
        for each in partitions
        if each.leaf
    ]


def mismatches(table: SourceTable, partitions: Sequence[Partition]) -> list[str]:
    """The partitions whose old rows are not those that the root's Relation message announces, as sentences; empty if
    there are none.

    Under a root that is FULL, pgoutput marks the old row of a partition as complete, even if it has only the key:
    columns would become NULL. Where the partition's index has other columns than the root's key, the key would be
    missing.
    """
    if not table.identifiable:
        return []
    whole = table.identity == "f"
    wanted = "REPLICA IDENTITY FULL" if whole else f"the replica identity ({', '.join(table.key)})"
    remedy = "FULL" if whole else "DEFAULT" if table.identity == "d" else "USING INDEX …"
    return [
        f"Partition {each.qualified} has another replica identity than {table.qualified}, as which it is published and "
        f"which has {wanted}: old rows would be wrong. Run: ALTER TABLE {quoted(each.schema, each.name)} REPLICA "
        f"IDENTITY {remedy};"
        for each in partitions
        if each.leaf and not agrees(table.identity, table.key, each.identity, each.identity_columns)
    ]


def agrees(root: str, key: Iterable[str], identity: str, columns: Iterable[str]) -> bool:
    """Whether the old rows of a partition are those of its root.

    :param root: the root's replica identity; ``key`` is its key.
    :param identity: the partition's; ``columns`` are those of its index.
    """
    return identity == "f" if root == "f" else identity in "di" and set(columns) == set(key)


def unfit(table: SourceTable, partitions: Sequence[Partition]) -> list[str]:
    """The partitions whose changes are not in the WAL, as sentences."""
    return [
        f"{each.qualified}, a partition of {table.qualified}, {_unsent(each)} Publish the other partitions under their "
        "own names (partitioned_tables = leaves), or take it out of the table (ALTER TABLE … DETACH PARTITION)."
        for each in partitions
        if not each.logged
    ]


def _unsent(partition: Partition) -> str:
    """Why no changes of it are sent, and the statement that mends that."""
    statement = f"Run: ALTER TABLE {quoted(partition.schema, partition.name)} SET"
    if partition.decoded is False:
        return f"is not stored as heap: its changes are not known to be decoded. {statement} ACCESS METHOD heap;"
    said = "is not permanent or a foreign table: its changes are not in the WAL."
    return f"{said} {statement} LOGGED;" if partition.kind == "r" else said


def changes(known: Known, table: SourceTable, today: Sequence[Partition]) -> list[tuple[str, str]]:
    """The changes below a table of which PostgreSQL sends nothing, so that the topic differs from the table: name of
    the partition, and what happened.

    :param known: the partitions that the topic knows.
    """
    now = {each.oid: each for each in today}
    found = [
        (each.name, f"is no longer a partition of {table.qualified} (detached or dropped)")
        for oid, each in known.items()
        if oid not in now
    ]
    found += [
        (each.qualified, f"was detached from {table.qualified} and attached again")
        for oid, each in now.items()
        if oid in known and known[oid].attached not in ("", each.attached)
    ]
    new = attached(known, table, today)
    below = {each.oid for each in new}
    found += [
        (each.qualified, "was rewritten before it was known" if each.created else f"was attached to {table.qualified}")
        for each in new
        if each.parent not in below
    ]
    if not _rewritten_as_one(known, today):
        found += [
            (each.qualified, "was truncated, or rewritten by VACUUM FULL, CLUSTER or ALTER TABLE")
            for each in _rewritten(known, today)
        ]
    return found


def attached(known: Known, table: SourceTable, today: Sequence[Partition]) -> list[Partition]:
    """What was put below a table with the rows that it had, and everything below it, parents first; and what was made
    there, and rewritten before it was known: an unlogged partition may have got rows until it was logged.

    :param known: the partitions that the topic knows.
    """
    found: dict[int, Partition] = {}
    parents = {table.oid, *known}
    for each in today:
        made = each.created and not (each.logged and each.rewritten)
        if each.parent in found or (each.parent in parents and each.oid not in known and not made):
            found[each.oid] = each
        elif each.parent in parents:
            parents.add(each.oid)
    return list(found.values())


def empty(connection: Connection, partition: Partition) -> bool:
    """Whether a partition has no rows now, and all that is put into it is in the WAL. It counts as one with rows if
    another session has it locked, or it may not be read."""
    name, found = sql.Identifier(partition.schema, partition.name), False
    if partition.leaf and partition.logged:
        with contextlib.suppress(psycopg.Error), connection.transaction(force_rollback=True):
            connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE NOWAIT").format(name))
            found = connection.execute(sql.SQL("SELECT FROM ONLY {} LIMIT 1").format(name)).fetchone() is None
    return found


def followed(known: Known, table: SourceTable, today: Sequence[Partition]) -> dict[int, KnownPartition]:
    """``known`` with what happened since and the stream was told of: new partitions that were made empty and whose
    changes are in the WAL, and a new file for each partition when the whole table was truncated."""
    more, parents = dict(known), {table.oid, *known}
    if _rewritten_as_one(known, today):
        more |= {
            each.oid: known[each.oid]._replace(name=each.qualified, filenode=each.filenode)
            for each in _rewritten(known, today)
        }
    for each in today:
        if each.oid not in known and each.told and each.parent in parents:
            more |= remembered([each])
            parents.add(each.oid)
    return more


def _rewritten(known: Known, today: Sequence[Partition]) -> list[Partition]:
    return [each for each in today if each.leaf and each.oid in known and known[each.oid].filenode != each.filenode]


def _rewritten_as_one(known: Known, today: Sequence[Partition]) -> bool:
    """Whether all known partitions got new files in one transaction: by TRUNCATE or ALTER of the whole table, of which
    the stream is told. Of some, that may be known already, by a look or a live snapshot. A partition that has no known
    file, since rows of it are missing in the topic, or too many are there, shows nothing of the others."""
    rewritten = _rewritten(known, today)
    by_whom = {each.xmin for each in today if each.leaf and each.oid in known}
    return len(by_whom) == 1 and any(known[each.oid].filenode for each in rewritten)


def merged(recorded: Known, before: Known, now: Known) -> dict[int, KnownPartition]:
    """``recorded`` with what has changed from ``before`` to ``now``, but for the partitions of which something else was
    recorded since ``before``, by a live snapshot, say."""
    changed = {oid: each for oid, each in now.items() if each != before.get(oid)}
    return {**recorded, **{oid: each for oid, each in changed.items() if recorded.get(oid) == before.get(oid)}}


def remembered(partitions: Iterable[Partition]) -> dict[int, KnownPartition]:
    """Partitions as :func:`changes` compares them later."""
    return {each.oid: KnownPartition(each.qualified, each.filenode, each.attached) for each in partitions}
