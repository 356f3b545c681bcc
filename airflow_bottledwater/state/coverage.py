"""Whether the publications still send all that the pipeline publishes: checked when a stream starts, and while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import psycopg

from airflow_bottledwater.errors import BottledWaterError, PreflightError, Refused, StateError, TablesChanged
from airflow_bottledwater.postgres import catalog, coverage, publication
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state.pipeline_state import PipelineState

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
    recorded = known.coverage
    if recorded is None:
        return
    # a table that was dropped, or that the settings no longer name, need not be published
    wanted = _wanted(connection, pipeline)
    names = {oid: pinned.table.qualified for oid, pinned in known.tables.items() if oid in wanted}
    if gaps := recorded.gaps(today(connection, pipeline, known), names):
        raise StateError(
            f"What was committed meanwhile is not in the stream of slot {pipeline.slot!r}: {' '.join(gaps[:10])}",
            "PostgreSQL does not send it afterwards. Drop the slot (bottledwater drop-slot --when always) and start again: "
            "the new snapshot brings the topics to what the tables hold.",
        )


def unfollowed(connection: Connection, pipeline: Pipeline, known: PipelineState) -> list[str]:
    """The names of tables and partitions that the settings include but the pipeline does not follow: they were created after its
    slot."""
    new = [oid for oid in _wanted(connection, pipeline) if oid not in known.tables]
    return sorted(f"{schema}.{name}" for schema, name in catalog.names(connection, new).values()) if new else []


def _wanted(connection: Connection, pipeline: Pipeline) -> set[int]:
    try:
        return set(catalog.resolve(connection, pipeline.tables, pipeline.schemas))
    except PreflightError:
        # a pattern that matches nothing any more: preflight reports it
        return set()


class CoverageWatch:
    """Checks the coverage regularly while a stream runs, in a thread of its own: a server that does not answer must not hold up the
    stream. The thread starts at once.

    :param not_taken: the names of tables that could not be taken in when the stream started.
    :param interval: seconds between two checks.
    :ivar unfollowed: the last result of :func:`unfollowed`; each name is also logged, once.
    """

    def __init__(
        self, pipeline: Pipeline, known: PipelineState, not_taken: Sequence[str] = (), *, interval: float = _INTERVAL
    ) -> None:
        self._pipeline, self._known, self._interval = pipeline, known, interval
        self._not_taken = set(not_taken)
        self._ended = threading.Event()
        self._found: StateError | None = None
        self.unfollowed: list[str] = []
        self._thread = threading.Thread(target=self._run, name="publication watch", daemon=True)
        self._thread.start()

    def check(self, *, whole: bool = True) -> None:
        """Raise what the thread has found.

        :param whole: whether P is not inside a large transaction, where no table can be taken in.
        :raises StateError: changes may be missing from the stream.
        :raises TablesChanged: there are new tables, and ``new_tables`` is add.
        :raises Refused: there are new tables, and ``new_tables`` is stop.
        """
        if self._found is not None:
            raise self._found
        new = sorted(set(self.unfollowed) - self._not_taken)
        if new and whole and self._pipeline.new_tables == "add":
            raise TablesChanged(
                f"{', '.join(new)}: created since the slot was. The stream begins anew, and takes them in."
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
                    self._log_changes(unfollowed(connection, self._pipeline, self._known))
            except StateError as error:
                self._found = error
                return
            except (BottledWaterError, psycopg.Error) as error:
                # an outage of the server is reported by the stream's own connection
                log.debug("The publications could not be looked at: %s", error)

    def _log_changes(self, found: list[str]) -> None:
        if self._pipeline.new_tables == "ignore" and (new := sorted(set(found) - set(self.unfollowed))):
            log.warning(
                "%s: made since the slot was, and not followed. Run create_slot and the snapshot again (or start the command "
                "again), which take them in with all their rows.",
                ", ".join(new),
            )
        self.unfollowed = found
