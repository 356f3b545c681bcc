"""A thread that watches what a job does to its source, and acts before that does harm: reading tables rests, its
snapshot is given up for a new one, and, only where a setting says so, the slot is dropped.

Which step helps depends on what presses, see docs/operations.md (The guard). The job carries the steps out: it looks
at :attr:`SourceGuard.rest` and :attr:`SourceGuard.renew`, and is stopped before its slot is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.errors import SlotError, StopRequested
from airflow_bottledwater.guard.standbys import StandbyBrake
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.source import SourceLook
from airflow_bottledwater.model.amounts import duration, roughly, size
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.pressure import DropCost, Pressure, Standbys, ask, drop_cost, standbys
from airflow_bottledwater.state.control_records import GuardStep

log = logging.getLogger(__name__)

#: the name under which the guard tells what presses, and the kind of these problems
KIND = "guard"
#: seconds between two looks while tables are read, and else
_READING, _ELSE = 2.0, 10.0
#: seconds for which the job's end waits for the thread
_ENDS_WITHIN = 5.0
#: of a limit: below this, what rests goes on; and what of drop_slot_wal_bytes is near enough to say what it costs
_RELEASED, _NEAR = 0.8, 0.5
#: seconds for which reading rests at least, so that those who waited are through
_REST = 10.0
#: seconds without an answer of PostgreSQL after which what it has answered last says nothing any more
_FORGOTTEN = 60.0
#: steps that the status keeps
_STEPS = 20


class SourceGuard:
    """Watches until it is closed.

    :param meter: counts the steps.
    :param source: asks PostgreSQL.
    :param snapshot: whether the job takes the first snapshot; otherwise it streams.
    :ivar rest: why reading tables beside the stream is to rest, as a sentence; empty if it is not.
    :ivar renew: why the snapshot that tables are read under is to be given up for a new one; empty if it is not.
    :ivar renewable: whether a new snapshot would go on with what is left; the snapshot's driver knows it, and
        ``check`` as well, which raises SlotError if the slot cannot be used any more.
    :ivar lost: that error: what is read then is read in vain.
    """

    def __init__(
        self, pipeline: Settings, controller: Controller, meter: Meter, source: SourceLook, *, snapshot: bool = False
    ) -> None:
        self._pipeline, self._controller, self._meter, self._source = pipeline, controller, meter, source
        self._snapshot = snapshot
        self._tables: Collection[int] = ()
        self._sessions: Callable[[], Collection[int]] = tuple
        self.rest = self.renew = ""
        self.renewable = True
        self.check: Callable[[Connection], None] = lambda _: None
        self.lost: SlotError | None = None
        self._standbys = StandbyBrake(pipeline.guard_replica_lag)
        self._ended = threading.Event()
        #: which limits reading rests for, and since when
        self._resting: dict[str, float] = {}
        self._waiting_since, self._answered = 0.0, time.monotonic()
        self._cost: DropCost | None = None
        self._due = ""
        self._told = False
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def watch(self, tables: Collection[int], sessions: Callable[[], Collection[int]]) -> None:
        """Begin to watch, or watch other sessions from now on.

        :param tables: the oids of the pipeline's tables.
        :param sessions: tells the process ids of the sessions that read tables now.
        """
        self._tables, self._sessions, self.renew = tables, sessions, ""
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_ENDS_WITHIN)

    def stepped(self, limit: str, step: str, reason: str) -> None:
        """Record a step: in the log, the metrics and the status.

        :param limit: what it is about: wal, xmin, replica or locks.
        :param step: rested, renewed, stopped or dropped.
        """
        log.warning("The guard (%s, %s): %s", limit, step, reason)
        self._meter.add(registry.GUARD_STEPS, 1, limit, step)
        status = self._controller.status
        status.guard = [*status.guard, GuardStep(time.time(), limit, step, reason)][-_STEPS:]

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        while not self._ended.is_set():
            reading = True
            try:
                reading = self._snapshot or bool(self._sessions())
                if (found := self._source.ask(self._look)) is not None:
                    self._answered = time.monotonic()
                    self.weigh(*found)
                elif time.monotonic() - self._answered > _FORGOTTEN:
                    self._forget()
                self._told = False
            except Exception as error:
                # without the thread nothing would spare the source any more, and what rests would rest for ever
                if not self._told:
                    log.error("The guard does not work for now, the job goes on.", exc_info=error)
                self._told = True
            self._ended.wait(_READING if reading else _ELSE)

    def _look(self, connection: Connection) -> tuple[Pressure, Standbys, DropCost | None]:
        try:
            self.check(connection)
        except SlotError as error:
            self.lost = error
        pressure = ask(connection, self._pipeline.slot, self._sessions())
        behind = standbys(connection) if self._pipeline.guard_replica_lag else {}
        limit = self._pipeline.drop_slot_wal_bytes
        if limit and (pressure.kept or 0) >= _NEAR * limit and self._cost is None:
            self._cost = drop_cost(connection, self._pipeline.slot, self._tables)
        if self._cost is not None:
            # the tables are measured once, and the WAL grows
            self._cost = replace(self._cost, unread=pressure.unread or 0, kept=pressure.kept or 0)
        return pressure, behind, self._cost

    # ------------------------------------------------------------------ what is done
    def weigh(self, found: Pressure, behind: Standbys, cost: DropCost | None) -> None:
        """Decide what is to be done.

        :param found: what PostgreSQL has answered.
        :param behind: the physical standbys.
        :param cost: what dropping the slot costs, if that is near.
        """
        problems = [
            *self._wal(found),
            *self._drop(found.kept or 0, cost),
            *self._xmin(found),
            *self._locks(found),
            *self._replica(behind),
        ]
        rests = {each.subject: each.reason for each in problems if each.subject in self._resting}
        self.rest = " ".join(rests.values())
        self._controller.problems.tell(KIND, [replace(each, subject=_SUBJECTS[each.subject]) for each in problems])

    def _forget(self) -> None:
        """What rests goes on, as if nothing had ever been measured: a session may be lacking for hours, where no
        connection is free, say."""
        self._resting.clear()
        self.rest, self._waiting_since, self._controller.status.pressure = "", 0.0, {}
        self._controller.problems.tell(KIND, ())

    def _measured(self, limit: str, value: float, of: float) -> None:
        status = self._controller.status
        # another thread may be writing it now
        status.pressure = {**status.pressure, limit: round(value / of, 3)}

    def _rests(self, limit: str, pressing: bool, reason: str, *, released: bool = True) -> bool:
        """Whether reading tables rests for a limit.

        :param pressing: whether the limit is passed; ``released`` is whether it may go on otherwise.
        """
        since = self._resting.get(limit)
        if since is None and pressing:
            self._resting[limit] = time.monotonic()
            self.stepped(limit, "rested", reason)
        elif since is not None and not pressing and released and time.monotonic() - since > _REST:
            del self._resting[limit]
            log.info("Reading tables goes on (%s).", limit)
        return limit in self._resting

    def _wal(self, found: Pressure) -> Iterator[Problem]:
        """WAL that is kept is freed by streaming only, so live snapshots give the stream all of its time. It is kept
        for the first snapshot whatever that does."""
        pipeline, kept, unread = self._pipeline, found.kept, found.unread
        if kept is None or unread is None:
            return
        limits = [pipeline.guard_wal_bytes] if pipeline.guard_wal_bytes else []
        if found.limit and pipeline.guard_wal_share:
            limits.append(int(pipeline.guard_wal_share * found.limit))
        if not limits:
            return
        limit = min(limits)
        self._measured("wal", kept, limit)
        more = f"PostgreSQL keeps {roughly(kept)} of WAL for slot {pipeline.slot!r}, more than {size(limit)}"
        lost = f" The slot may be lost at {size(found.limit)} (max_slot_wal_keep_size)." if found.limit else ""
        ours = unread * 2 >= kept
        reason = f"{more}: live snapshots rest, so that the stream has all of its time.{lost}"
        rests = not self._snapshot and self._rests(
            "wal", kept > limit and ours, reason, released=kept < _RELEASED * limit or not ours
        )
        if rests:
            yield Problem("guard-rests", "wal", reason, "It ends when the stream has caught up.")
        elif kept > limit and self._snapshot:
            reason = f"{more}: it is kept until the snapshot is complete and the stream has caught up.{lost}"
            yield Problem("guard", "wal", reason, "Give the server more disk: this snapshot keeps its lanes.")
        elif kept > limit and not ours:
            reason = (
                f"{more}, of which the stream has read all but {roughly(unread)}: an open transaction holds it.{lost}"
            )
            yield Problem("guard", "wal", reason, "End the oldest transaction (pg_stat_activity, pg_prepared_xacts).")

    def _drop(self, kept: int, cost: DropCost | None) -> Iterator[Problem]:
        """Say what dropping the slot costs when that is near, and stop the job when it is due."""
        limit = self._pipeline.drop_slot_wal_bytes
        if not limit or kept < _NEAR * limit:
            return
        reason = f"At {size(limit)} of WAL (drop_slot_wal_bytes) the slot is dropped; {roughly(kept)} are kept now."
        yield Problem("guard-drops", "drop", reason, f"That costs: {cost}")
        if kept >= limit and not self._due:
            self._due = f"PostgreSQL keeps {size(kept)} of WAL, and drop_slot_wal_bytes is {size(limit)}."
            log.error("The guard ends the job to drop slot %r. %s", self._pipeline.slot, self._due)
            self._controller.stopped.set()

    def _xmin(self, found: Pressure) -> Iterator[Problem]:
        limit = self._pipeline.guard_xmin_age
        if not limit:
            return
        self._measured("xmin", found.xmin_age, limit)
        pressing = found.xmin_age > limit
        reason = (
            f"Reading tables holds an xmin that is more than {limit:,} transactions old (guard_xmin_age): VACUUM "
            "removes nothing that was deleted since"
        )
        if self._snapshot:
            self.renew = f"{reason}. Its snapshot is given up for a new one." if pressing and self.renewable else ""
            if pressing and not self.renewable:
                remedy = "Wait for the snapshot; it would have to begin anew if it were ended."
                yield Problem("guard", "xmin", f"{reason}. A table without a key is being read, so it goes on.", remedy)
        elif self._rests("xmin", pressing, f"{reason}: it rests for a moment."):
            yield Problem("guard-rests", "xmin", f"{reason}: it rests for a moment.", "It goes on by itself.")

    def _locks(self, found: Pressure) -> Iterator[Problem]:
        """Those that wait behind the first snapshot are watched by its driver, see
        :class:`~airflow_bottledwater.postgres.watch.HolderWatch`."""
        limit, now = self._pipeline.lock_queue_limit, time.monotonic()
        self._waiting_since = (self._waiting_since or now) if found.waiting else 0.0
        waited = now - self._waiting_since if found.waiting else 0.0
        self._measured("locks", waited, limit)
        reason = (
            f"{found.waiting:,} sessions wait behind the locks of a live snapshot for {duration(limit)} "
            "(lock_queue_limit): it gives its locks up, and rests for a moment."
        )
        if not self._snapshot and self._rests("locks", waited > limit, reason):
            yield Problem("guard-rests", "locks", "Live snapshots rest, so that sessions that waited get their locks.")

    def _replica(self, behind: Standbys) -> Iterator[Problem]:
        """The lanes of a snapshot look by themselves, since they may be on other hosts."""
        if not self._pipeline.guard_replica_lag:
            return
        self._measured("replica", StandbyBrake.largest(behind), self._pipeline.guard_replica_lag)
        reading = self._snapshot or self._sessions() or "replica" in self._resting
        why = self._standbys.look(behind) if reading else ""
        reason = f"Reading tables rests: {why}."
        if self._rests("replica", bool(why), reason):
            yield Problem("guard-rests", "replica", reason, "It goes on when the standby has caught up.")

    # ------------------------------------------------------------------ the slot
    def drop_if_due(self) -> None:
        """Drop the slot, if that is due: when nothing of the job uses it any more.

        :raises SlotError: it was due; the message says what is lost.
        """
        if not self._due:
            return
        name = self._pipeline.slot
        cost = ""
        with stoppable(None), session(self._pipeline.postgres, f"Dropping slot {name!r}") as connection:
            cost = f" {drop_cost(connection, name, self._tables)}"
            slot.drop(connection, name)
        self.stepped("wal", "dropped", f"Slot {name!r} was dropped. {self._due}{cost}")
        raise SlotError(
            f"The guard has dropped slot {name!r}: {self._due}{cost}",
            "Run 'bottledwater drop-slot --when always', which also removes the saved state, and start again with a "
            "new snapshot; or raise drop_slot_wal_bytes first.",
        )


#: what the problems are about
_SUBJECTS = {
    "wal": "WAL that is kept",
    "drop": "Slot that is to be dropped",
    "xmin": "Oldest xmin",
    "locks": "Sessions that wait",
    "replica": "Standby",
}


@contextmanager
def guarded(
    pipeline: Settings, controller: Controller, meter: Meter, source: SourceLook, *, snapshot: bool = False
) -> Iterator[SourceGuard]:
    """Have a job's work guarded; see :class:`SourceGuard`.

    :raises SlotError: the slot was dropped, as a setting says.
    """
    with closing(SourceGuard(pipeline, controller, meter, source, snapshot=snapshot)) as guard:
        try:
            yield guard
        except StopRequested:
            guard.drop_if_due()
            raise
        guard.drop_if_due()
