"""How the rows of tables are stored: with generated columns, with values out of line, or where PostgreSQL does not
decode their changes as those of the table."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.connect import Connection

#: the access methods whose changes logical decoding knows (src/backend/replication/logical/decode.c); that of pg_tde
#: writes the WAL of heap
DECODED = "('heap', 'tde_heap')"

#: how a table is left out that is followed already
_OUT = "; one that is followed has to be taken out of its publication as well"

#: a table by its oid, its name for messages, and the one that is written in SQL
_NAMED = "SELECT c.oid, n.nspname || '.' || c.relname, format('%%I.%%I', n.nspname, c.relname)"
_OF = "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%s::oid[])"
_METHODS = f"{_NAMED}, a.amname FROM pg_class c JOIN pg_am a ON a.oid = c.relam {_OF} AND c.relkind = 'r' "
_METHODS += f"AND a.amname NOT IN {DECODED}"
#: Citus: a distributed or a reference table is an empty one, and its rows are in shards
_SHARDED = f"{_NAMED} FROM pg_class c JOIN pg_catalog.pg_dist_partition p ON p.logicalrelid::oid = c.oid {_OF}"
#: TimescaleDB: the chunks of hypertables with compression (1), and those that hold what is compressed (2)
_COMPRESSED = (
    f"{_NAMED}, h.schema_name || '.' || h.table_name, h.compression_state = 2 FROM pg_class c "
    "JOIN _timescaledb_catalog.chunk k ON k.table_name = c.relname "
    "JOIN _timescaledb_catalog.hypertable h ON h.id = k.hypertable_id AND h.compression_state <> 0 "
    f"{_OF} AND k.schema_name = n.nspname ORDER BY c.oid"
)
#: what these read of other products, whose catalogs a role need not have rights on, and another version may change:
#: by product, the columns of each relation
_CATALOGS = {
    "Citus": {"pg_catalog.pg_dist_partition": {"logicalrelid"}},
    "TimescaleDB": {
        "_timescaledb_catalog.chunk": {"hypertable_id", "schema_name", "table_name"},
        "_timescaledb_catalog.hypertable": {"id", "schema_name", "table_name", "compression_state"},
    },
}
_RELATIONS = """
SELECT n.nspname || '.' || c.relname, has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
       quote_ident(n.nspname), quote_ident(current_user), ARRAY(SELECT a.attname::text FROM pg_attribute a
       WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY (%s) AND c.relname = ANY (%s) AND c.relkind IN ('r', 'v')
"""
#: the names of chunks, if nobody has chosen others
_CHUNK = re.compile(r"(_hyper_\d+_|compress_hyper_\d+_)\d+_chunk$")


def _catalogs(connection: Connection) -> dict[str, str]:
    """The products whose catalogs are in the database: for each, why they cannot be read, and what can be done; empty
    if they can."""
    needed = {name: columns for of in _CATALOGS.values() for name, columns in of.items()}
    rows = connection.execute(_RELATIONS, (list(needed), [name.split(".")[1] for name in needed])).fetchall()
    wrong, present = {name: f"{name} is not there in this version, which is not supported." for name in needed}, set()
    for name, readable, schema, role, columns in rows:
        present.add(name)
        del wrong[name]
        if not readable:
            wrong[name] = f"Run: GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {name} TO {role};"
        elif lacking := needed[name] - set(columns):
            wrong[name] = f"{name} has no column {', '.join(sorted(lacking))} in this version, which is not supported."
    return {
        product: " ".join(wrong[name] for name in of if name in wrong)
        for product, of in _CATALOGS.items()
        if not present.isdisjoint(of)
    }


def unknown(connection: Connection) -> list[str]:
    """Warnings of other products' catalogs that cannot be read, so that tables whose changes are not decoded are not
    told from others."""
    return [
        f"The catalog of {product} cannot be read: tables whose changes PostgreSQL does not decode as theirs "
        f"({'distributed ones' if product == 'Citus' else 'chunks with compression'}) are not noticed. {why}"
        for product, why in _catalogs(connection).items()
        if why
    ]


def undecoded(connection: Connection, oids: Collection[int]) -> dict[int, str]:
    """The tables among these of whose changes some are not decoded as theirs, so that their topics would differ from
    them, and nothing would tell: by oid, why, and what can be done, as sentences. Chunks of one hypertable have one."""
    found: dict[int, str] = {}
    parameters, catalogs = (list(oids),), _catalogs(connection)
    for oid, name, quoted, method in connection.execute(_METHODS, parameters):  # type: ignore[arg-type]
        found[oid] = (
            f"Table {name} has the access method {method}, whose changes are not known to be decoded, and whose rows "
            f"cannot be read by blocks. Run: ALTER TABLE {quoted} SET ACCESS METHOD heap; or leave the table out "
            f"('!{name}'{_OUT})."
        )
    if catalogs.get("Citus") == "":
        for oid, name, quoted in connection.execute(_SHARDED, parameters):  # type: ignore[arg-type]
            found[oid] = (
                f"Table {name} is one of Citus, whose rows are in shards, and PostgreSQL sends their changes as those "
                "of the shards, unless Citus's change data capture is on, which is not tested. Leave the table out "
                f"('!{name}'{_OUT}); or make it an ordinary one: SELECT undistribute_table('{quoted}');"
            )
    if catalogs.get("TimescaleDB") == "":
        chunks: dict[tuple[str, bool], dict[int, str]] = {}
        for oid, name, _, hypertable, inside in connection.execute(_COMPRESSED, parameters):  # type: ignore[arg-type]
            chunks.setdefault((hypertable, inside), {})[oid] = name
        for (hypertable, inside), names in chunks.items():
            found |= dict.fromkeys(names, _of_chunks(hypertable, list(names.values()), inside=inside))
    return found


def _of_chunks(hypertable: str, names: Sequence[str], *, inside: bool) -> str:
    """What is said of chunks of a hypertable.

    :param inside: whether it is one of TimescaleDB's own, which holds the compressed rows of another one.
    """
    if len(names) == 1:
        said = f"Table {names[0]} is a chunk of hypertable {hypertable}"
    else:
        said = f"{len(names)} tables are chunks of hypertable {hypertable} ({some(names)})"
    patterns = some(list(dict.fromkeys(_CHUNK.sub(r"\1*", f"'!{name}") + "'" for name in names)))
    out = f"Leave {'it' if len(names) == 1 else 'them'} out ({patterns}{_OUT})"
    if inside:
        return f"{said}, in which TimescaleDB keeps compressed rows. {out}."
    return (
        f"{said}, which has compression: TimescaleDB moves rows into another table, and PostgreSQL sends that as if "
        f"they were deleted, or does not send it. {out}; or decompress all chunks of {hypertable}, remove the policy "
        "of compression, and turn it off (timescaledb.compress = false)."
    )


def some(names: Sequence[str]) -> str:
    """The first of some names, for a message."""
    return f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def generated(connection: Connection, oids: Collection[int]) -> dict[int, list[str]]:
    """The generated columns of tables, by the tables' oids; tables without any are not in it."""
    rows = connection.execute(
        "SELECT attrelid, array_agg(attname::text ORDER BY attnum) FROM pg_attribute WHERE attrelid = ANY (%s::oid[]) "
        "AND attnum > 0 AND NOT attisdropped AND attgenerated <> '' GROUP BY attrelid",
        (list(oids),),
    ).fetchall()
    return dict(rows)


def stored_apart(connection: Connection, table: SourceTable) -> list[str]:
    """The columns, beside the key, whose values PostgreSQL may store out of line (TOAST), so that an update that leaves
    one unchanged does not send it, unless the whole old row is sent."""
    rows = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attlen = -1 AND attstorage <> 'p' AND attnum > 0 "
        "AND NOT attisdropped AND attgenerated = '' AND attname = ANY (%s) ORDER BY attnum",
        (table.oid, [column.name for column in table.columns if column.name not in table.key]),
    ).fetchall()
    return [name for (name,) in rows]
