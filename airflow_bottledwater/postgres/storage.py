"""Where the rows of tables are stored: out of line, or where PostgreSQL does not decode their changes as those of the
table."""

from __future__ import annotations

from collections.abc import Collection

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.connect import Connection

#: the access methods whose changes logical decoding knows (src/backend/replication/logical/decode.c); that of pg_tde
#: writes the WAL of heap
DECODED = "('heap', 'tde_heap')"

#: a table by its oid, its name for messages, and the one that is written in SQL
_NAMED = "SELECT c.oid, n.nspname || '.' || c.relname, format('%%I.%%I', n.nspname, c.relname)"
_OF = "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%s::oid[])"
_METHODS = f"{_NAMED}, a.amname FROM pg_class c JOIN pg_am a ON a.oid = c.relam {_OF} AND c.relkind = 'r' "
_METHODS += f"AND a.amname NOT IN {DECODED}"
#: Citus: a distributed or a reference table is an empty one, and its rows are in shards
_SHARDED = f"{_NAMED} FROM pg_class c JOIN pg_catalog.pg_dist_partition p ON p.logicalrelid::oid = c.oid {_OF}"
#: TimescaleDB: the chunks of hypertables with compression, and what is compressed of them
_COMPRESSED = (
    f"{_NAMED}, h.schema_name || '.' || h.table_name FROM pg_class c "
    "JOIN _timescaledb_catalog.chunk k ON k.table_name = c.relname "
    "JOIN _timescaledb_catalog.hypertable h ON h.id = k.hypertable_id AND h.compression_state <> 0 "
    f"{_OF} AND k.schema_name = n.nspname"
)


def undecoded(connection: Connection, oids: Collection[int]) -> dict[int, str]:
    """The tables among these of whose changes some are not decoded as theirs, so that their topics would differ from
    them, and nothing would tell: by oid, why, and what can be done, as sentences."""
    found: dict[int, str] = {}
    parameters = (list(oids),)
    for oid, name, quoted, method in connection.execute(_METHODS, parameters):  # type: ignore[arg-type]
        found[oid] = (
            f"Table {name} has the access method {method}, and PostgreSQL decodes the changes of heap only. Run: "
            f"ALTER TABLE {quoted} SET ACCESS METHOD heap; or leave the table out ('!{name}')."
        )
    row = connection.execute(
        "SELECT to_regclass('pg_catalog.pg_dist_partition'), to_regclass('_timescaledb_catalog.chunk')"
    ).fetchone()
    sharded, compressed = row or (None, None)
    if sharded:
        for oid, name, quoted in connection.execute(_SHARDED, parameters):  # type: ignore[arg-type]
            found[oid] = (
                f"Table {name} is one of Citus, whose rows are in shards, and PostgreSQL sends their changes as those "
                f"of the shards. Leave the table out ('!{name}'); or make it an ordinary one: SELECT "
                f"undistribute_table('{quoted}');"
            )
    if compressed:
        for oid, name, _, hypertable in connection.execute(_COMPRESSED, parameters):  # type: ignore[arg-type]
            found[oid] = (
                f"Table {name} is a chunk of hypertable {hypertable}, which has compression: TimescaleDB moves rows "
                "into another table, and PostgreSQL sends that as if they were deleted, or does not send it. Leave "
                f"the chunks of {hypertable} out, with a pattern behind '!'; or decompress them all, remove the policy "
                "of compression, and turn it off (timescaledb.compress = false)."
            )
    return found


def stored_apart(connection: Connection, table: SourceTable) -> list[str]:
    """The columns, beside the key, whose values PostgreSQL may store out of line (TOAST), so that an update that leaves
    one unchanged does not send it, unless the whole old row is sent."""
    rows = connection.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attlen = -1 AND attstorage <> 'p' AND attnum > 0 "
        "AND NOT attisdropped AND attgenerated = '' AND attname = ANY (%s) ORDER BY attnum",
        (table.oid, [column.name for column in table.columns if column.name not in table.key]),
    ).fetchall()
    return [name for (name,) in rows]
