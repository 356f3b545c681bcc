"""Live snapshots in the process that publishes the stream: which are asked for, which are read now, and their ends.

Everything here runs in the publisher's thread, between two batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from airflow_bottledwater.backoff import Refusals
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, RecordError, Refused, rotated
from airflow_bottledwater.jobs.log import tell_row
from airflow_bottledwater.jobs.snapshots import SnapshotRequests
from airflow_bottledwater.live.changed_keys import MOST
from airflow_bottledwater.live.report import Reports
from airflow_bottledwater.live.snapshot import Broken, Failed, LiveSnapshot
from airflow_bottledwater.live.wanted import named, wanted
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import ErrorAction, act
from airflow_bottledwater.postgres.connect import session as connected
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state import held
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Gap, LiveProgress, StateRecord, live_key

log = logging.getLogger(__name__)

#: makes the records with which tables are held, from the state and why each is
Hold = Callable[[PipelineState, Mapping[int, Gap]], dict[str, StateRecord | None]]

#: the kind of the problem that a topic lacks rows, since what is to read them waits for others than the stream
ROWS_MISSING = "rows-missing"
_END_THEM = (
    "If that does not pass by itself: end the transactions that are named as what is in the way (COMMIT, ROLLBACK "
    "PREPARED, pg_terminate_backend); if none are, mend what does not answer, or refuses."
)
#: live snapshots that are read at a time, each with a session of its own: small tables take most of their time waiting
_SIDE_BY_SIDE = 4
#: seconds until the beginning of a live snapshot, or telling its end, is tried again after an outage: each try holds up
#: the stream
_AGAIN = 5.0


class LiveSnapshots:
    """Publishes the rows of the requests, in the order of the stream: of a few at a time, but never of two that have a
    table in common.

    :param name: the pipeline's name, see :meth:`~airflow_bottledwater.model.slot.Cluster.pipeline`.
    :param session: the stream's own.
    :ivar unsettled: whether something may be about to be done about one of some tables, given by their oids, that is
        not known to a look which began before a time of :func:`time.monotonic`: a refusal is not final until then.
    :ivar hold: the records with which tables are set aside, see :func:`airflow_bottledwater.tables.writer.hold`.
    :ivar lacking: those that wait, or that are paused, although topics lack rows without them, by their requests' ids:
        the names of the tables that lack them, what it waits for, and what can be done. It is replaced, never changed,
        so that any thread may read it. A stream that begins anew goes on with what it was.
    :ivar rests: tells why nothing is to be read now, as a sentence; empty if that is not so.
    """

    def __init__(self, pipeline: Settings, name: str, session: PublishSession) -> None:
        self._pipeline, self._session = pipeline, session
        self.unsettled: Callable[[Collection[int], float], bool] = lambda _oids, _since: False
        self.hold: Hold = lambda _known, _gaps: {}
        #: when each request was refused first
        self._refused_at: dict[str, float] = {}
        self.rests: Callable[[], str] = str
        self._requests = SnapshotRequests(pipeline, name)
        self._reports = Reports(pipeline, name)
        #: those that are read now, by their requests' ids
        self._serving: dict[str, LiveSnapshot] = {}
        #: when the next chunk may be published, unless the stream has had nothing to publish since the last one
        self._not_before, self._shared = 0.0, False
        #: when a beginning, or telling an end, may be tried again
        self._again, self._refusals = 0.0, Refusals()
        #: when the stream was given back its time, and the seconds that it took for its last batch
        self._given_back, self._batch_took = time.monotonic(), 0.0
        self._untidy = True
        self.lacking: dict[str, tuple[list[str], str, str]] = {}

    def close(self) -> None:
        """End what is being read; it is read on by the next job."""
        self._forget(self._serving)
        self._requests.close()
        self._reports.close()

    @property
    def active(self) -> bool:
        """Whether there is a live snapshot to be worked on."""
        return self._requests.active

    @property
    def sessions(self) -> list[int]:
        """The process ids of the sessions that read tables now. Any thread may ask."""
        reading = [each.reading for each in list(self._serving.values())]
        return [pid for each in reading if each is not None and (pid := each.session) is not None]

    @property
    def problems(self) -> list[Problem]:
        """The tables whose topics lack rows that nobody can read now, whoever is in the way. Any thread may ask."""
        return [
            Problem(ROWS_MISSING, name, why, remedy) for names, why, remedy in self.lacking.values() for name in names
        ]

    @property
    def waits(self) -> bool:
        """Whether rows wait for the stream to reach the place where they may be published."""
        return any(each.waits for each in self._serving.values())

    def catch_up(self) -> None:
        """Read all requests that were made until now.

        :raises Outage: Kafka does not answer.
        """
        self._requests.read()

    # ------------------------------------------------------------------ the stream tells what it does
    def publishing(self, encoded: EncodedBatch) -> None:
        """Note the changes of a batch before it is published."""
        self._shared = self._shared or len(encoded.records.table) > 0
        for each in self._serving.values():
            each.publishing(encoded)

    def reached(self, position: Position | None) -> None:
        """Note P behind a batch that was noted."""
        for each in self._serving.values():
            each.reached(position)

    def expect(self, position: Position | None) -> None:
        """Before a batch is published, see :meth:`LiveSnapshot.expect`."""
        for each in self._serving.values():
            each.expect(position)

    # ------------------------------------------------------------------ work
    def work(self) -> None:
        """Do what can be done now: at most one chunk is published. An error of a live snapshot ends that snapshot, not
        the stream.

        :raises Outage: credentials are refused with which the job had worked: a new job gets the new ones.
        :raises BottledWaterError: an error of the stream itself: the slot was taken over, say, or a topic is gone.
        """
        self._batch_took = time.monotonic() - self._given_back
        self._requests.poll()
        if not self._requests.complete:
            # one that was answered before may be among them: that is only known behind the last
            self._given_back = time.monotonic()
            return
        served, why = dict[str, LiveProgress](), self.rests()
        for request_id, request in list(self._requests.open.items()):
            progress = self._session.state.live(request_id)
            if progress is not None and progress.ended:
                if time.monotonic() >= self._again:
                    self._end(request_id, progress, progress.ended, progress.error)
            elif request.cancelled and not (progress is not None and progress.required):
                self._end(request_id, progress, "cancelled")
            elif request.paused:
                self._reports.tell(request_id, "paused", progress)
            elif why:
                # what is read is forgotten, and with it its session, locks and snapshot
                self._reports.tell(request_id, "waiting", progress, tables=self._session.state.tables, waits_for=why)
            elif len(served) < _SIDE_BY_SIDE:
                busy = {oid for each in served.values() for oid in each.tables}
                progress = progress or self._begin(request_id, request)
                if progress is not None and busy.isdisjoint(progress.tables):
                    served[request_id] = progress
                    self._serve(request_id, request)
        self._forget(self._serving.keys() - served.keys())
        self._publish(served)
        self._tidy()
        self.lacking = dict(self._lacking(served.keys()))
        self._given_back = time.monotonic()

    def _lacking(self, served: Collection[str]) -> Iterator[tuple[str, tuple[list[str], str, str]]]:
        """See :attr:`lacking`."""
        for request_id, request in self._requests.open.items():
            progress = self._session.state.live(request_id)
            if progress is None or progress.ended or not progress.unfinished:
                continue
            # one that is not read yet waits for those that are
            way = [self._serving.get(request_id)] if request_id in served else self._serving.values()
            readings = [each.reading for each in way if each is not None]
            what = f"Rows of it are still to be read by live snapshot {request_id}, which"
            if request.paused:
                remedy = f"Let it go on: bottledwater snapshots --resume {request_id}."
                yield request_id, (self._left(progress), f"{what} is paused.", remedy)
            elif why := next((each.waits_for for each in readings if each is not None and each.waits_for), ""):
                yield request_id, (self._left(progress), f"{what} waits: {why.rstrip('.')}.", _END_THEM)
            elif request_id in self.lacking and any(each is None or not each.stepped for each in readings):
                # whether it still waits is not known yet
                yield request_id, (self._left(progress), *self.lacking[request_id][1:])

    def _left(self, progress: LiveProgress) -> list[str]:
        """The names of the tables of which rows are still to be read."""
        tables = self._session.state.tables
        return [tables[oid].table.qualified if oid in tables else str(oid) for oid in progress.tables[progress.done :]]

    def _serve(self, request_id: str, request: SnapshotRequest) -> None:
        """Make what reads a request, unless it is there already."""
        serving = self._serving.get(request_id)
        if serving is None or serving.request != request:
            # another request, or other limits
            self._forget([request_id])
            self._serving[request_id] = LiveSnapshot(self._pipeline, self._session, request_id, request)

    def _begin(self, request_id: str, request: SnapshotRequest) -> LiveProgress | None:
        """Record which tables a request means; None if that cannot be found out now, or not at all."""
        if time.monotonic() < self._again:
            return None
        tables = self._session.state.tables
        try:
            with connected(
                self._pipeline.postgres, "Beginning a live snapshot", application="bottledwater live snapshot"
            ) as connection:
                try:
                    progress = LiveProgress(wanted(self._pipeline, connection, request, self._session.state))
                except Refused as refused:
                    oids = named(self._pipeline, connection, request, self._session.state)
                    if self._may_change(request_id, oids):
                        raise Outage(f"{refused.what} Whether this is about to change is being looked at.") from refused
                    raise
            self._refusals.over()
            self._refused_at.pop(request_id, None)
        except BottledWaterError as error:
            if isinstance(error, CredentialsRefused):
                if self._refusals.last():
                    raise rotated(error) from error
            elif act(error) is not ErrorAction.WAIT:
                log.error("The live snapshot failed: %s", error)
                self._end(request_id, None, "failed", str(error))
                return None
            log.info("A live snapshot waits: %s", error)
            self._reports.tell(request_id, "waiting", None, waits_for=str(error))
            self._again = time.monotonic() + _AGAIN
            return None
        log.info(
            "A live snapshot of %s%s begins.",
            ", ".join(tables[oid].table.qualified for oid in progress.tables),
            f" where {request.where}" if request.where else "",
        )
        self._write({live_key(request_id): progress})
        return progress

    def _publish(self, served: dict[str, LiveProgress]) -> None:
        """Take what is read of those that are served, and publish one chunk: of the one that has waited longest."""
        if sum(each.noted for each in self._serving.values()) > MOST:
            most = max(self._serving, key=lambda each: self._serving[each].noted)
            log.warning(
                "The stream has changed too many keys since rows of live snapshot %s were read: they are read again. "
                "If this is said of it once more, ask for its tables one at a time, or when less is changed.",
                most,
            )
            self._forget([most])
        ready = [each for each, progress in served.items() if self._is_ready(each, progress)]
        if not ready or (self._shared and time.monotonic() < self._not_before):
            return
        request_id = min(ready, key=lambda each: self._serving[each].published_at)
        began = time.monotonic()
        try:
            last = self._serving[request_id].publish(served[request_id], self._batch_took)
        except Broken:
            self._serving[request_id].forget()
            return
        except Failed as failure:
            self._fail(request_id, served[request_id], failure)
            return
        self._shared = False
        self._not_before = time.monotonic() + (time.monotonic() - began) * (1 / self._pipeline.live_share - 1)
        if last:
            self._end(request_id, self._session.state.live(request_id), "finished")

    def _is_ready(self, request_id: str, progress: LiveProgress) -> bool:
        """Whether a chunk of a request can be published; one whose rows are all published ends."""
        serving = self._serving.get(request_id)
        if serving is None:
            return False
        if progress.done == len(progress.tables):
            # a job died behind its last rows: nothing else would end it
            self._end(request_id, progress, "finished")
            return False
        try:
            ready = serving.advance(progress)
        except Failed as failure:
            if isinstance(failure.error, Refused) and self._may_change(request_id, progress.tables):
                tables = self._session.state.tables
                self._reports.tell(request_id, "waiting", progress, tables=tables, waits_for=str(failure.error))
            else:
                self._fail(request_id, progress, failure)
            return False
        self._refused_at.pop(request_id, None)
        tables = self._session.state.tables
        self._reports.tell(request_id, serving.state, progress, serving.reading, tables, boundary=serving.boundary)
        return ready

    def _may_change(self, request_id: str, oids: Collection[int]) -> bool:
        """Whether what refuses a request may be about to change: its table was dropped, say, and the stream is about to
        follow the one that bears the name now."""
        return self.unsettled(oids, self._refused_at.setdefault(request_id, time.monotonic()))

    def _fail(self, request_id: str, progress: LiveProgress, failure: Failed) -> None:
        """End it; if a row of a table cannot be published that is set aside then (``on_error = isolate``), together
        with that."""
        pinned = self._session.state.tables[progress.tables[progress.done]]
        isolated = TableMapping.of(self._pipeline).policy(pinned.table) == "isolate"
        if not isolated or not isinstance(failure.error, RecordError):
            log.error("The live snapshot failed: %s", failure.error)
            tell_row(log, failure.error)
            self._end(request_id, progress, "failed", str(failure.error))
            return
        position = self._session.state.position
        if position is not None and position.ordinal:
            return  # a table is set aside between two transactions: it fails again
        log.error("%s is set aside, and all others go on: %s", pinned.table.qualified, failure.error)
        tell_row(log, failure.error)
        gap = held.set_aside("a row", failure.error.what)
        records = self.hold(self._session.state, {pinned.table.oid: gap})
        if not progress.required:
            records[live_key(request_id)] = replace(progress, ended="failed", error=str(failure.error))
        self._forget([request_id])
        self._write(records)

    # ------------------------------------------------------------------ its end
    def _end(self, request_id: str, progress: LiveProgress | None, how: str, error: str = "") -> None:
        """Record the end, then report it, and remove the request: in this order, so that a crash between them repeats
        the rest only."""
        serving = self._serving.get(request_id)
        boundary = serving.boundary if serving is not None else ""
        self._forget([request_id])
        self._refused_at.pop(request_id, None)
        ended = replace(progress or LiveProgress(()), ended=how, error=error)
        if ended != progress:
            self._write({live_key(request_id): ended})
            log.info("The live snapshot is %s: %s rows.", how, f"{ended.rows:,}")
        try:
            self._reports.tell(request_id, how, ended, tables=self._session.state.tables, boundary=boundary)
            self._requests.remove(request_id)
        except Outage as outage:
            log.warning("The end of live snapshot %s cannot be told yet: %s", request_id, outage)
            self._again = time.monotonic() + _AGAIN
        self._untidy = True

    def _tidy(self) -> None:
        """Remove the records of live snapshots whose requests are answered: when the requests are known, and behind
        each end. This is called for each batch, and the state may have many records."""
        if not self._untidy:
            return
        self._untidy = False
        # if it is not required, one that nobody asks for has ended, or was begun by a request that was answered
        # already
        ended = {each for each, progress in self._session.state.lives.items() if not progress.unfinished}
        if gone := ended - self._requests.open.keys():
            self._write({live_key(each): None for each in gone})

    def _write(self, records: dict[str, StateRecord | None]) -> None:
        self._session.run(lambda: self._session.transact([], records))

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            if (serving := self._serving.pop(request_id, None)) is not None:
                serving.forget()
