"""The keys of a table: as they are in its topic, by their hashes; and as places to read it from, and what these hold
for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from psycopg import sql

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Target, compile_programs, select_list
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.hashes import hash_records
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.partitions import Partition
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.snapshot import OwnSnapshot, copy_query
from airflow_bottledwater.publish.encode import BlockEncoder
from airflow_bottledwater.publish.session import LARGEST

#: of the parts of a table, each with the file that it has, the block behind the last one that was read
Upto = dict[tuple[int, int], int]


def only_key(table: SourceTable) -> SourceTable:
    """The table with the columns of its key alone, for hashes of keys: nobody looks at partitions."""
    return replace(
        table, columns=tuple(column for column in table.columns if column.name in table.key), partition_by=()
    )


def bound(connection: Connection, table: SourceTable, after: tuple[str, ...], rows: int) -> tuple[str, ...] | None:
    """The key that so many rows lie up to, from the one behind a key on; None if there are fewer rows.

    :param after: a key as text, in the order of the key's columns; empty for the table's first one.
    """
    # qualified: ORDER BY would otherwise mean the texts that are selected
    columns = [sql.Identifier(table.schema, table.name, name) for name in table.key]
    query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {} OFFSET {} LIMIT 1").format(
        sql.SQL(", ").join(sql.SQL("{}::text").format(column) for column in columns),
        _source(table),
        between(table, after, ()),
        sql.SQL(", ").join(columns),
        sql.Literal(rows - 1),
    )
    return connection.execute(query).fetchone()


def files(found: OwnSnapshot) -> int:
    """A number that is another one when a table, or one of its partitions, has got another file: its filenode if it has
    no partitions."""
    if not found.table.partitioned:
        return found.table.filenode
    return zlib.crc32(repr([(part.oid, part.filenode) for part in found.parts]).encode()) | 1


def place(connection: Connection, table: SourceTable, partitions: Sequence[Partition]) -> int:
    """A number that is another one when rows may lie behind a key that were not there before: a partition was attached
    that was not made empty, or the keys are sorted by another collation, or another version of it. It is not 0."""
    order = connection.execute(
        """
        SELECT a.attname, a.attcollation::int8,
               CASE WHEN a.attcollation <> 0 THEN pg_collation_actual_version(a.attcollation) END
        FROM pg_attribute a WHERE a.attrelid = %s AND a.attname = ANY (%s) ORDER BY a.attname
        """,
        (table.oid, list(table.key)),
    ).fetchall()
    attached = sorted(each.oid for each in partitions if not each.created)
    return zlib.crc32(repr((order, attached)).encode()) | 1


def between(table: SourceTable, after: tuple[str, ...], upto: tuple[str, ...]) -> sql.Composed:
    """The rows behind one key, up to and with another one, as a condition; an empty key is no bound."""
    types = {column.name: sql.SQL(column.type.name) for column in table.columns}  # type: ignore[arg-type]
    names = sql.SQL(", ").join(sql.Identifier(name) for name in table.key)
    conditions: list[sql.Composable] = [sql.SQL("true")]
    for operator, key in ((">", after), ("<=", upto)):
        if key:
            values = [
                sql.SQL("{}::{}").format(sql.Literal(value), types[name])
                for name, value in zip(table.key, key, strict=True)
            ]
            conditions.append(sql.SQL(f"ROW({{}}) {operator} ROW({{}})").format(names, sql.SQL(", ").join(values)))
    return sql.SQL(" AND ").join(conditions)


def _source(table: SourceTable) -> sql.Composed:
    name = sql.Identifier(table.schema, table.name)
    return sql.Composed([name]) if table.partitioned else sql.SQL("ONLY {}").format(name)


def keys_query(table: SourceTable, first: int, last: int) -> sql.Composed:
    """The COPY of the keys of a table, or a partition, in the blocks [first, last)."""
    return copy_query(table, select_list(only_key(table)), first, last)


def unread(parts: Sequence[SourceTable], upto: Upto) -> Iterator[tuple[SourceTable, int]]:
    """What is not read yet of a table's parts: again and again the first one that is not, and its block to begin at,
    while whoever reads notes in ``upto`` how far that is done. A part with a new file is read from its start."""
    for part in parts:
        while (first := upto.get((part.oid, part.filenode), 0)) < part.pages:
            yield part, first


def key_hashes(block: MessageBlock, version: Version, mapping: TableMapping) -> npt.NDArray[np.uint64]:
    """The hashes of a block of keys, as :func:`~airflow_bottledwater.kafka.hashes.hash_keys` gives them for the keys of
    records.

    :param block: rows of :func:`keys_query`, with the hashes of what is published as such.
    :raises Refused: a key cannot be encoded.
    """
    around = mapping.around(version.topic, table := only_key(version.table), "")
    target = Target(0, 1, version.key_schema, version.value_schema, around)
    programs = compile_programs([(table, target)], mapping.format, copied=True)
    hashes = []
    for encoded in BlockEncoder(0).encode(block, programs, LARGEST):
        if encoded.rejections:
            raise Refused(
                f"A key of {version.table.qualified} cannot be encoded: {encoded.rejections[0].reason}.",
                "Ask for a live snapshot without the sweep.",
            )
        hashes.append(hash_records(encoded.records))
    return np.concatenate(hashes)
