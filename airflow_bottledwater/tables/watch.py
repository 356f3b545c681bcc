"""Looks at the catalog while a stream runs, in a thread of its own, and prepares what is to be done about its tables;
the stream carries it out between two batches."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import psycopg

from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Refused, SlotError, beside
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import ddl, publication
from airflow_bottledwater.postgres.connect import Connection, own, session
from airflow_bottledwater.postgres.dsn import describe
from airflow_bottledwater.provision.source_checks import check_standbys
from airflow_bottledwater.state.identity import check_source
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.tables import checks, writer
from airflow_bottledwater.tables.look import CatalogLook, look, mark
from airflow_bottledwater.tables.plan import NOT_COMPLETE, PINNING, ROWS_ELSEWHERE, Do, Step, Unfit, plan, unfollowed
from airflow_bottledwater.tables.writer import PreparedSteps

log = logging.getLogger(__name__)

#: seconds between two looks, and between two questions whether anything has changed since the last one
INTERVAL, QUESTION = 10.0, 1.0
#: how many times as long as such a question takes it rests afterwards, and behind a look that has found nothing to be
#: done: with tens of thousands of tables, a question takes tenths of a second of the server's time, and a look some
#: seconds of Python's, which the stream needs. If a change asks for another look, it rests as long as the last one took
_REST = 9.0
#: seconds for which the reason of a step has to last before it is carried out while the stream runs: helper tables of
#: migrations live for seconds, and names are exchanged in several statements
LASTS = 3.0
#: the same for a new table without a key: pg_restore gives a table its key when the rows of all tables are there, and
#: one that was taken in without a key stays so
KEYLESS = 600.0
#: seconds after which a live snapshot that has failed, and without which a topic lacks rows, is tried again
AGAIN = 30.0
#: the kind of the problem that the catalog cannot be looked at, which is also the part that tells it
_UNCHECKED = "tables-unchecked"
#: seconds without a look that has succeeded after which that is a problem
UNCHECKED = 60.0
#: the seconds that a statement of a look may take
STATEMENT = 5.0
#: what can be done where no session can be opened, and where a statement takes longer
_NO_SESSION = (
    "See that the pipeline's role may open a new session: CONNECT on the database, CONNECTION LIMIT of role and "
    "database, and the server's max_connections."
)
_TOO_SLOW = (
    "Find out what keeps it from reading the catalog: a session that has one of the catalog's tables locked (pg_locks), "
    "a server that is overloaded, or a catalog that has to be vacuumed (VACUUM pg_class, pg_attribute)."
)
#: partitions that a line of the log names
_NAMED = 3
#: seconds to wait for the state as the stream has it, which gives it between two batches
_PATIENCE = 2.0


def _key(step: Step) -> tuple[int, Do, str]:
    """What a step is, at one look and the next."""
    return step.oid, step.do, step.topic


def not_followed(names: Sequence[str]) -> Refused:
    """The error of new tables where ``new_tables`` is stop."""
    return Refused(
        f"{', '.join(names)}: created since the slot was, and new_tables is stop.",
        "Run create_slot and the snapshot again (or start the command again), which take in what is new with all its "
        "rows; or set new_tables to add or ignore.",
    )


def _tell_unsent(table: str, changed: Sequence[str]) -> str:
    """What happened to partitions of a table without a change of their rows, and what can be done: a table of which a
    partition is dropped each day has hundreds of them, and each new job finds them all."""
    more = f", and {len(changed) - _NAMED:,} more" if len(changed) > _NAMED else ""
    return (
        f"Partitions of {table}: {'; '.join(changed[:_NAMED])}{more}. PostgreSQL sends no change for their rows, so the "
        "topic may differ from the table. Bring the topic to the table again with a live snapshot with sweep of the "
        "whole table. Of one without a key, which cannot be read again, only rows that were attached can be had: detach "
        "them, and insert them into the table."
    )


class TableWatch:
    """Compares the catalog with what is known, and prepares what is due. The thread starts with :meth:`start`.

    :param known: the state when the stream was claimed.
    :param problems: receives what is wanted and not followed, or not as it is meant.
    :param patient: whether a reason has to last before something is done about it (:data:`LASTS`).
    :ivar unfollowed: the names of the tables that are not followed.
    :ivar unsent: see :func:`airflow_bottledwater.state.coverage.unsent`.
    """

    def __init__(
        self, pipeline: Settings, cluster: Cluster, known: PipelineState, problems: Problems, *, patient: bool
    ) -> None:
        self._pipeline, self._cluster, self._problems = pipeline, cluster, problems
        self._known, self._patient = known, patient
        self._given, self._asked = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._mark, self._again = "", 0.0
        #: seconds for which nothing is asked after the last question
        self._rest = 0.0
        #: when each step came up first, and where the end of the WAL was at the look since which it has been possible
        self._since: dict[tuple[int, Do, str], float] = {}
        self._behind: dict[tuple[int, Do, str], int] = {}
        #: the new tables without a key of which the log has that they wait
        self._waiting = frozenset[tuple[int, Do, str]]()
        #: since when a publication is missing; 0 if none is
        self._unpublished = 0.0
        #: who was writing to the tables that are to be taken in when they were published
        self._writers: dict[int, writer.EarlierWriters] = {}
        #: when required live snapshots are tried again; 0 if none has failed
        self._retry_at = 0.0
        self._prepared: PreparedSteps | None = None
        # how often something was carried out; what is prepared for a state of before does not count
        self._generation, self._lock, self._looking = 0, threading.Lock(), threading.Lock()
        #: when the last look began, and the tables about which it has found something to be done
        self._looked = (-math.inf, frozenset[int]())
        #: whether the last look has succeeded; and when one last did, or nothing was found to have changed since
        self._sees, self._succeeded = False, time.monotonic()
        self._error: Exception | None = None
        self._new: list[str] = []
        #: new tables whose rows could not be read or published
        self._refused: dict[int, Unfit] = {}
        self.unfollowed: list[str] = []
        self.unsent: dict[str, dict[str, str]] = {}
        self._thread = threading.Thread(target=self._run, name="tables", daemon=True)

    def start(self) -> None:
        """Look again and again from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end, without waiting for it: if it waits for a server that does not answer, it ends after
        that."""
        self._ended.set()
        with self._lock:
            self._give_up()

    # ------------------------------------------------------------------ for the stream
    def give(self, known: PipelineState) -> None:
        """Give the state as it is now, if the thread asks for it.

        :param known: the stream's own, which goes on changing.
        """
        if self._asked.is_set():
            self._asked.clear()
            self._known = known.copy()
            self._given.set()

    def changed(self, known: PipelineState) -> None:
        """Look at once, with the state as it is now.

        :param known: see :meth:`give`.
        """
        with self._lock:
            self._generation += 1
            self._known = known.copy()
            self._give_up()
            self._again = 0.0

    def due(self, reached: Position) -> PreparedSteps | None:
        """What is to be carried out now; None if there is nothing.

        :param reached: P.
        :raises StateError: changes of all tables may be missing from the stream.
        :raises SlotError: the connection leads to another server than the stream's.
        :raises Refused: there are new tables, and ``new_tables`` is stop; or the settings give a key another form.
        """
        if self._error is not None:
            raise self._error
        if self._new and self._pipeline.new_tables == "stop":
            raise not_followed(self._new)
        with self._lock:
            prepared = self._prepared
            if prepared is None or reached.ordinal or reached.lsn < prepared.lsn:
                return None
            self._prepared = None  # whoever has it closes it
            return prepared

    def unsettled(self, oids: Iterable[int], since: float) -> bool:
        """Whether something is to be done about one of some tables, or may be: that is known as soon as a look has
        ended which began after ``since``. If there is none, the next one begins at once.

        :param since: on the clock of :func:`time.monotonic`.
        """
        began, due = self._looked
        if began < since:
            self._again = 0.0
            return True
        return not due.isdisjoint(oids)

    def waits(self) -> int:
        """Where the stream has to be before what is prepared can be carried out; 0 if nothing is."""
        return self._prepared.lsn if self._prepared is not None else 0

    def refused(self, prepared: PreparedSteps, error: BottledWaterError) -> None:
        """Leave the new tables out whose rows cannot be published, until the next start of the stream: that of the
        topic which the error names, or else all that were read together."""
        if prepared.rows is not None:
            new = list(prepared.rows.blocks)
            named = [oid for oid in new if prepared.pinned[oid].topic == getattr(error, "topic", "")]
            self._refused |= dict.fromkeys(named or new, checks.refused(error, lasts=True))

    def carried_out(self, prepared: PreparedSteps, known: PipelineState) -> None:
        """Go on with the state behind what was prepared."""
        writer.tell(prepared)
        self.changed(known)

    def look_now(self) -> None:
        """Look at once: before the stream begins, and in a bounded run also when something was carried out. If a server
        refuses the credentials, that is told: the stream needs no registry for the tables that it has.

        :raises BottledWaterError: see :meth:`due`, or the source does not answer.
        """
        what = "Looking at the tables"
        try:
            with self._looking, session(self._pipeline.postgres, what, application="bottledwater tables") as connection:
                self._look(connection)
        except CredentialsRefused as error:
            self._tell_unchecked(error, True, 0.0)
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        while not self._ended.wait(max(min(QUESTION, INTERVAL), self._rest)) and self._error is None:
            opened = False
            try:
                with session(self._pipeline.postgres, application="bottledwater tables") as connection:
                    opened = True
                    connection.execute(f"SET statement_timeout = {int(STATEMENT * 1000)}")
                    self._ask(connection)
            except (BottledWaterError, psycopg.Error) as error:
                log.debug("The tables could not be looked at: %s", error)
                self._failed_to_look(error, opened)
            except Exception as error:
                # nobody would look any more
                self._error = error

    def _failed_to_look(self, error: BottledWaterError | psycopg.Error, opened: bool) -> None:
        """Tell that nobody knows what becomes of the tables, if that lasts: the stream's own session goes on also where
        no other may be opened, or where the catalog cannot be read.

        :param opened: whether a session was.
        """
        ago = time.monotonic() - self._succeeded
        if ago >= UNCHECKED and not self._ended.is_set():
            self._tell_unchecked(error, opened, ago)

    def _tell_unchecked(self, error: BottledWaterError | psycopg.Error, opened: bool, ago: float) -> None:
        known = own(error, "Looking at the tables")
        what = f"The tables cannot be looked at, so that nobody notices new ones, or what is altered: {known.what}"
        remedy = beside(known) or ("It is tried again." if opened else _NO_SESSION)
        if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
            what += f" Each statement of a look may take {STATEMENT:g} s."
            remedy = _TOO_SLOW
        server = describe(self._pipeline.postgres)
        self._problems.tell(_UNCHECKED, [Problem(_UNCHECKED, server, what, remedy, since=time.time() - ago)])

    def _ask(self, connection: Connection) -> None:
        """Look if something may have changed, or may be done now."""
        began = time.monotonic()
        found = mark(connection)
        self._rest = _REST * (time.monotonic() - began)
        if found == self._mark and time.monotonic() < self._again:
            if self._sees:
                self._succeed()
            return
        self._asked.set()
        if self._given.wait(_PATIENCE):
            self._given.clear()
        self._mark = found
        began = time.monotonic()
        self._again = math.inf  # the look says what is due before the next one
        try:
            with self._looking:
                self._look(connection)
        finally:
            took = time.monotonic() - began
            self._rest += took
            # one that has failed knows of nothing to be done
            self._look_at(began + (max(INTERVAL, took + _REST * took) if self._sees else INTERVAL))

    def _look_at(self, when: float) -> None:
        """Look again then, if not before."""
        with self._lock:
            self._again = min(self._again, when)

    def _succeed(self) -> None:
        self._sees, self._succeeded = True, time.monotonic()
        self._problems.tell(_UNCHECKED, [])

    def _look(self, connection: Connection) -> None:
        self._sees = False
        try:
            check_source(connection, self._pipeline.postgres, self._known.slot)
        except SlotError as error:
            # the stream's own session goes on with the server of before, which may get no changes any more
            self._error = error
            return
        if self._pipeline.ddl_topic:
            untold = [] if ddl.installed(connection) else [Problem("ddl-untold", self._cluster.database, *ddl.MISSING)]
            self._problems.tell("ddl", untold)
        why, where = check_standbys(connection, self._pipeline.slot), describe(self._pipeline.postgres)
        held_up = [Problem("synchronous-standby", where, why.what, why.remedy)] if why is not None else []
        self._problems.tell("standbys", held_up)
        with self._lock:
            # the look adds what it finds
            known = self._known.copy()
            generation, began = self._generation, time.monotonic()
        unfiltered = writer.filter_again(connection, self._pipeline, known)
        seen = look(connection, self._pipeline, known, unfiltered)
        # told at once: what comes next may fail
        self._problems.tell("publication", writer.set_aside(connection, self._pipeline, seen))
        try:
            for oid, pinned in known.tables.items():
                table = seen.tables.get(oid)
                # of one that has got another name, the options of that name are what is wrong: the others go on
                if table is not None and table.qualified == pinned.table.qualified and oid not in known.accepted:
                    pinned.check_forms(table)
        except Refused as error:
            self._error = error
            return
        steps, prepared = self._prepare(connection, known, seen)
        if generation == self._generation:
            # what is wrong in a state of before may be mended since: the next look tells
            self._tell(known, seen, steps)
        self._succeed()
        with self._lock:
            if generation == self._generation and not self._ended.is_set():
                self._give_up()
                self._prepared = prepared
                self._looked = began, frozenset(step.oid for step in steps if step.do is not Do.NOTHING)
            elif prepared is not None:
                prepared.close()

    def _give_up(self) -> None:
        """Let go of what is prepared."""
        if self._prepared is not None:
            self._prepared.close()
        self._prepared = None

    def _prepare(
        self, connection: Connection, known: PipelineState, seen: CatalogLook
    ) -> tuple[list[Step], PreparedSteps | None]:
        """The plan, and what of it is due. What turns out to be unfit may change what is meant for others, which are
        planned anew."""
        unfit, checked = dict(self._refused), set[Step]()
        came_up: set[tuple[int, Do, str]] = set()
        now = time.monotonic()  # what has lasted then is checked, and nothing else is due
        retry = self._retries(known)
        while True:
            steps = plan(self._pipeline, known, seen, unfit)
            # also what turns out to be impossible has come up: it is tried again as soon as it may be possible
            came_up |= {_key(step) for step in steps}
            # what has come up a moment ago may be something else in the next one
            left = [
                each
                for each in steps
                if each.do in PINNING and each not in checked and self._waits(each, seen, now) <= 0
            ]
            more = checks.unfit(connection, self._pipeline, self._cluster, known, left, seen.tables)
            checked.update(left)
            if more:
                unfit |= more
                continue
            due, lsn = self._due(steps, known, seen, now)
            self._since = {key: since for key, since in self._since.items() if key in came_up}
            left_to_do = {oid for oid, _, _ in came_up}
            self._writers = {oid: each for oid, each in self._writers.items() if oid in left_to_do}
            found = due or retry or seen.types or seen.followed or seen.gaps or seen.names
            if not (found or self._lacks_publication(seen)):
                return steps, None
            prepared = writer.prepare(connection, self._pipeline, self._cluster, known, seen, due, self._writers)
            if not prepared.unfit:
                return steps, replace(prepared, lsn=max(lsn, prepared.lsn), retry=retry)
            prepared.close()
            unfit |= prepared.unfit
            self._refused |= {oid: each for oid, each in prepared.unfit.items() if each.lasts}

    def _due(
        self, steps: Sequence[Step], known: PipelineState, seen: CatalogLook, now: float
    ) -> tuple[list[Step], int]:
        """The steps whose reasons have lasted, those of new tables first, which wait for nothing; and where the stream
        has to be first."""
        possible = {_key(step): step for step in steps if step.do is not Do.NOTHING}
        for key in possible:
            self._since.setdefault(key, now)
        # as long as it is not, its topic gets the changes of the table that has it
        self._behind = {key: self._behind.get(key, seen.lsn) for key in possible}
        waits = {key: self._waits(step, seen, now) for key, step in possible.items()}
        if young := [left for left in waits.values() if left > 0]:
            self._look_at(now + min(young))
        self._tell_waiting(
            {key: step for key, step in possible.items() if waits[key] > 0 and self._since[key] + LASTS <= now}
        )
        lasted = {key: step for key, step in possible.items() if waits[key] <= 0}
        if new := [step for step in lasted.values() if not step.known]:
            return new, 0
        # a topic passes on only together with what becomes of the table that has it
        owners = {pinned.topic: oid for oid, pinned in known.tables.items()}
        while True:
            leaving = {step.oid for step in lasted.values() if step.do in (Do.MOVE, Do.STOP)}
            held = [
                key
                for key, step in lasted.items()
                if step.do in PINNING and owners.get(step.topic, step.oid) not in {step.oid, *leaving}
            ]
            if not held:
                return list(lasted.values()), max((self._behind[key] for key in lasted), default=0)
            for key in held:
                del lasted[key]

    def _waits(self, step: Step, seen: CatalogLook, now: float) -> float:
        """The seconds for which the reason of a step still has to last; 0 or less if it has lasted."""
        if not self._patient:
            return 0.0
        table = seen.tables.get(step.oid)
        lasts = LASTS
        if step.do is Do.FOLLOW and self._pipeline.allow_unkeyed and table is not None:
            lasts = LASTS if table.keyed or table.outbox else KEYLESS
        return self._since.get(_key(step), now) + lasts - now

    def _tell_waiting(self, waiting: Mapping[tuple[int, Do, str], Step]) -> None:
        """Log once of each new table without a key that is not gone in a moment that it is taken in later."""
        if new := sorted(step.table for key, step in waiting.items() if key not in self._waiting):
            log.warning(
                "%s: new, without a key, and not followed yet. In case it is given a key when all of its rows are there, "
                "as by pg_restore, it is taken in without one only when it has had none for %g minutes.",
                ", ".join(new), KEYLESS / 60,
            )  # fmt: skip
        self._waiting = frozenset(waiting)

    def _lacks_publication(self, seen: CatalogLook) -> bool:
        """Whether a publication is to be made again, also one without tables: PostgreSQL sends nothing while one that it
        is asked for does not exist."""
        names, now = publication.names(self._pipeline.publication_name), time.monotonic()
        if not self._pipeline.create_publication or seen.coverage.publications.keys() >= set(names):
            self._unpublished = 0.0
            return False
        self._unpublished = self._unpublished or now
        due = self._unpublished + (LASTS if self._patient else 0.0)
        if now < due:
            self._look_at(due)
        return now >= due

    def _retries(self, known: PipelineState) -> bool:
        """Whether live snapshots that have failed are to be tried again now."""
        now = time.monotonic()
        if not any(progress.ended and progress.unfinished for progress in known.lives.values()):
            self._retry_at = 0.0
            return False
        if not self._retry_at:
            self._retry_at = now + AGAIN
        if now < self._retry_at:
            return False
        self._retry_at = 0.0
        return True

    def _tell(self, known: PipelineState, seen: CatalogLook, steps: Sequence[Step]) -> None:
        found = unfollowed(self._pipeline, known, seen)
        wrong = [step.problem for step in steps if step.do is Do.NOTHING or (step.do is Do.STOP and step.remedy)]
        wrong += self._failed(known)
        for oid, told in seen.elsewhere.items():
            what, _, remedy = told.partition(". ")
            wrong.append(Problem(ROWS_ELSEWHERE, seen.tables[oid].qualified, f"{what}.", remedy))
        attached = {part.qualified for parts in seen.attached.values() for part in parts}
        for table, changed in seen.unsent.items():
            if new := sorted(changed.keys() - attached - self.unsent.get(table, {}).keys()):
                log.warning("%s", _tell_unsent(table, [f"{name} {changed[name]}" for name in new]))
        if self._pipeline.new_tables == "ignore" and (made := sorted(set(found) - set(self._new))):
            log.warning(
                "%s: made since the slot was, and not followed. Run create_slot and the snapshot again (or start the "
                "command again), which take them in with all their rows.",
                ", ".join(made),
            )
        self._new = self.unfollowed = found
        self.unsent = seen.unsent
        self._problems.tell("tables", wrong)

    def _failed(self, known: PipelineState) -> list[Problem]:
        """The live snapshots that have failed, and without which topics lack rows, as problems."""
        found = []
        for progress in known.lives.values():
            if progress.ended and progress.unfinished:
                for oid in progress.tables[progress.done :]:
                    name = known.tables[oid].table.qualified if oid in known.tables else str(oid)
                    why = f"Its rows could not be read: {progress.error or progress.ended}."
                    found.append(Problem(NOT_COMPLETE, name, why.replace("..", "."), "It is tried again."))
        return found
