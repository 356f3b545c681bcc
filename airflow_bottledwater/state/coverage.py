"""Whether the publications still send all that the pipeline publishes: checked when a stream starts, and while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

import psycopg

from airflow_bottledwater.errors import BottledWaterError, Refused, StateError, TablesChanged
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.postgres import catalog, coverage, partitions, publication
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.identity import resolve
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Partitions, live_key, partitions_key

log = logging.getLogger(__name__)

#: seconds between two checks while the stream runs; each is a few short queries
_INTERVAL = 10.0


def today(connection: Connection, pipeline: Pipeline, known: PipelineState) -> coverage.Coverage:
    """How the publications cover the pipeline's tables now."""
    return coverage.read(connection, publication.names(pipeline.publication_name), list(known.tables))


def check(connection: Connection, pipeline: Pipeline, known: PipelineState) -> None:
    """Check that no changes can be missing from the stream since the publications' coverage was recorded.

    :raises StateError: changes may be missing; the message says why, and what can be done.
    """
    # a table that was dropped, or that the settings no longer name, need not be published
    wanted = _wanted(connection, pipeline, known)
    wanted |= _renamed(connection, pipeline, known, wanted)
    if wrong := _mismatches(
        connection, [oid for oid, p in known.tables.items() if oid in wanted and p.table.partitioned]
    ):
        raise StateError(
            f"What slot {pipeline.slot!r} sends of a partition cannot be read: {' '.join(wrong[:10])}",
            "Then start again. If rows of the partition were changed meanwhile, take a live snapshot of the table with a sweep, since the "
            "keys of deleted rows may have been unknown (bottledwater snapshot --tables … --sweep), or start again with a new slot and a snapshot.",
        )
    recorded = known.coverage
    if recorded is None:
        return  # there is no slot yet: both are written together
    names = {oid: pinned.table.qualified for oid, pinned in known.tables.items() if oid in wanted}
    if gaps := recorded.gaps(today(connection, pipeline, known), names):
        raise StateError(
            f"What was committed meanwhile is not in the stream of slot {pipeline.slot!r}: {' '.join(gaps[:10])}",
            "PostgreSQL does not send it afterwards. Drop the slot (bottledwater drop-slot --when always) and start again: "
            "the new snapshot brings the topics to what the tables hold.",
        )


def unfollowed(connection: Connection, pipeline: Pipeline, known: PipelineState) -> dict[int, str]:
    """The tables and partitions that the settings include but the pipeline does not follow, with their names, in the order of these:
    they were created after its slot."""
    new = [oid for oid in _wanted(connection, pipeline, known) if oid not in known.tables]
    named = {oid: f"{schema}.{name}" for oid, (schema, name) in catalog.names(connection, new).items()} if new else {}
    return dict(sorted(named.items(), key=lambda item: item[1]))


def below(connection: Connection, known: PipelineState) -> dict[int, str]:
    """The pipeline's tables that are partitions of another one of its tables today, which is published as one: by oid, with the name of that
    one, as which their changes are sent."""
    roots = {oid: pinned.table for oid, pinned in known.tables.items() if pinned.table.partitioned}
    found = partitions.below(connection, roots) if roots else {}
    return {
        part.oid: roots[root].qualified for root, parts in found.items() for part in parts if part.oid in known.tables
    }


def moved(today: Mapping[int, str], known: PipelineState) -> list[int]:
    """The pipeline's tables that were attached below another one of its tables, or detached from it, since the state knows of it.

    :param today: see :func:`below`.
    """
    return [oid for oid in today.keys() ^ known.below.keys() if oid in known.tables]


def unsent(connection: Connection, known: PipelineState) -> dict[str, str]:
    """The partitions that have lost or brought rows without PostgreSQL sending anything, and what happened to each."""
    found: dict[str, str] = {}
    for table, partitioned, today in _partitioned(connection, known):
        found |= dict(partitions.changes(partitioned, table, today))
    return found


def attached(connection: Connection, pipeline: Pipeline, known: PipelineState) -> dict[int, list[partitions.Partition]]:
    """By the table's oid, what was attached below it with the rows that it had, and is to be read: if ``new_tables`` is add, and the table
    has a key, without which it cannot be read again. What is not in the WAL cannot be followed."""
    if pipeline.new_tables != "add":
        return {}
    found = {}
    for table, partitioned, today in _partitioned(connection, known):
        new = [each for each in partitions.attached(partitioned, table, today) if not partitions.unfit(table, [each])]
        if new and table.keyed:
            found[table.oid] = new
    return found


def unread(
    attached: Mapping[int, list[partitions.Partition]], known: PipelineState
) -> dict[int, list[partitions.Partition]]:
    """Those of the attached partitions for which no live snapshot is recorded yet."""
    read = {part for progress in known.lives.values() for part in progress.parts}
    left = {oid: [part for part in parts if part.oid not in read] for oid, parts in attached.items()}
    return {oid: parts for oid, parts in left.items() if parts}


def followed(connection: Connection, known: PipelineState) -> dict[str, Partitions]:
    """The records of tables below which something has changed that the stream was told of."""
    found = {}
    for table, partitioned, today in _partitioned(connection, known):
        if (more := partitions.followed(partitioned, table, today)) != partitioned:
            found[partitions_key(table.oid)] = Partitions(more)
    return found


def _partitioned(
    connection: Connection, known: PipelineState
) -> Iterator[tuple[Table, partitions.Known, list[partitions.Partition]]]:
    """The tables that are published as one and still exist: with the partitions that are known, and those of today."""
    recorded = known.partitions
    below = partitions.below(connection, recorded)
    for oid in catalog.names(connection, list(recorded)):
        yield known.tables[oid].table, recorded[oid], below.get(oid, [])


def _mismatches(connection: Connection, oids: Sequence[int]) -> list[str]:
    if not oids:
        return []
    below = partitions.below(connection, oids)
    tables = catalog.load(connection, oids)
    return [each for table in tables for each in partitions.mismatches(table, below.get(table.oid, []))]


def _wanted(connection: Connection, pipeline: Pipeline, known: PipelineState) -> set[int]:
    # a pattern that matches nothing any more: preflight reports it
    return set(resolve(connection, pipeline, known, pipeline.tables, pipeline.schemas, strict=False))


def _renamed(connection: Connection, pipeline: Pipeline, known: PipelineState, wanted: set[int]) -> set[int]:
    """The tables that the settings name as they were called before; they are still the pipeline's, unless others have these names."""
    taken = {named for oid, named in catalog.names(connection, list(wanted)).items() if oid not in known.tables}
    there = catalog.names(connection, [oid for oid in known.tables if oid not in wanted])
    before = {oid: (known.tables[oid].table.schema, known.tables[oid].table.name) for oid in there}
    return {
        oid
        for oid, named in before.items()
        if named not in taken and catalog.covers(pipeline.tables, pipeline.schemas, *named)
    }


def _names(found: Mapping[int, list[partitions.Partition]]) -> list[str]:
    return [part.qualified for parts in found.values() for part in parts]


class CoverageWatch:
    """Checks the coverage regularly while a stream runs, in a thread of its own: a server that does not answer must not hold up the
    stream. The thread starts at once.

    :param not_taken: the oids of tables that could not be taken in when the stream started.
    :param interval: seconds between two checks.
    :ivar unfollowed: the last results of :func:`unfollowed` and :func:`unsent`; each name is also logged, once.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        known: PipelineState,
        not_taken: frozenset[int] = frozenset(),
        *,
        interval: float = _INTERVAL,
    ) -> None:
        self._pipeline, self._interval = pipeline, interval
        self._not_taken = not_taken
        self._new: dict[int, str] = {}
        self._attached: list[str] = []
        self._moved: list[str] = []
        self._heirs = known.heirs
        # a copy, to which is added what the stream was told of
        self._known = PipelineState(dict(known.raw))
        self._recorded = known.partitions
        self._ended = threading.Event()
        self._found: StateError | None = None
        self.unfollowed: list[str] = []
        self._thread = threading.Thread(target=self._run, name="publication watch", daemon=True)
        self._thread.start()

    def check(self, reached: Position) -> None:
        """Raise what the thread has found.

        :param reached: P; inside a large transaction no table can be taken in.
        :raises StateError: changes may be missing from the stream.
        :raises TablesChanged: there are new tables, or all is published of dropped ones whose topics others get; and ``new_tables`` is
            add. Or a table of the pipeline has come below another one, or is one of its own again.
        :raises Refused: there are new tables, and ``new_tables`` is stop.
        """
        if self._found is not None:
            raise self._found
        whole, left = not reached.ordinal, self._not_taken | self._heirs.keys()
        new = [name for oid, name in self._new.items() if oid not in left]
        due = [heir.name for oid, heir in self._heirs.items() if oid not in self._not_taken and reached.lsn >= heir.lsn]
        if (taken := new + due + self._attached) and whole and self._pipeline.new_tables == "add":
            raise TablesChanged(
                f"{', '.join(taken)}: created or attached since the slot was. The stream begins anew, and takes them in."
            )
        if self._moved and whole:
            raise TablesChanged(
                f"{', '.join(self._moved)}: attached to another table of the pipeline, or detached from it. The stream begins anew."
            )
        if new and self._pipeline.new_tables == "stop":
            raise Refused(
                f"{', '.join(new)}: created since the slot was, and new_tables is stop.",
                "Everything until now is published. Run create_slot and the snapshot again (or start the command again), which take them "
                "in with all their rows; or set new_tables to add or ignore.",
            )

    def close(self) -> None:
        """Ask the thread to end, without waiting for it: if it waits for a server that does not answer, it ends after that."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                with session(self._pipeline.postgres, application="bottledwater publication watch") as connection:
                    connection.execute("SET statement_timeout = '5s'")
                    check(connection, self._pipeline, self._known)
                    new, changed = unfollowed(connection, self._pipeline, self._known), self._unsent(connection)
                    # what was attached is among what has changed
                    to_read = attached(connection, self._pipeline, self._known) if changed else {}
                    self._log_changes(new, changed, _names(to_read))
                    self._attached = _names(unread(to_read, self._known))
                    tables = self._known.tables
                    self._moved = [
                        tables[oid].table.qualified for oid in moved(below(connection, self._known), self._known)
                    ]
            except StateError as error:
                self._found = error
                return
            except (BottledWaterError, psycopg.Error) as error:
                # an outage of the server is reported by the stream's own connection
                log.debug("The publications could not be looked at: %s", error)

    def _unsent(self, connection: Connection) -> dict[str, str]:
        self._known.apply(followed(connection, self._known))
        found = unsent(connection, self._known)
        if found:
            # a live snapshot may have brought the topic to the table again
            assert self._known.slot is not None
            topic = store.state_topic_name(self._known.slot.database, self._pipeline.slot)
            state = read_state(self._pipeline, topic)
            today = state.partitions
            changed = {oid: known for oid, known in today.items() if known != self._recorded.get(oid)}
            self._recorded = today
            self._known.apply({partitions_key(oid): Partitions(known) for oid, known in changed.items()})
            self._known.apply({live_key(each): state.live(each) for each in {*self._known.lives, *state.lives}})
            found = unsent(connection, self._known) if changed else found
        return found

    def _log_changes(self, unfollowed: dict[int, str], changed: Mapping[str, str], to_read: Sequence[str]) -> None:
        for name in sorted(changed.keys() - {*self.unfollowed, *to_read}):
            log.warning(
                "%s %s. PostgreSQL sends no change for its rows, so the topic may differ from the table. Bring the topic to the table again "
                "with a live snapshot with sweep of the whole table.",
                name,
                changed[name],
            )
        found = [*unfollowed.values(), *sorted(changed)]
        self._new = unfollowed
        if self._pipeline.new_tables == "ignore" and (new := sorted(set(unfollowed.values()) - set(self.unfollowed))):
            log.warning(
                "%s: made since the slot was, and not followed. Run create_slot and the snapshot again (or start the command "
                "again), which take them in with all their rows.",
                ", ".join(new),
            )
        self.unfollowed = found
