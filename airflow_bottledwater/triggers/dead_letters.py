"""The trigger that waits until no dead letters are open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError, SettingError, StateError
from airflow_bottledwater.pipeline.patterns import describes_one
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.pipeline import PipelineTrigger
from airflow_bottledwater.triggers.watching import SETTLED, AsyncWatch

if TYPE_CHECKING:
    from airflow_bottledwater.state.store import Kept

log = logging.getLogger(__name__)


class LettersWatch:
    """Counts a pipeline's open dead letters in its saved state, which knows also those that were settled while nothing
    ran.

    :param max_open: how many may be open.
    :param tables: ``[schema.]table`` patterns; empty for all.
    """

    def __init__(self, pipeline: Settings, *, max_open: int, tables: Sequence[str]) -> None:
        self._pipeline, self._max_open, self._tables = pipeline, max_open, tuple(tables)
        self._said: dict[str, int] | None = None
        self._kept: Kept | None = None

    def fetch(self) -> dict[str, Any] | None:
        """How many are open, if few enough; None otherwise.

        :raises StateError: there is no such pipeline.
        :raises SettingError: it has no table of a name that was given.
        :raises Outage: the source or Kafka does not answer.
        """
        found = sum(self.counts().values())
        return {"status": "ok", "open": found} if found <= self._max_open else None

    def counts(self) -> dict[str, int]:
        """How many are open, by table.

        :raises StateError: there is no such pipeline.
        :raises SettingError: it has no table of a name that was given.
        :raises Outage: the source or Kafka does not answer.
        """
        # imported here, since a DAG processor needs neither libpq nor a client of Kafka
        from airflow_bottledwater.jobs import status
        from airflow_bottledwater.state.store import Kept

        self._kept = self._kept or Kept()
        report = status.report(self._pipeline, self._kept)
        if not report.tables and report.slot is None:
            raise StateError(f"There is no pipeline {self._pipeline.slot!r}.", "Check the name and the connections.")
        # those of tables that are gone may be open, too
        known = {each.table for each in report.tables}.union(report.open_letters)
        meant = {pattern: {each for each in known if describes_one(pattern, each)} for pattern in self._tables}
        for pattern, tables in meant.items():
            if not tables:
                raise SettingError("tables", pattern, "[schema.]table, or a pattern, of tables that the pipeline has")
        asked = set().union(*meant.values()) if meant else known
        counts = {table: sum(of.values()) for table, of in report.open_letters.items() if table in asked}
        if counts != self._said:
            self._said = counts
            of = ", ".join(f"{count:,} of {table}" for table, count in counts.items()) or "none"
            log.info("Open dead letters: %s.", of)
        return counts

    def close(self) -> None:
        """Nothing is kept open."""


class DeadLettersTrigger(PipelineTrigger):
    """Fires when few enough dead letters are open.

    :param hook: see :class:`~airflow_bottledwater.triggers.pipeline.PipelineTrigger`.
    :param max_open: how many may be open.
    :param tables: ``[schema.]table`` patterns; empty for all.
    :param poll_interval: seconds between two checks.
    """

    def __init__(
        self, *, hook: dict[str, Any], max_open: int = 0, tables: Sequence[str] = (), poll_interval: float = 60.0
    ) -> None:
        super().__init__(hook=hook)
        self.max_open, self.tables, self.poll_interval = max_open, list(tables), poll_interval

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event."""
        async with AsyncWatch(self._begin, "The dead letters") as watching:
            while True:
                await asyncio.sleep(max(SETTLED, self.poll_interval))
                try:
                    event = await watching.fetch()
                except BottledWaterError as error:
                    event = {"status": "failed", "message": str(error)}
                event = event or watching.lack.event(self, "The number of open dead letters")
                if event is not None:
                    yield TriggerEvent(event)
                    return

    async def _begin(self) -> LettersWatch:
        return LettersWatch(await self.pipeline(), max_open=self.max_open, tables=self.tables)
