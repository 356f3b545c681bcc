"""Publications: always two, and never one that makes the source's UPDATE or DELETE fail.

PostgreSQL refuses UPDATE and DELETE on a published table without a replica identity (55000), or whose column list or
row filter does not cover it (42P10): CheckCmdReplicaIdentity, src/backend/executor/execReplication.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_bottledwater.model.relation import Table, quote
from airflow_bottledwater.postgres.connect import Connection


def names(publication: str) -> tuple[str, str]:
    """The publication of the keyed tables and that of the unkeyed ones.

    Both always exist, the second perhaps empty: one made after the slot wedges it when older WAL is read.
    """
    return publication, f"{publication}_unkeyed"


@dataclass(frozen=True, slots=True)
class Published:
    """A publication as the catalog has it.

    :param all_tables: FOR ALL TABLES.
    :param tables: oid → (column names or None for all, has a row filter).
    """

    name: str
    all_tables: bool
    inserts: bool
    updates: bool
    deletes: bool
    truncates: bool
    tables: dict[int, tuple[tuple[str, ...] | None, bool]]


def read(connection: Connection, name: str) -> Published | None:
    """The publication, or None."""
    row = connection.execute(
        "SELECT oid, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = %s",
        (name,),
    ).fetchone()
    if row is None:
        return None
    tables: dict[int, tuple[tuple[str, ...] | None, bool]] = {}
    if connection.info.server_version >= 150000:
        # the columns and the filter that apply, of FOR TABLES IN SCHEMA and FOR ALL TABLES too
        for oid, columns, filtered, total in connection.execute(
            "SELECT t.relid, ARRAY(SELECT attname FROM pg_attribute a WHERE a.attrelid = t.relid"
            " AND a.attnum = ANY (t.attrs::int2[]) ORDER BY attnum), t.qual IS NOT NULL,"
            " (SELECT count(*) FROM pg_attribute a WHERE a.attrelid = t.relid AND attnum > 0 AND NOT attisdropped AND attgenerated = '')"
            " FROM pg_get_publication_tables(%s) t",
            (name,),
        ):
            tables[oid] = (tuple(columns) if 0 < len(columns) < total else None, filtered)
    else:
        for (oid,) in connection.execute("SELECT relid FROM pg_get_publication_tables(%s) AS t(relid)", (name,)):
            tables[oid] = (None, False)
    _, everything, inserts, updates, deletes, truncates = row
    return Published(name, everything, inserts, updates, deletes, truncates, tables)


def split(tables: Sequence[Table]) -> tuple[list[Table], list[Table]]:
    """Which tables go into which publication: without a key and without the full old row, only inserts may be sent."""
    keyed = [t for t in tables if t.keyed or t.identity == "f"]
    return keyed, [t for t in tables if not t.keyed and t.identity != "f"]


def statements(publication: str, tables: Sequence[Table]) -> list[str]:
    """The SQL that makes both publications."""
    made = []
    for name, members, events in zip(
        names(publication), split(tables), ("insert, update, delete, truncate", "insert, truncate"), strict=True
    ):
        members_sql = ", ".join(f"{quote(t.schema)}.{quote(t.name)}" for t in members)
        target = f" FOR TABLE {members_sql}" if members else ""
        made.append(f"CREATE PUBLICATION {quote(name)}{target} WITH (publish = '{events}')")
    return made


def create(connection: Connection, publication: str, tables: Sequence[Table]) -> None:
    """Make both in one transaction; an existing one is left to :func:`problems`."""
    with connection.transaction():
        for name, statement in zip(names(publication), statements(publication, tables), strict=True):
            if read(connection, name) is None:
                connection.execute(statement)


def drop(connection: Connection, publication: str) -> list[str]:
    """Drop both where they exist; returns their names."""
    dropped = [name for name in names(publication) if read(connection, name) is not None]
    for name in dropped:
        connection.execute(f"DROP PUBLICATION IF EXISTS {quote(name)}")
    return dropped


def problems(published: Published, tables: Sequence[Table]) -> list[str]:
    """Why an existing publication must not be used for these tables."""
    found = []
    for table in tables:
        if table.oid not in published.tables:
            continue
        columns, filtered = published.tables[table.oid]
        changes = published.updates or published.deletes
        if changes and not table.keyed and table.identity != "f":
            found.append(
                f"Publication {published.name!r} sends updates or deletes of {table.qualified}, which has no usable key "
                f"({table.key_problem}): UPDATE and DELETE on it would fail for the application. "
                "Give it a primary key, or publish it with publish = 'insert, truncate' only."
            )
        elif changes and columns is not None and not set(table.key) <= set(columns):
            found.append(
                f"The column list of {table.qualified} in publication {published.name!r} does not cover its key "
                f"({', '.join(table.key)}): UPDATE and DELETE on it would fail for the application. Add the key columns."
            )
        elif changes and columns is not None and table.identity == "f":
            found.append(
                f"{table.qualified} is REPLICA IDENTITY FULL, but publication {published.name!r} has a column list for it: "
                "UPDATE and DELETE on it would fail for the application. Remove the column list."
            )
        elif changes and filtered and table.identity != "f":
            found.append(
                f"Publication {published.name!r} has a row filter on {table.qualified}: unless it uses key columns only, "
                "UPDATE and DELETE on it fail for the application, and rows leave the topic unseen. Remove the filter."
            )
        elif columns is not None or filtered:
            # the snapshot reads whole tables: it would publish what the publication hides
            found.append(
                f"Publication {published.name!r} has a {'row filter' if filtered else 'column list'} for {table.qualified}, which "
                "the snapshot would not respect. Remove it."
            )
    return found
