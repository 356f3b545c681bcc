"""The keys of a table as they are in its topic, by their hashes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from psycopg import sql

from airflow_bottledwater.encoding.program import Target, compile_programs, select_list
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.hashes import hash_records
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.receive import Block
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, copy_query
from airflow_bottledwater.publish.encode import BlockEncoder
from airflow_bottledwater.publish.session import LARGEST


def _only_key(table: Table) -> Table:
    return replace(table, columns=tuple(column for column in table.columns if column.name in table.key))


def keys_query(table: Table) -> sql.Composed:
    """The COPY of the keys of a whole table."""
    return copy_query(table, select_list(_only_key(table)), 0, LAST_BLOCK)


def key_hashes(block: Block, version: Version, output_format: str) -> npt.NDArray[np.uint64]:
    """The hashes of a block of keys, as :func:`~airflow_bottledwater.kafka.hashes.hash_keys` gives them for the keys of records.

    :param block: rows of :func:`keys_query`.
    :raises Refused: a key cannot be encoded.
    """
    target = Target(0, 1, version.key_schema, version.value_schema)
    programs = compile_programs([(_only_key(version.table), target)], output_format, copied=True)
    hashes = []
    for encoded in BlockEncoder(0).encode(block, programs, LARGEST):
        if encoded.rejections:
            raise Refused(
                f"A key of {version.table.qualified} cannot be encoded: {encoded.rejections[0].reason}.",
                "Ask for a live snapshot without the sweep.",
            )
        hashes.append(hash_records(encoded.records))
    return np.concatenate(hashes)
