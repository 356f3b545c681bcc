"""``parts``: where the time of a row goes, path by path: each stage alone, on what the stage before it gives, in one
process.

No target: it explains the others. A stage has nanoseconds a row on the clock (``wall``) and of CPU: this process with
all its threads (``cpu``), PostgreSQL and broker. The value is the sum of the clock's, as if nothing ran side by side.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import kernels, layout
from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import encode_changes
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.publish.toast import ToastResolver
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.pinned import pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Sweep, sweep_key
from airflow_bottledwater.stream.assembler import TransactionAssembler
from airflow_bottledwater.stream.relations import Resolver
from tests.benchmarks.common import Cpu, Workload, copy_all, drain, emit, recvlogical, scaled
from tests.benchmarks.encode import read_blocks, timed_encode
from tests.benchmarks.stream import receive

_ROWS = 500_000
_REPEAT = 3


class _Stages:
    """Times of named stages, per row."""

    def __init__(self, stack: DataStack, rows: int) -> None:
        self._stack, self._rows = stack, rows
        self.found: dict[str, dict[str, float]] = {}

    def time(self, name: str, work: Callable[[], Any], *, repeat: int = _REPEAT) -> Any:
        """Do it some times; the fastest counts. Returns the last result."""
        result = None
        for _ in range(repeat):
            servers, cpu, wall = Cpu(self._stack), time.process_time(), time.perf_counter()
            result = work()
            wall, cpu, used = time.perf_counter() - wall, time.process_time() - cpu, servers.used()
            now = {"wall": wall, "cpu": cpu, **used}
            if name not in self.found or wall * 1e9 / self._rows < self.found[name]["wall"]:
                self.found[name] = {k: v * 1e9 / self._rows for k, v in now.items() if v > 0}
        return result

    def emit(self, path: str, **more: Any) -> None:
        """One line; a stage in brackets is for comparison and does not count."""
        total = sum(stage["wall"] for name, stage in self.found.items() if not name.startswith("("))
        emit("parts", total, "ns/row", {}, path=path, stages=self.found, rows=self._rows, **more)


def _encode(stack: DataStack, source: Workload, table: SourceTable, rows: int) -> None:
    """CPU time: a row of one bigint, the key that it is again, and what each other column adds."""

    only = {
        c.name: replace(table, columns=tuple(o for o in table.columns if o.name in ("id", c.name)))
        for c in table.columns
    }
    tables = {**only, "no key": replace(only["id"], key=()), "whole": table}
    blocks = {name: read_blocks(source.dsn, copy_all(each)) for name, each in tables.items()}
    seconds = dict.fromkeys(tables, float("inf"))
    for _ in range(5 * _REPEAT):
        # by turns: a core's speed changes with what runs beside it
        for name, each in tables.items():
            seconds[name] = min(seconds[name], timed_encode(each, "avro", blocks[name], time.thread_time))
    nanoseconds = {name: each * 1e9 / rows for name, each in seconds.items()}
    found = {
        "row with one bigint, no key": nanoseconds["no key"],
        "its key, partitioned": nanoseconds["id"] - nanoseconds["no key"],
        **{f"{c.name} {c.type.name}": nanoseconds[c.name] - nanoseconds["id"] for c in table.columns if c.name != "id"},
    }
    stages = _Stages(stack, rows)
    stages.found = {name: {"wall": each} for name, each in found.items()}
    stages.emit("encode", whole_row=nanoseconds["whole"])


def _session(source: Workload, state: PipelineState, lane: str) -> PublishSession:
    assert state.claim is not None
    return PublishSession(
        source.pipeline, state.claim, lane, pins(state.tables.values()), source.state_topic, Backoff(60)
    )


def _publish(publishing: PublishSession, parts: list[Records]) -> None:
    publishing.open()
    for records in parts:
        publishing.transact([records], {sweep_key(0): Sweep((), True)})


def _snapshot(stack: DataStack, source: Workload, rows: int) -> None:
    state = read_state(source.pipeline, source.state_topic)
    pinned = next(iter(state.tables.values()))
    stages = _Stages(stack, rows)
    query = copy_all(pinned.table)
    stages.time("COPY received", lambda: drain(source.dsn, query))
    blocks = read_blocks(source.dsn, query)
    publishing = _session(source, state, "bench-lane")
    programs = publishing.programs([pinned.version], copied=True)
    limit = source.pipeline.range_bytes  # about a range's worth in each transaction

    def encode() -> list[Records]:
        made: list[Records] = []
        output = layout.output(1 << 15, 256, 4 << 20)
        scratch = programs.scratch()
        for block in blocks:
            start = 0
            while start < block.count:
                start, used, count, _ = kernels.encode_copy(
                    block.data, block.offsets, start, programs.program, 0, scratch, layout.facts(1, 0), output
                )
                made.append(Records(output.records[:count].copy(), output.data[:used].copy(), 0))
        return made

    parts = stages.time("encoded (and copied)", encode)
    stages.time("sizes checked", lambda: [publishing.oversized(p).any() for p in parts])
    publishing.open()

    def publish() -> None:
        pending: list[Records] = []
        size = 0
        for part in parts:
            pending.append(part)
            size += part.data.size
            if size >= limit:
                _publish_together(publishing, pending)
                pending, size = [], 0
        if pending:
            _publish_together(publishing, pending)

    stages.time("produced and committed", publish)
    publishing.close()
    stages.emit("snapshot", select=select_list(pinned.table).as_string(None))


def _publish_together(publishing: PublishSession, parts: list[Records]) -> None:
    publishing.transact(parts, {sweep_key(0): Sweep((), True)})


def _stream(stack: DataStack, source: Workload, changes: int) -> None:
    slots = [source.extra_slot(f"parts{i}") for i in range(3)]
    changes = source.churn(changes)
    end = source.flushed()
    stages = _Stages(stack, changes)
    stages.time("(pg_recvlogical)", lambda: recvlogical(source, slots[0], end), repeat=1)
    stages.time("received", lambda: receive(source, slots[1], changes), repeat=1)
    _, blocks = receive(source, slots[2], changes, keep=True)
    state = read_state(source.pipeline, source.state_topic)
    pipeline = source.pipeline

    def cut() -> list[Batch]:
        assert state.slot is not None
        start = state.position or Position(state.slot.consistent_point)
        assembler = TransactionAssembler(
            start, {}, Resolver(pipeline, state.tables),
            batch_bytes=pipeline.batch_bytes, largest_transaction=pipeline.max_transaction_bytes,
        )  # fmt: skip
        found = []
        for block in blocks:
            assembler.add(block)
            while (batch := assembler.cut()) is not None:
                found.append(batch)
        rest = assembler.flush(empty=False)
        return [*found, rest] if rest is not None else found

    batches = stages.time("assembled", cut)
    stages.time("pickled, both ways (Spark only)", lambda: [pickle.loads(pickle.dumps(b, 5)) for b in batches])
    publishing = _session(source, state, "bench-stream")
    completer = ToastResolver(source.dsn, lambda _: None)
    programs = publishing.programs(batches[0].versions, copied=False)
    completed = stages.time("completed", lambda: [completer.complete(b, programs) for b in batches])
    encoded = stages.time("encoded", lambda: [encode_changes(c, programs).records for c in completed])
    stages.time("sizes checked", lambda: [publishing.oversized(r).any() for r in encoded])
    publishing.open()
    stages.time("produced and committed", lambda: _publish(publishing, encoded))
    publishing.close()
    stages.emit("stream", batches=len(batches), bytes_per_change=sum(b.data.size for b in batches) / changes)
    source.drop()


def run(stack: DataStack) -> None:
    """See the module."""
    rows = scaled(_ROWS, 1000)
    source = Workload(stack, skip_snapshot=True)
    source.insert(rows)
    source.execute("VACUUM ANALYZE bench")
    source.create()
    _encode(stack, source, source.table(), rows)
    _snapshot(stack, source, rows)
    _stream(stack, source, rows)
