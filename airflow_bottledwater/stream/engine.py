"""The stream's whole path in one process, without a JVM; the Spark job is a thin wrapper around it."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psycopg

from airflow_bottledwater.backoff import Backoff, stoppable
from airflow_bottledwater.errors import (
    BeginsAnew,
    RecordError,
    Refused,
    StopRequested,
    TopicGone,
    TypeAltered,
)
from airflow_bottledwater.guard.guard import SourceGuard, guarded
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.lineage.job import Tell, telling
from airflow_bottledwater.live.snapshots import LiveSnapshots
from airflow_bottledwater.memory import Rest
from airflow_bottledwater.metrics.line import ProgressLine
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.sampler import OTHERS, TABLES, Sampler
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.connect import own, session
from airflow_bottledwater.postgres.server import flushed
from airflow_bottledwater.state import claim, letters
from airflow_bottledwater.state.identity import give_up
from airflow_bottledwater.state.movement import Movement
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Gap, StateRecord, gap_key, table_key
from airflow_bottledwater.state.schemas import SchemaWatch
from airflow_bottledwater.stream.pausing import TableControl
from airflow_bottledwater.stream.publisher import MakeRecords, StreamPublisher
from airflow_bottledwater.stream.source import ChangeSource, open_source
from airflow_bottledwater.stream.start import Start
from airflow_bottledwater.tables import writer
from airflow_bottledwater.tables.new_rows import NewRows
from airflow_bottledwater.tables.watch import TableWatch
from airflow_bottledwater.tables.writer import PreparedSteps

log = logging.getLogger(__name__)

#: seconds to wait for changes: while nothing else is to be done, and beside a live snapshot
_IDLE, _BESIDE = 0.2, 0.01
#: seconds in which P moves if there is something to publish: half of the default of transaction_timeout, in which a
#: batch is committed or given up
_STALLED = 30.0
#: seconds between two looks whether open dead letters are to be logged again
_TELL_LETTERS = 60.0


@contextmanager
def reported(pipeline: Settings, start: Start, stopped: threading.Event | None = None) -> Iterator[Controller]:
    """Run a stream's work with a controller, see :meth:`Controller.reporting`: that it was asked to stop is no error.

    :param stopped: also set when the job is asked to stop.
    """
    controller = Controller(pipeline, start.cluster, start.job)
    if stopped is not None:
        controller.stopped = stopped
    controller.status.state = "streaming"
    controller.begin_at(start.position, start.state)
    with contextlib.suppress(StopRequested), controller.reporting():
        yield controller
        if controller.stopped.is_set():
            controller.finish_stopped()
        else:
            controller.finish("finished")


class StreamReport:
    """Updates a stream's status while it runs, and logs how it gets on.

    :param watch: watches the publications; its findings are part of the status.
    :param meter: knows how far the stream is behind.
    :ivar position: P as it was last reported.
    """

    def __init__(self, controller: Controller, watch: TableWatch, position: Position, meter: Meter) -> None:
        self._controller, self._watch = controller, watch
        self.position = position
        self._line = ProgressLine(meter)
        self._letters: Mapping[str, Mapping[str, int]] = {}
        self._told_letters = -math.inf

    def tell_letters(self, open_letters: Mapping[str, Mapping[str, int]], counters: Mapping[str, int]) -> None:
        """Tell of the dead letters that nobody has settled, if they are others than before, and now and then: a live
        snapshot writes some without a change of the stream's position.

        :param counters: see :meth:`update`.
        """
        if open_letters != self._letters or time.monotonic() - self._told_letters > _TELL_LETTERS:
            self._letters, self._told_letters = open_letters, time.monotonic()
            status = self._controller.status
            status.counters = {**status.counters, **counters}
            self._controller.problems.tell("dead letters", letters.problems(open_letters))

    def begin(self, counters: Mapping[str, int]) -> None:
        """Report the counters with which streaming begins."""
        self._controller.status.counters = dict(counters)

    def update(self, position: Position, counters: Mapping[str, int]) -> None:
        """Report that the stream is at ``position``.

        :param counters: how many records of each kind are published since the slot was created.
        """
        self.position = position
        status = self._controller.status
        status.position, status.counters = str(position), dict(counters)
        if line := self._line.due(position, counters):
            log.info("%s", line)

    def tell_skipped(self, skipped_by_table: Mapping[str, int]) -> None:
        """Report what is left out, before a heartbeat: there may be more such tables than can be counted for each
        batch, and than a record of Kafka has room for.

        :param skipped_by_table: see :attr:`TransactionAssembler.skipped_by_table`.
        """
        shown = dict(Counter(skipped_by_table).most_common(TABLES))
        if len(skipped_by_table) > len(shown):
            shown[OTHERS] = sum(skipped_by_table.values()) - sum(shown.values())
        unfollowed = self._watch.unfollowed
        partitions = sorted(name for changed in self._watch.unsent.values() for name in changed)
        self._controller.status.progress = {
            "skipped_by_table": shown,
            "not_followed": [*unfollowed, *partitions][:TABLES],
            "tables_not_followed": len(unfollowed),
        }


def follow(
    pipeline: Settings, start: Start, *, bounded: bool = False, stopped: threading.Event | None = None
) -> dict[str, int]:
    """Stream with a slot that is claimed already; returns the counters, or none if it was asked to stop while it
    waited. It begins at P and with the tables as the state has them now, which may be further than at the claim, if an
    earlier attempt has worked since.

    :param bounded: whether to end once everything is published that the server had flushed to WAL at the start, instead
        of running until stopped.
    :raises BeginsAnew: what has changed is settled by the start of a stream, which is to come next.
    """
    stopped = stopped or threading.Event()
    counted: dict[str, int] = {}
    with (
        reported(pipeline, start, stopped) as controller,
        stoppable(stopped),
        (sampler := Sampler(pipeline, controller.name, lambda: controller.status, Meter())) as meter,
        guarded(pipeline, controller, meter, sampler.source) as guard,
        telling(pipeline, "stream", meter.rows) as tell,
        contextlib.closing(_Follower(pipeline, start, controller, bounded, stopped, meter, guard, tell)) as follower,
    ):
        try:
            counted = follower.run()
        except TopicGone as gone:
            raise BeginsAnew(gone.what) from gone
    return counted


class _Follower:
    """Streams; when tables are taken in, or get other topics, it begins anew behind the last batch."""

    def __init__(
        self,
        pipeline: Settings,
        start: Start,
        controller: Controller,
        bounded: bool,
        stopped: threading.Event,
        meter: Meter,
        guard: SourceGuard,
        tell: Tell,
    ) -> None:
        self._meter, self._guard, self._tell_lineage = meter, guard, tell
        self._pipeline, self._start, self._bounded, self._stopped = pipeline, start, bounded, stopped
        self._known = claim.read_state(pipeline, start.state_topic, must_exist=True)
        self._backoff = stream_backoff(pipeline, stopped)
        own = self._known.copy()
        self._watch = TableWatch(pipeline, start.cluster, own, controller.problems, patient=not bounded)
        self._report = StreamReport(controller, self._watch, start.position, meter)
        self._controller, self._problems = controller, controller.problems
        self._problems.tell("lost schemas", start.schemas.problems)
        self._target: int | None = None
        self._publisher: StreamPublisher | None = None
        self._skipped: Callable[[], Mapping[str, int]] = dict
        #: what the sources before this one have counted, each from 0
        self._counted = Counter[str]()
        self._control = TableControl(pipeline, start.cluster.pipeline(pipeline.slot))
        self._movement = Movement(
            controller.problems,
            f"Slot {pipeline.slot}",
            stalled=_STALLED,
            backoff=self._backoff,
            slow=lambda: self._publisher.slow if self._publisher else "",
            behind=lambda: meter.behind[0] if meter.behind else 0.0,
        )
        controller.watch(self._tell)

    def close(self) -> None:
        """End the watch, hear no more requests, and tell what was left out since the last heartbeat."""
        self._report.tell_skipped(self._skipped())
        self._watch.close()
        self._control.close()

    def _tell(self) -> str:
        """Before each heartbeat: tell what is left out, what keeps the stream from moving, and what is wrong with its
        topics; returns the job's state."""
        self._report.tell_skipped(self._skipped())
        if self._publisher is not None:
            self._tell_problems(self._publisher)
        return "waiting" if self._movement.look() else "streaming"

    def _tell_problems(self, publisher: StreamPublisher) -> None:
        self._problems.tell("topics", publisher.topic_problems(self._controller.lost_at))
        self._problems.tell("live snapshots", publisher.live.problems)

    def run(self) -> dict[str, int]:
        """See :func:`follow`."""
        self._look()
        self._watch.start()
        self._control.catch_up()
        while True:
            with contextlib.closing(
                StreamPublisher(self._pipeline, self._start, self._known, self._backoff, self._meter)
            ) as publisher:
                publisher.live.unsettled, publisher.live.hold = self._watch.unsettled, writer.hold
                self._be_guarded(publisher.live)
                publisher.reached()
                if self._publisher is not None:
                    publisher.live.lacking = self._publisher.live.lacking
                self._publisher = publisher  # heartbeats tell what it finds wrong
                if publisher.state.tables != self._known.tables:
                    # an attempt of before has given tables other topics since the state was read
                    self._known = publisher.state
                    continue
                try:
                    counted = self._stream(publisher)
                except TypeAltered as altered:
                    log.warning("%s It reads the definitions anew.", altered.what)
                    counted = None
                if counted is not None:
                    return counted
                self._known = publisher.state
            if self._bounded:
                self._look()

    def _be_guarded(self, live: LiveSnapshots) -> None:
        """Let the guard see the sessions of live snapshots, and tell them to rest."""
        self._guard.watch(list(self._known.tables), lambda: live.sessions)
        live.rests = lambda: self._guard.rest

    def _look(self) -> None:
        """Look at the tables, and let a bounded run go on until what is due for them can be carried out."""
        self._watch.look_now()
        if self._bounded:
            end = flush_target(self._pipeline) if self._target is None else self._target
            self._target = max(end, self._watch.waits())

    def _stream(self, publisher: StreamPublisher) -> dict[str, int] | None:
        """Stream until the end; returns the counters, or None if other tables are to be streamed."""
        held = publisher.state.held
        if self._heed(publisher, held) or self._carry_out(publisher):
            return None
        stopped, live = self._stopped, publisher.live
        self._report.begin({**publisher.counters, **self._counted})
        self._tell_lineage(publisher.state.tables.values())
        with (
            contextlib.closing(
                SchemaWatch(self._pipeline, publisher.state, self._problems, self._start.schemas)
            ) as schemas,
            self._counting(
                open_source(self._pipeline, self._start, publisher.state, self._backoff, publisher.position)
            ) as source,
        ):
            self._skipped, source.tell = lambda: source.skipped_by_table, self._problems.tell
            source.later = lambda: publisher.state.later
            rest = Rest(source.rest)

            def told(reached: Position) -> None:
                source.acknowledge(reached)
                self._movement.moved()
                self._report.update(publisher.position, self._counters(publisher, source))

            while not stopped.is_set() and not self._is_done(publisher):
                batch = source.next(
                    _BESIDE if live.active and not live.rests() else _IDLE, flush_empty=self._bounded or live.waits
                )
                if not publisher.position.ordinal:
                    schemas.check(publisher.state)
                if _new_gaps(source.set_aside, publisher.state.gaps):
                    # before anything behind these changes is published
                    publisher.write(functools.partial(_gaps, source.set_aside))
                    self._watch.changed(publisher.state)
                    if self._bounded:
                        self._look()
                if batch is not None:
                    told(publisher.publish(batch, told))
                else:
                    publisher.reached()  # compares the topics in time, also while there is nothing to publish
                    if self._controller.replaced:  # what it publishes next would fail, but nothing may ever come
                        claim.reached(self._pipeline, self._start.state_topic, self._start.job)
                    self._movement.moved()
                if self._heed(publisher, held):
                    return None
                live.work()
                self._report.tell_letters(publisher.open_letters, publisher.counters)
                if self._carry_out(publisher):
                    return None
                rest.note(worked=live.active or (batch is not None and len(batch.changes) > 0))
            self._movement.end()
            self._tell_problems(publisher)
            return self._counters(publisher, source)

    def _counters(self, publisher: StreamPublisher, source: ChangeSource) -> dict[str, int]:
        """What is published since the slot was created, and what this job has received."""
        received = {name: self._counted[name] + count for name, count in source.statistics.items()}
        return {**publisher.counters, **received}

    @contextmanager
    def _counting(self, source: ChangeSource) -> Iterator[ChangeSource]:
        """Close a source in the end, and go on counting behind it."""
        with contextlib.closing(source):
            try:
                yield source
            finally:
                self._counted.update(source.statistics)

    def _heed(self, publisher: StreamPublisher, held: frozenset[int]) -> bool:
        """Carry out what was asked for about single tables; returns whether the stream has to begin anew, without
        tables of which it has published changes.

        :param held: the tables of which it has published none.
        """
        asked = self._control.carry_out(publisher)
        more = bool(publisher.state.held - held)
        if asked or more:
            self._watch.changed(publisher.state)
        if asked and self._bounded and not more:
            self._look()
        return more

    def _carry_out(self, publisher: StreamPublisher) -> bool:
        """Carry out what is due for the tables; returns whether the stream has to begin anew for that."""
        self._watch.give(publisher.state)
        prepared = self._watch.due(publisher.position)
        if prepared is None:
            return False
        make = functools.partial(writer.records, self._pipeline, prepared)
        if prepared.rows is None:
            publisher.write(make)
            known = publisher.state
        elif (taken := self._take_in(prepared, prepared.rows, make, publisher.state)) is not None:
            known = taken
        else:
            return True
        self._watch.carried_out(prepared, known)
        give_up(self._pipeline, known)
        name = self._start.cluster.pipeline(self._pipeline.slot)
        snapshots.ask_for_recorded(self._pipeline, name, known)
        return prepared.changes_topics

    def _take_in(
        self, prepared: PreparedSteps, rows: NewRows, make: MakeRecords, known: PipelineState
    ) -> PipelineState | None:
        """Publish the rows of new tables without a key, by a publisher that knows their topics, too; returns the state
        behind them, or None if they cannot be published. The stream has to begin anew in any case."""
        with_new = known.copy()
        with_new.apply({table_key(oid): prepared.pinned[oid] for oid in rows.blocks})
        with (
            contextlib.closing(rows),
            contextlib.closing(
                StreamPublisher(self._pipeline, self._start, with_new, self._backoff, self._meter)
            ) as publisher,
        ):
            try:
                publisher.take_in(rows, make)
            except (RecordError, Refused, psycopg.Error) as error:
                what = own(error, "Reading new rows")
                log.error("The rows of new tables cannot be published: %s", what)
                self._watch.refused(prepared, what)
                return None
            return publisher.state

    def _is_done(self, publisher: StreamPublisher) -> bool:
        """Whether a bounded run has done everything: it is at its target, and no live snapshot is asked for."""
        if self._target is None or publisher.position.lsn < self._target or publisher.live.active:
            return False
        publisher.live.catch_up()
        self._control.catch_up()
        return not publisher.live.active and not self._control.open


def _gaps(set_aside: Mapping[int, Gap], known: PipelineState) -> dict[str, StateRecord | None]:
    """The records of tables whose changes are left out from now on."""
    new = _new_gaps(set_aside, known.gaps)
    left = {oid: gap for oid, gap in new.items() if gap.held}
    return {gap_key(oid): gap for oid, gap in new.items()} | writer.hold(known, left)


def _new_gaps(set_aside: Mapping[int, Gap], gaps: Mapping[int, Gap]) -> dict[int, Gap]:
    """Those that are to be recorded: also of a table that has a gap of which a look would let it go on."""
    return {oid: gap for oid, gap in set_aside.items() if oid not in gaps or (gap.held and not gaps[oid].held)}


def stream_backoff(pipeline: Settings, stopped: threading.Event | None = None) -> Backoff:
    """The backoff of a stream, up to ``outage_timeout``; without a limit if ``on_error`` is not exit."""
    return Backoff(pipeline.outage_timeout if pipeline.on_error == "exit" else None, stopped)


def flush_target(pipeline: Settings) -> int:
    """The LSN at which a bounded run ends: ``pg_current_wal_flush_lsn()`` now."""
    with session(pipeline.postgres, "Reading the WAL position", application="bottledwater bounded run") as connection:
        return flushed(connection)
