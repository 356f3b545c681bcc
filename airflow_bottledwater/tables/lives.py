"""How the live snapshots of tables change with what becomes of the tables."""

from __future__ import annotations

import uuid
from dataclasses import replace

from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LiveProgress, StateRecord, live_key


class ChangedLives:
    """The records of live snapshots that change.

    :param taken: by topic, the oid of the table that has it from now on, and goes on.
    """

    def __init__(self, known: PipelineState, taken: dict[str, int]) -> None:
        self._known, self._taken = known, taken
        self._lives = dict(known.lives)
        #: the ids of those that have a table now, or had it, by its oid
        self._of: dict[int, list[str]] = {}
        for each, progress in self._lives.items():
            self._note(each, progress)
        self.changed: dict[str, StateRecord | None] = {}

    def _note(self, request_id: str, progress: LiveProgress) -> None:
        for oid in progress.tables:
            self._of.setdefault(oid, []).append(request_id)

    def _set(self, request_id: str, progress: LiveProgress) -> None:
        before = self._lives.get(request_id)
        self._lives[request_id] = self.changed[live_key(request_id)] = progress
        if before is None or before.tables != progress.tables:
            self._note(request_id, progress)

    def _with(self, oid: int) -> dict[str, LiveProgress]:
        """Those that have a table, by their ids."""
        found = {each: self._lives[each] for each in self._of.get(oid, ())}
        return {each: progress for each, progress in found.items() if oid in progress.tables}

    def read(self, oid: int, *, sweep: bool) -> None:
        """Let a table be read, by a live snapshot of its own, which none waits for: the one that was to read it
        already, from its start, if there is one."""
        again = [
            each
            for each, progress in self._with(oid).items()
            if progress.tables == (oid,) and not progress.parts and progress.required and progress.sweep == sweep
        ]
        self._restart(oid)
        if again:
            self._set(again[0], LiveProgress((oid,), sweep=sweep, required=True))
        else:
            self._set(uuid.uuid4().hex[:12], LiveProgress((oid,), sweep=sweep, required=True))

    def retry(self) -> None:
        """Let those be tried again that have failed."""
        for each, progress in snapshots.failed_required(self._known).items():
            self._set(each, progress)

    def stop(self, oid: int) -> None:
        """Let the live snapshots of a table go on with the one that has its topic now; one that read nothing else has
        ended."""
        successor = self._taken.get(self._known.tables[oid].topic)
        for each, progress in self._with(oid).items():
            if successor is not None:
                self._restart(oid, each)
                tables = tuple(successor if table == oid else table for table in progress.tables)
                self._set(each, replace(self._lives[each], tables=tables, parts=()))
            else:
                at = progress.tables.index(oid)
                tables = tuple(table for table in progress.tables if table != oid)
                self._restart(oid, each)
                progress = self._lives[each]
                less = replace(progress, tables=tables, done=progress.done - (at < progress.done))
                self._set(each, less)

    def _restart(self, oid: int, only: str = "") -> None:
        """What is being read of a table is read from its start: it gets another topic, or another key."""
        for each, progress in self._with(oid).items():
            reading = progress.tables[progress.done : progress.done + 1]
            if reading == (oid,) and only in ("", each) and not progress.ended:
                self._set(each, progress.at_start())
