"""The verification's driver: moments, tasks, and what is done about keys that differ at first.

A difference that is reported is real: docs/guarantees.md has the argument.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage, PreflightError, Refused
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.lsn import format_lsn
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres import snapshot as pg
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.postgres.storage import undecoded
from airflow_bottledwater.state import control_topic, coverage, held, options, saved
from airflow_bottledwater.state.claim import read_state, unknown
from airflow_bottledwater.state.control_records import VerifiedRecord, decode, encode, verified_key
from airflow_bottledwater.state.identity import check_cluster, check_settings, check_topics, refuse_shared, resolve
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.store import state_topic_name
from airflow_bottledwater.state.verification import TableResult, Verification
from airflow_bottledwater.verify import lane
from airflow_bottledwater.verify.buckets import Buckets, bitmap, bits_for
from airflow_bottledwater.verify.compare import Compared, Comparison, Suspect
from airflow_bottledwater.verify.moment import Moment, Moments, check_complete
from airflow_bottledwater.verify.streaming import Streaming
from airflow_bottledwater.verify.task import Answer, VerifiedRange, VerifyTask, View
from airflow_bottledwater.verify.values import unverified

log = logging.getLogger(__name__)

#: runs tasks; returns what each has found
RunTasks = Callable[[Sequence[VerifyTask]], list[dict[int, Answer]]]

#: rows and records that are looked at one by one at once: they are all in the driver's memory
_AT_ONCE = 200_000
#: how often that is done with a table: each time all of it and of its topic is read
_LOOKS = 10
#: of a table that does not exist any more
_DROPPED = "it does not exist any more; its rows stay in the topic"
#: of an outbox
_OUTBOX = (
    "its rows are records of their own, and may be deleted as soon as they are inserted: there is nothing to compare"
)
#: how often a key that differs is looked at again
_ROUNDS = 6
#: differences of a table after which no more are looked for
_ENOUGH = 10_000


def run(
    pipeline: Settings,
    run_tasks: RunTasks,
    *,
    stopped: threading.Event | None = None,
    advance: Callable[[Owner | None], None] | None = None,
) -> Verification:
    """Compare the pipeline's tables with their topics, while the stream runs.

    :param advance: publishes what is committed, where no stream runs and none is about to, see
        :class:`~airflow_bottledwater.verify.streaming.Streaming`; None: that is an error.
    :param stopped: set when the job is to end.
    :raises StateError: there is no such pipeline, its snapshot is not complete, or a topic is not the one that was
        pinned.
    :raises Outage: the stream does not come up to the snapshot in time, a table is dropped or gets another key
        meanwhile, or a server does not answer.
    :raises Refused: see :func:`airflow_bottledwater.state.saved.check_started`.
    :raises StopRequested: it was asked to stop.
    """
    stopped = stopped or threading.Event()
    began = time.monotonic()
    with stoppable(stopped), session(pipeline.postgres, "Verifying") as connection:
        cluster = identify(connection)
        topic = state_topic_name(cluster.database, pipeline.slot)
        known = read_state(pipeline, topic)
        check_cluster(known, cluster, pipeline.slot)
        if known.slot is None:
            raise unknown(topic, pipeline.slot)
        check_settings(pipeline, known)
        saved.check_started(pipeline, known)
        chosen = _chosen(pipeline, connection, known)
        aside = _not_comparable(connection, pipeline, known)
        wanted = {oid: pinned for oid, pinned in chosen.items() if oid not in aside}
        check_complete(known, wanted, _to_be_read(connection, pipeline, known))
        refuse_shared(pipeline, known, [pinned.topic for pinned in wanted.values()], "Topics cannot be verified")
        check_topics(connection, pipeline, known)
        there = catalog.names(connection, list(chosen))
        results = {oid: _result(pinned, there.get(oid), aside.get(oid, "")) for oid, pinned in chosen.items()}
        moments = Moments(
            pipeline, connection, topic, wanted, stopped, Streaming(pipeline, cluster, connection, advance)
        )
        try:
            position = _VerifyDriver(pipeline, moments, wanted, results, run_tasks).run() if wanted else 0
        finally:
            moments.close()
        if differ := {oid: wanted[oid] for oid, result in results.items() if result.counts}:
            # a table may have been created again, say, or paused, or a partition attached, since the verification began
            known = read_state(pipeline, topic)
            aside = _not_comparable(connection, pipeline, known)
            results |= {
                oid: _result(pinned, there.get(oid), aside[oid]) for oid, pinned in differ.items() if oid in aside
            }
            still = {oid: pinned for oid, pinned in differ.items() if oid not in aside}
            check_complete(known, still, _to_be_read(connection, pipeline, known))
    found = sorted(results.values(), key=lambda result: result.table)
    seconds = round(time.monotonic() - began, 3)
    verified = Verification(pipeline.verify_sample, format_lsn(position), seconds, found, pipeline.allow_unverified)
    _record(pipeline, cluster.pipeline(pipeline.slot), verified, all_tables=chosen.keys() == known.tables.keys())
    return verified


def _result(pinned: PinnedTable, named: tuple[str, str] | None, aside: str) -> TableResult:
    """What is found of a table until anything is compared.

    :param named: schema and name that it has today; None if it is gone.
    :param aside: why nothing will be; empty if it will.
    """
    return TableResult(
        ".".join(named) if named is not None else pinned.table.qualified,
        pinned.topic,
        verified=not aside,
        reason=aside,
        dropped=aside == _DROPPED,
        outbox=aside == _OUTBOX,
    )


def _record(pipeline: Settings, name: str, found: Verification, *, all_tables: bool) -> None:
    """Record what is known of a pipeline now, for whoever watches it; a failure is only logged."""
    key = verified_key(name)
    try:
        before = decode(VerifiedRecord, control_topic.read(pipeline.kafka).get(key)) or VerifiedRecord()
        known = found.known_after(before, all_tables=all_tables, now=time.time())
        if known != before:
            control_topic.write(pipeline.kafka, {key: encode(known)})
    except Outage as error:
        log.warning("What was verified could not be recorded: %s", error)


def _chosen(pipeline: Settings, connection: Connection, known: PipelineState) -> dict[int, PinnedTable]:
    """The tables to verify: those of the pipeline that ``verify_tables`` names, or all.

    :raises PreflightError: a name is not one of a table of the pipeline.
    :raises Refused: values would be hashed with another key than in the topics.
    """
    options.check_hash_key(pipeline, known)
    if not pipeline.verify_tables:
        return dict(known.tables)
    oids = resolve(connection, pipeline, known, pipeline.verify_tables)
    if foreign := [oid for oid in oids if oid not in known.tables]:
        named = catalog.names(connection, foreign)
        raise PreflightError(
            [
                f"Table {schema}.{name} does not belong to the pipeline of slot {pipeline.slot!r}."
                for schema, name in named.values()
            ]
        )
    return {oid: known.tables[oid] for oid in oids}


def _not_comparable(connection: Connection, pipeline: Settings, known: PipelineState) -> dict[int, str]:
    """The pipeline's tables whose topics say nothing of what the tables hold today, and why."""
    there, below = catalog.names(connection, list(known.tables)), coverage.below(connection, known)
    children = catalog.inherited(connection, known.tables, pipeline.tables, pipeline.schemas)
    apart = undecoded(connection, known.tables)
    today = {table.oid: table for table in catalog.load(connection, list(there), TableMapping.of(pipeline))}
    found = {}
    for oid in known.tables:
        if oid not in there:
            found[oid] = _DROPPED
        elif known.tables[oid].table.outbox:
            found[oid] = _OUTBOX
        elif oid in known.held:
            found[oid] = f"it {known.gaps[oid].why}. {held.goes_on(known.gaps[oid], '.'.join(there[oid]))}"
        elif oid in below:
            found[oid] = f"it is a partition of {below[oid]} now, and its changes are in the topic of that table"
        elif why := _other_key(known.tables[oid], today.get(oid)):
            found[oid] = why
        elif oid in apart:
            found[oid] = apart[oid]
        elif left := [name for name, each in children.get(oid, {}).items() if not each.meant]:
            found[oid] = (
                f"rows of it are in tables that inherit from it and are not followed ({', '.join(left[:3])}): they are "
                "in no topic"
            )
    return found


def _other_key(pinned: PinnedTable, today: SourceTable | None) -> str:
    """Why the keys of a table cannot be compared with those of its topic; empty if they can.

    :param today: None if the table was dropped meanwhile.
    """
    try:
        if today is not None:
            pinned.check_key(today)
    except Refused as error:
        return str(error)
    return ""


def _to_be_read(connection: Connection, pipeline: Settings, known: PipelineState) -> set[int]:
    """The tables whose topics lack rows that the stream is going to read, when it has noticed it: see
    :func:`check_complete`."""
    mapping = TableMapping.of(pipeline)
    wanted = set(resolve(connection, pipeline, known, pipeline.tables, pipeline.schemas, strict=False))
    # one that the settings do not name any more is streamed as it was
    meant = known.tables.keys() & (wanted | coverage.renamed(connection, pipeline, known, wanted))
    named = catalog.names(connection, list(meant))
    filtered = [oid for oid in named if mapping.options(*named[oid]).where != known.tables[oid].table.where]
    moved = coverage.moved(coverage.below(connection, known), known)
    return {*coverage.attached(connection, pipeline, known), *moved, *filtered}


@dataclass(slots=True)
class _Search:
    """What is left to look at of a table.

    :param bits: how many buckets it has, as a power of two.
    :param queue: the buckets that differ and were not looked at yet, with the keys that both sides have in each.
    :param suspects: the keys that still differ, by identity.
    :param standing: of these, the ones that had no record in the last round.
    :param looks: how often buckets of the queue were looked at.
    """

    bits: int
    queue: list[tuple[int, int]] = field(default_factory=list)
    suspects: dict[str, Suspect] = field(default_factory=dict)
    standing: set[str] = field(default_factory=set)
    looks: int = 0


class _VerifyDriver:
    def __init__(
        self,
        pipeline: Settings,
        moments: Moments,
        wanted: Mapping[int, PinnedTable],
        results: Mapping[int, TableResult],
        run_tasks: RunTasks,
    ) -> None:
        self._pipeline, self._moments, self._wanted = pipeline, moments, wanted
        self._results, self._run_tasks = results, run_tasks
        self._seed = os.urandom(32)
        self._search: dict[int, _Search] = {}
        self._schemas = lane.schemas(pipeline)

    def run(self) -> int:
        """Compare everything; returns L of the first snapshot."""
        with self._moments.hold() as (moment, holder):
            self._sum_up(moment, self._moments.work(holder, functools.partial(self._read, moment, {})))
        self._sum_up_again()
        ends = moment.ends
        while batch := self._next_buckets():
            ends = self._look(batch, ends)
        for oid, search in self._search.items():
            self._results[oid].unexamined = sum(keys for _, keys in search.queue)
        return moment.held.insert_lsn

    # ------------------------------------------------------------------ all keys
    def _sum_up(self, moment: Moment, answers: Sequence[tuple[bool, dict[int, Answer]]]) -> None:
        """Find the buckets in which a table and its topic differ."""
        for oid, table in moment.tables.items():
            if not any(oid in found for _, found in answers):
                continue
            search = self._search[oid]
            sides = {of_topic: Buckets(search.bits) for of_topic in (False, True)}
            for of_topic, found in answers:
                if oid in found:
                    sides[of_topic].merge(found[oid].sums)
            buckets, keys = sides[True].differing(sides[False])
            search.queue = list(zip(buckets.tolist(), keys.tolist(), strict=True))
            result = self._results[oid]
            result.rows, result.left_out = sides[False].keys, unverified(table)
            if not table.keyed:
                search.queue = []
                self._judge_rows(result, sides[True].keys, differing=len(buckets))
            log.info(
                "%s: %s rows, %s of %s buckets differ at first.",
                table.qualified, f"{result.rows:,}", f"{len(search.queue):,}", f"{1 << search.bits:,}",
            )  # fmt: skip

    @staticmethod
    def _judge_rows(result: TableResult, records: int, *, differing: int) -> None:
        """Decide about a table without a key: rows and records are compared as multisets. Since its topic has inserts
        only, a difference proves nothing: rows may have been updated or deleted."""
        result.verified = not differing
        result.reason = ""
        if differing:
            result.reason = (
                f"it has no key, and the {result.rows:,} rows of the table are not the {records:,} records of its "
                "topic, which has inserts only: rows were updated or deleted, or the topic differs"
            )

    def _sum_up_again(self) -> None:
        """Sum up tables without a key again that differ from their topics: a commit may be published a moment before
        others see it."""
        for _ in range(_ROUNDS):
            differing = [oid for oid, pinned in self._wanted.items() if not self._results[oid].verified]
            if not differing:
                return
            settled = self._moments.settle(differing)
            with self._moments.hold() as (moment, holder):
                wanted: dict[int, list[int]] = {oid: [] for oid in differing}
                self._sum_up(moment, self._moments.work(holder, functools.partial(self._read, moment, wanted)))
            if settled:
                return

    # ------------------------------------------------------------------ keys that differ
    def _next_buckets(self) -> dict[int, list[int]]:
        """The next buckets to look at, by table; of one with many differences, or that was looked at often, none."""
        room, batch = _AT_ONCE, dict[int, list[int]]()
        for oid, search in self._search.items():
            if sum(self._results[oid].counts.values()) >= _ENOUGH or search.looks >= _LOOKS:
                continue
            while search.queue and (room > 0 or not batch):
                bucket, keys = search.queue.pop()
                batch.setdefault(oid, []).append(bucket)
                room -= keys
        for oid in batch:
            self._search[oid].looks += 1
        return batch

    def _look(self, batch: Mapping[int, list[int]], ends: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Look at the keys of some buckets one by one, and again at those that differ; returns the topics' ends."""
        wanted = dict(batch)
        for number in range(_ROUNDS):
            settled = self._moments.settle(list(wanted))
            with self._moments.hold() as (moment, holder):
                answers = self._moments.work(holder, functools.partial(self._read, moment, wanted))
            for oid in wanted:
                compared = self._compare(moment, oid, answers)
                self._judge(oid, compared, ends if settled else None, first=number == 0)
            ends = moment.ends
            wanted = {
                oid: [s.bucket for s in search.suspects.values()]
                for oid, search in self._search.items()
                if search.suspects
            }
            if not wanted:
                return ends
            log.info(
                "%d keys differ, or were changed meanwhile: they are looked at again.",
                sum(len(s.suspects) for s in self._search.values()),
            )
        for oid in wanted:
            self._results[oid].unsettled += len(self._search[oid].suspects)
            self._search[oid].suspects = {}
        log.warning(
            "Keys were changed whenever they were looked at. Who writes: %s.", self._moments.writers(list(wanted))
        )
        return ends

    def _compare(self, moment: Moment, oid: int, answers: Sequence[tuple[bool, dict[int, Answer]]]) -> Compared:
        view = self._views(moment, {})[oid]
        mapping = TableMapping.of(self._pipeline)
        schemas = lane.of_topic(self._pipeline, self._schemas, view.topic)
        comparison = Comparison(view, mapping.format, schemas, mapping.envelope)
        return comparison.compare([found[oid] for _, found in answers if oid in found])

    def _judge(self, oid: int, compared: Compared, ends: Mapping[str, Sequence[int]] | None, *, first: bool) -> None:
        """Decide about the keys that differ: what differs in two rounds running, without a record in either, is real.

        :param ends: the topics' ends before the last writers had ended; None if they have not ended.
        :param first: whether these buckets are looked at for the first time: later, only keys count that have differed
            before.
        """
        result, search = self._results[oid], self._search[oid]
        result.older += compared.older if first else 0
        before, stood = search.suspects, search.standing
        suspects = [s for s in compared.suspects if first or s.identity in before]
        search.standing = {s.identity for s in suspects if ends is not None and s.unchanged(ends[result.topic])}
        real = [s for s in suspects if s.certain or s.identity in stood & search.standing]
        result.add([s.difference for s in real])
        done = {s.identity for s in real}
        search.suspects = {s.identity: s for s in suspects if s.identity not in done}

    # ------------------------------------------------------------------ tasks
    def _views(self, moment: Moment, wanted: Mapping[int, list[int]]) -> dict[int, View]:
        views = {}
        for oid, table in moment.tables.items():
            topic = self._wanted[oid].topic
            ends = tuple(moment.ends[topic])
            if oid not in self._search:
                self._search[oid] = _Search(bits_for(max(_rows(table), sum(ends))))
            bits = self._search[oid].bits
            view = View(
                table, topic, ends, moment.held.insert_lsn, moment.last_lsn, moment.first.get(oid, 0),
                moment.truncated.get(topic, ""), tuple(moment.starts[topic]), bits,
            )  # fmt: skip
            if oid in wanted:
                view = replace(view, wanted=bitmap(np.array(wanted[oid], dtype=np.int64), bits))
            views[oid] = view
        return views

    def _read(self, moment: Moment, wanted: Mapping[int, list[int]]) -> list[tuple[bool, dict[int, Answer]]]:
        """Read tables and topics, all or those of which buckets are wanted; returns what each task has found, and
        whether it read topics."""
        views = self._views(moment, wanted)
        oids = list(wanted or views)
        lanes = self._pipeline.lanes
        plan = [(views[oid].table, pg.ranges(views[oid].table, self._pipeline.range_bytes)) for oid in oids]
        chunks: dict[int, list[VerifiedRange]] = {}
        for t, r, number in pg.deal(plan, lanes):
            chunks.setdefault(number, []).append(VerifiedRange(oids[t], *plan[t][1][r]))
        partitions: dict[int, dict[int, list[int]]] = {}
        every = [(oid, p) for oid in oids for p in range(len(views[oid].ends))]
        for n, (oid, p) in enumerate(every):
            partitions.setdefault(n % lanes, {}).setdefault(oid, []).append(p)
        readings = [
            *(self._reading(n, moment, views, chunks=tuple(chunks[n])) for n in sorted(chunks)),
            *(
                self._reading(len(chunks) + n, moment, views, partitions=tuple((o, tuple(p)) for o, p in each.items()))
                for n, each in sorted(partitions.items())
            ),
        ]
        found = self._run_tasks(readings)
        return [(bool(reading.partitions), answer) for reading, answer in zip(readings, found, strict=True)]

    def _reading(
        self,
        number: int,
        moment: Moment,
        views: Mapping[int, View],
        *,
        chunks: tuple[VerifiedRange, ...] = (),
        partitions: tuple[tuple[int, tuple[int, ...]], ...] = (),
    ) -> VerifyTask:
        mine = {chunk.oid for chunk in chunks} | {oid for oid, _ in partitions}
        seen = tuple(view for oid, view in views.items() if oid in mine)
        return VerifyTask(number, seen, moment.held, self._seed, self._pipeline.verify_sample, chunks, partitions)


def _rows(table: SourceTable) -> int:
    """About how many rows a table has, by its size."""
    return table.pages * 64


def in_threads(pipeline: Settings) -> RunTasks:
    """Runs tasks as threads of this process, without a JVM: for tests and small tables."""

    def run_tasks(readings: Sequence[VerifyTask]) -> list[dict[int, Answer]]:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max_workers=max(1, len(readings))) as pool:
            return list(pool.map(lambda reading: lane.run(pipeline, reading), readings))

    return run_tasks
