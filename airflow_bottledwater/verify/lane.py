"""A task of the verification: reads block ranges of tables under the exported snapshot, or partitions of topics, and
sums them up by buckets, or returns what is in the buckets that are wanted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import psycopg

from airflow_bottledwater import memory
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import meaning
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka import topic_reader
from airflow_bottledwater.kafka.key_table import RANGES
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import copy, snapshot
from airflow_bottledwater.postgres.connect import Connection, connect, outage
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish import hashed
from airflow_bottledwater.verify import chosen as choosers
from airflow_bottledwater.verify import latest, program, records
from airflow_bottledwater.verify.buckets import Buckets, bucket_of, members, sampled
from airflow_bottledwater.verify.latest import LatestValues
from airflow_bottledwater.verify.place import Misplaced, RecordOrder
from airflow_bottledwater.verify.program import compile_scan
from airflow_bottledwater.verify.scan import PlainScan, Scan, line
from airflow_bottledwater.verify.task import Answer, FoundRecords, RecordVersion, Row, VerifiedRange, VerifyTask, View
from airflow_bottledwater.verify.values import Expectation, Schemas, TopicReader, copied, select_list

#: seconds that a task waits for a lock beyond lock_queue_limit: the driver, which sees all that wait, is to give up
#: first
_LATER = 5.0


def run(pipeline: Settings, reading: VerifyTask, *, stopped: Callable[[], None] = lambda: None) -> dict[int, Answer]:
    """Read a task's ranges or partitions; returns what it has found of each table, by oid.

    :param stopped: raises if the task is to stop.
    :raises Outage: source, broker or registry were not available for too long, or the snapshot's holder is gone.
    :raises StopRequested: the task was stopped.
    """
    memory.keep()
    work = _TaskRun(pipeline, reading, stopped)
    if reading.chunks:
        work.read_tables()
    for oid, partitions in reading.partitions:
        work.read_topic(oid, partitions)
    return work.answers()


def schemas(pipeline: Settings) -> Schemas | None:
    """Reads the registry's schemas by id, each once; None if the format needs none."""
    registry = Registry.of(pipeline)
    return None if registry is None else functools.cache(registry.schema)


def of_topic(pipeline: Settings, schemas: Schemas | None, topic: str) -> Schemas | None:
    """The same for a topic: an id that means the schema of other records has no schema there. The registry may have
    been emptied since, and have given the id again."""
    if schemas is None:
        return None
    mapping = TableMapping.of(pipeline)
    wanted, name_of = mapping.record(topic).known, meaning.OF[mapping.format.schema_type].name

    def schema(number: int) -> str | None:
        text = schemas(number)
        name = name_of(text) if text else ""
        return text if not name or name in wanted else None

    return schema


def warm_up() -> None:
    """Load what a task needs; see :func:`airflow_bottledwater.compiled.warm_up`."""
    topic_reader.warm_up()
    latest.warm_up()
    records.warm_up()
    choosers.warm_up()
    program.warm_up()


class _TaskRun:
    def __init__(self, pipeline: Settings, reading: VerifyTask, stopped: Callable[[], None]) -> None:
        self._pipeline, self._reading, self._check_stopped = pipeline, reading, stopped
        self._schemas = schemas(pipeline)
        self._found: dict[int, Answer] = {}
        self._buckets: dict[int, Buckets] = {}
        self._scans: dict[int, Scan] = {}
        self._partitioners: dict[int, choosers.Partitioner] = {}

    def answers(self) -> dict[int, Answer]:
        """What was found, by the tables' oids."""
        for oid, answer in self._found.items():
            if self._reading.view(oid).summed:
                answer.sums = self._sums(oid).to_bytes()
        return self._found

    def _answer(self, oid: int) -> Answer:
        return self._found.setdefault(oid, Answer())

    def _sums(self, oid: int) -> Buckets:
        return self._buckets.setdefault(oid, Buckets(self._reading.view(oid).bits))

    def _scan(self, view: View) -> Scan:
        table, format = view.table, self._pipeline.record_format
        if table.oid not in self._scans:
            seed, envelope = self._reading.seed, TableMapping.of(self._pipeline).envelope
            schemas = of_topic(self._pipeline, self._schemas, view.topic)
            self._scans[table.oid] = (
                compile_scan(table, format, schemas, seed, envelope) if table.keyed else None
            ) or PlainScan(Expectation(table, format), TopicReader(table, format, schemas, envelope), seed)
        return self._scans[table.oid]

    def _partitioner(self, view: View) -> choosers.Partitioner:
        if (oid := view.table.oid) not in self._partitioners:
            format, envelope = self._pipeline.record_format, TableMapping.of(self._pipeline).envelope
            schemas = of_topic(self._pipeline, self._schemas, view.topic)
            self._partitioners[oid] = choosers.partitioner(view.table, format, schemas, envelope)
        return self._partitioners[oid]

    def _chosen(self, view: View, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which keys are looked at: those of the sample, and of wanted buckets if there are some."""
        chosen = sampled(keys, self._reading.sample)
        if not view.summed and view.wanted is not None:
            chosen &= members(view.wanted, view.bits)[bucket_of(keys, view.bits)]
        return chosen

    # ------------------------------------------------------------------ tables
    def read_tables(self) -> None:
        """Read the task's ranges of tables."""
        connection = connect(self._pipeline.postgres, application=f"bottledwater verify {self._reading.number}")
        try:
            for chunk in self._reading.chunks:
                self._check_stopped()
                view = self._reading.view(chunk.oid)
                for block in self._rows(connection, view, chunk):
                    self._check_stopped()
                    self._take_rows(view, block)
                connection.execute("COMMIT")
        except psycopg.Error as error:
            raise outage(error, "Reading a table to verify it") from error
        finally:
            connection.close()

    def _rows(self, connection: Connection, view: View, chunk: VerifiedRange) -> Iterator[MessageBlock]:
        limit = self._pipeline.lock_queue_limit + _LATER
        snapshot.begin_task(connection, view.table, self._reading.held, lock_timeout=limit)
        query = snapshot.copy_query(view.table, select_list(view.table), chunk.first, chunk.last, text=True)
        return hashed.lines(self._pipeline, view.table, copy.lines(connection, query, idle=self._check_stopped))

    def _take_rows(self, view: View, block: MessageBlock) -> None:
        keys, rows = self._scan(view).rows(block)
        if not view.table.keyed:
            keys = rows
        chosen = self._chosen(view, keys)
        answer = self._answer(view.table.oid)
        answer.rows += int(chosen.sum())
        if view.summed:
            self._sums(view.table.oid).add(keys[chosen], rows[chosen])
            return
        places = bucket_of(keys, view.bits)
        for i in np.flatnonzero(chosen).tolist():
            answer.found_rows.append(Row(int(places[i]), tuple(copied(line(block, i)))))

    # ------------------------------------------------------------------ topics
    def read_topic(self, oid: int, partitions: tuple[int, ...]) -> None:
        """Read some partitions of a table's topic."""
        view = self._reading.view(oid)
        ends = [end if p in partitions else 0 for p, end in enumerate(view.ends)]
        if not view.table.keyed:
            self._sum_up_unkeyed(view, ends)
        elif view.wanted is not None:
            self._find_records(view, ends)
        else:
            self._sum_up_records(view, ends)

    def _blocks(self, view: View, ends: list[int]) -> Iterator[topic_reader.RecordBlock]:
        backoff = Backoff(self._pipeline.outage_timeout)
        for block in topic_reader.blocks(self._pipeline.kafka, view.topic, ends, backoff):
            self._check_stopped()
            if len(block):
                yield block

    def _sum_up_unkeyed(self, view: View, ends: list[int]) -> None:
        """Sum up all records of a table without a key that the snapshot can show: its rows are compared as a
        multiset."""
        places, scan = RecordOrder(view), self._scan(view)
        for block in self._blocks(view, ends):
            _, rows = scan.records(block)
            counts = sampled(rows, self._reading.sample) & (places.kinds(block) == latest.VALUE)
            self._sums(view.table.oid).add(rows[counts], rows[counts])
            self._answer(view.table.oid).rows += int(counts.sum())

    def _sum_up_records(self, view: View, ends: list[int]) -> None:
        low = 0
        while low < RANGES:
            low = self._sum_up_range(view, ends, low)

    def _sum_up_range(self, view: View, ends: list[int], low: int) -> int:
        """Sum up the keys whose hashes lie from ``low`` on, as many as memory is for; returns where those of the next
        reading begin."""
        places, scan = RecordOrder(view), self._scan(view)
        values, misplaced = LatestValues(sum(ends), low), Misplaced()
        for block in self._blocks(view, ends):
            keys, rows = scan.records(block)
            kinds = places.kinds(block)
            kinds[~sampled(keys, self._reading.sample)] = latest.SKIP
            misplaced.take(block, keys, kinds, self._partitioner(view)(block, len(view.ends)))
            values.note(block.hashes[:, 0], keys, rows, kinds)
        sums = self._sums(view.table.oid)
        keys, rows = values.values()
        sums.add(keys, rows)
        self._answer(view.table.oid).rows += len(keys)
        if low == 0:
            sums.spoil(misplaced.keys())
        return values.high

    def _find_records(self, view: View, ends: list[int]) -> None:
        """Return the records of the wanted buckets' keys that count."""
        places, scan = RecordOrder(view), self._scan(view)
        found: dict[tuple[int, bytes], FoundRecords] = {}
        for block in self._blocks(view, ends):
            keys, _ = scan.records(block)
            lsns, ordinals = places.positions(block)
            deleted, old = places.deleted(block, lsns, ordinals)
            chosen = np.flatnonzero(self._chosen(view, keys)).tolist()
            if not chosen:
                continue
            right = self._partitioner(view)(block, len(view.ends))
            buckets = bucket_of(keys, view.bits)
            for i in chosen:
                partition = int(block.messages[i]["partition"])
                offset = int(block.messages[i]["offset"])
                version = RecordVersion(offset, block.value(i), bool(deleted[i]), bool(old[i]))
                known = found.get((partition, key := block.key(i)))
                shown = None if places.later(int(lsns[i])) else version
                if known is None:
                    found[partition, key] = FoundRecords(
                        int(buckets[i]), key, partition, version, shown, int(right[i]) != partition
                    )
                else:
                    known.latest, known.shown = version, shown or known.shown
        self._answer(view.table.oid).found_records += found.values()
