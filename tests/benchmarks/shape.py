"""``shape``: changes/s from the replication messages, already in memory, to Avro key and value, in one process, with
columns left out and masked, and with Debezium's envelope.

Reference: the same changes, published whole.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.encoding.envelope import Around, Envelope, around_rows
from airflow_bottledwater.encoding.program import Target, compile_programs
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish.encode import encode_changes
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED, Completed
from tests.benchmarks.common import emit, scaled
from tests.support import wire as w
from tests.support.batches import batch_of

_CHANGES, _REPEAT = 200_000, 5
_INT8 = 20
#: the columns of a row, as many texts as others
_KINDS = [("id", _INT8), *((f"t{k}", w.TEXT) for k in range(8)), *((f"n{k}", _INT8) for k in range(7))]


def _messages(changes: int) -> MessageBlock:
    relation = w.relation(1, [(name == "id", name, kind, -1) for name, kind in _KINDS])
    rows = []
    for i in range(changes):
        texts = [f"some one {i}@example.org".encode() if kind == w.TEXT else i.to_bytes(8, "big") for _, kind in _KINDS]
        rows.append(w.xlog(w.insert(1, *texts)))
    return w.block([w.xlog(w.begin(9, 1)), w.xlog(relation), *rows, w.xlog(w.commit(9, 10))])


def _seconds(block: MessageBlock, table: SourceTable, around: Around | None = None) -> float:
    """Seconds of the processor for all changes, of the fastest repetition."""
    version, found = Version(table, "bench"), []
    programs = compile_programs([(table, Target(0, 1, 1, 2, around))], FORMATS["avro"], copied=False)
    for _ in range(_REPEAT):
        began = time.process_time()
        encoded = encode_changes(Completed(batch_of(block, version), NOTHING_CONVERTED), programs)
        found.append(time.process_time() - began)
        assert len(encoded.records) == len(block.offsets) - 4 and not encoded.rejections
    return float(np.min(found))


def run(stack: DataStack) -> None:
    """See the module; the servers are not used. Ratios are to rows that are published whole."""
    changes = scaled(_CHANGES, 1000)
    block = _messages(changes)
    columns = tuple(Column(name, w.plain(kind)) for name, kind in _KINDS)
    whole = SourceTable(1, "public", "bench", "d", ("id",), columns)

    def masked(said: str) -> SourceTable:
        """All texts masked."""
        made = tuple(Column(c.name, c.type, mask=said if c.type.oid == w.TEXT else "") for c in columns)
        return SourceTable(1, "public", "bench", "d", ("id",), made)

    hashed = masked(f"hash:{hashes.remember('0123456789abcdef').id}")
    shapes = {
        "left_out_1": whole.without([1]),
        "left_out_8": whole.without(range(1, 9)),
        "null": masked("null"),
        "constant": masked("constant:hidden"),
        "first": masked("first:4"),
        "last": masked("last:4"),
        "hash": hashed,
        "hash_1": replace(whole, columns=tuple(hashed.columns[i] if i == 1 else c for i, c in enumerate(columns))),
    }
    _seconds(block, whole)
    reference = changes / _seconds(block, whole)
    for name, table in shapes.items():
        emit("shape", changes / _seconds(block, table), "changes/s", {"whole": reference}, shape=name, rows=changes)
    around = around_rows(Envelope("shop"), whole, "bench", "bench", as_json=False)
    found = changes / _seconds(block, whole, around)
    emit("shape", found, "changes/s", {"whole": reference}, shape="envelope", rows=changes)
