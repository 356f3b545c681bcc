"""``encode``: rows/s from COPY's binary bytes, already in memory, to key and value, in one process: Avro, and
the other formats as variants.

References: draining the same COPY from PostgreSQL over one connection, and psycopg's rows encoded by fastavro (which
reads from PostgreSQL, too; compare it with ``with_copy``, which is reading and encoding here).
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

import fastavro
import psycopg
from psycopg import sql

from airflow_bottledwater.encoding import avro, kernels, layout, wire
from airflow_bottledwater.encoding.program import Target, compile_programs
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.postgres import copy
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.receive import MessageBlock
from tests.benchmarks.common import Workload, copy_all, drain, emit, scaled

_ROWS = 2_000_000
_WIDE_ROWS = 200_000
#: forty columns: their type, and the value in row i of column k
_KINDS = (
    ("numeric(12,2)", "(i * {k} % 100000000) / 100.0"),
    ("timestamptz", "timestamptz '2024-01-01 00:00:00+00' + i * interval '{k}.000123 s'"),
    ("text", "'row ' || i || ' column {k} ' || md5((i * {k})::text)"),
    ("int[]", "ARRAY[i, {k}, NULL, i + {k}]"),
    ("jsonb", "jsonb_build_object('id', i, 'k', {k}, 'tags', ARRAY['a', 'b'])"),
    ("bigint", "i::bigint * {k} * 1000003"),
    ("date", "date '2024-01-01' + i % 10000"),
    ("double precision", "i / {k}.0"),
    ("boolean", "i % {k} = 0"),
    ("uuid", "md5((i + {k})::text)::uuid"),
)
_COLUMNS = [(f"c{k}", *_KINDS[k % len(_KINDS)]) for k in range(1, 40)]
_WIDE = f"CREATE TABLE wide (id bigint PRIMARY KEY, {', '.join(f'{name} {kind}' for name, kind, _ in _COLUMNS)})"
_WIDE_FILL = (
    f"INSERT INTO wide SELECT i, {', '.join(value.format(k=k) for k, (_, _, value) in enumerate(_COLUMNS, 1))}"
    " FROM generate_series(1, {rows}) i"
)
_PEER_ROWS = 100_000
_REPEAT = 3


class Encoder:
    """Blocks of COPY rows to records, as a lane does it."""

    def __init__(self, table: SourceTable, format: str) -> None:
        self._programs = compile_programs([(table, Target(0, 1, 1, 2))], FORMATS[format], copied=True)
        self._output = layout.output(1 << 15, 256, 4 << 20)
        self._no_facts = layout.facts(wire.FROM_SNAPSHOT, 0)

    def encode(self, block: MessageBlock) -> int:
        """:returns: records made."""
        p, made = self._programs, 0
        start, scratch = 0, p.scratch()
        while start < block.count:
            start, _, count, failed = kernels.encode_copy(
                block.data, block.offsets, start, p.program, 0, scratch, self._no_facts, self._output
            )
            assert not failed
            made += count
        return made


def read_blocks(dsn: str, query: sql.Composable) -> list[MessageBlock]:
    """A COPY's blocks, kept."""
    with connect(dsn) as connection:
        return [MessageBlock(b.data.copy(), b.offsets.copy()) for b in copy.rows(connection, query)]


def best(rows: int, *seconds: float) -> float:
    """Rows a second of the fastest repetition."""
    return rows / min(seconds)


def timed_encode(
    table: SourceTable, format: str, blocks: list[MessageBlock], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds for blocks in memory."""
    encoder = Encoder(table, format)
    encoder.encode(blocks[0])
    started = clock()
    for block in blocks:
        encoder.encode(block)
    return clock() - started


def _timed_drain(source: Workload, query: sql.Composable) -> float:
    started = time.perf_counter()
    drain(source.dsn, query)
    return time.perf_counter() - started


def _timed_both(source: Workload, table: SourceTable, query: sql.Composable) -> float:
    encoder = Encoder(table, "avro")
    started = time.perf_counter()
    with connect(source.dsn) as connection:
        for block in copy.rows(connection, query):
            encoder.encode(block)
    return time.perf_counter() - started


def _timed_peer(source: Workload, table: SourceTable, rows: int) -> float:
    """psycopg's binary rows, fastavro's writer, and the frame of the registry's protocol."""
    key = fastavro.parse_schema(json.loads(avro.key_schema(table)))
    value = fastavro.parse_schema(json.loads(avro.value_schema(table)))
    names = [c.name for c in table.columns]
    started = time.perf_counter()
    with psycopg.connect(source.dsn) as connection, connection.cursor(binary=True) as cursor:
        cursor.execute(f"SELECT * FROM bench WHERE id <= {rows}")
        for row in cursor:
            fields = dict(zip(names, row, strict=True))
            for schema, frame in ((key, b"\0\0\0\0\1"), (value, b"\0\0\0\0\2")):
                out = io.BytesIO()
                out.write(frame)
                fastavro.schemaless_writer(out, schema, fields)
                out.getvalue()
    return time.perf_counter() - started


def _measure(source: Workload, table: SourceTable, rows: int) -> tuple[dict[str, Any], float]:
    """Rates of all formats, of reading and encoding, and the size; and that of draining COPY."""
    query = copy_all(table)
    blocks = read_blocks(source.dsn, query)
    assert sum(b.count for b in blocks) == rows
    size = sum(int(b.offsets[-1]) for b in blocks)
    rates: dict[str, Any] = {
        format: best(rows, *(timed_encode(table, format, blocks) for _ in range(_REPEAT))) for format in FORMATS
    }
    rates["with_copy"] = best(rows, *(_timed_both(source, table, query) for _ in range(_REPEAT)))
    rates["bytes_per_s"] = size / rows * rates["avro"]
    return rates, best(rows, *(_timed_drain(source, query) for _ in range(_REPEAT)))


def run(stack: DataStack) -> None:
    """See the module; the second line is of a wide table."""
    source = Workload(stack)
    rows, peer_rows = scaled(_ROWS, 1000), scaled(_PEER_ROWS, 1000)
    source.insert(rows)
    source.execute("VACUUM ANALYZE bench")
    table = source.table()
    rates, raw = _measure(source, table, rows)
    peer = best(peer_rows, *(_timed_peer(source, table, peer_rows) for _ in range(2)))
    emit("encode", rates.pop("avro"), "rows/s", {"raw_copy": raw, "psycopg_fastavro": peer}, **rates, rows=rows)
    rows = scaled(_WIDE_ROWS, 1000)
    source.execute(_WIDE, _WIDE_FILL.format(rows=rows), "VACUUM ANALYZE wide")
    rates, raw = _measure(source, source.table("wide"), rows)
    emit("encode", rates.pop("avro"), "rows/s", {"raw_copy": raw}, **rates, rows=rows, table="wide")
