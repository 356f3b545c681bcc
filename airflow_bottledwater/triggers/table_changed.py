"""The trigger of an asset that changes when tables do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from airflow.observability import stats

from airflow_bottledwater.model.changes import ChangeRange
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.watcher import WatcherTrigger
from airflow_bottledwater.triggers.watching import Watch


class TableChangedTrigger(WatcherTrigger):
    """Fires when a pipeline has published changes of tables: for an ``AssetWatcher``, so that DAGs run when tables have
    changed.

    The payload of each event is a range of changes (:class:`~airflow_bottledwater.model.changes.ChangeRange`): it
    begins where the one before has ended, and has whole transactions of the source. With
    :class:`~airflow_bottledwater.hooks.changes.ChangesHook` a DAG reads exactly these records. The first range begins
    where the pipeline is when the trigger first runs.

    The stream may run anywhere, also without Airflow: it is watched through Kafka.

    :param pipeline: see :class:`~airflow_bottledwater.triggers.watcher.WatcherTrigger`.
    :param tables: ``[schema.]table``, with ``*`` and ``?``; without a schema, ``public`` is meant. One that is new, for
        the pipeline or here, begins with all that is in its topic.
    :param min_rows: how many rows have to be changed until it fires. They are counted by Kafka's offsets, of which each
        Kafka transaction takes one for itself: of transactions with one row, half as many rows are enough.
    :param max_wait: seconds after the first change after which it fires for fewer rows, too; None: never.
    :param poll_interval: seconds between two looks, at most ten.
    """

    WHAT: ClassVar[str] = "What the pipeline publishes"
    KEY: ClassVar[str] = "bottledwater_changes"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        tables: Sequence[str],
        min_rows: int = 1,
        max_wait: float | None = 300.0,
        poll_interval: float = 5.0,
    ) -> None:
        super().__init__(pipeline=pipeline, poll_interval=poll_interval)
        self.tables = [tables] if isinstance(tables, str) else list(tables)
        self.min_rows, self.max_wait = min_rows, max_wait

    async def _begin(self, pipeline: Settings, kept: Any) -> Watch:
        from airflow_bottledwater.jobs.changes import ChangeWatch
        from airflow_bottledwater.provision import live

        return ChangeWatch(
            pipeline,
            await asyncio.to_thread(live.name_of, pipeline),
            self.tables,
            min_records=self.min_rows,
            max_wait=self.max_wait,
            last=ChangeRange.of_event(kept) if kept else None,
        )

    def _keys(self) -> list[str]:
        # the second one is that of all choices of tables, so that what was told is known when `tables` changes
        return [self._key(sorted(self.tables)), self._key(None)]

    def _together(self, kept: list[Any]) -> Any:
        # of each table where it was told last, by whichever trigger; the position is this trigger's own
        tables = {table: each for of in kept for table, each in of["tables"].items()}
        return {**kept[0], "tables": tables} if kept else None

    def _told(self, found: ChangeRange) -> tuple[dict[str, Any] | None, Any]:
        event = found.as_event()
        if found.empty:
            return None, event
        slot = found.pipeline.rpartition("/")[2]
        stats.incr("bottledwater.changes.events", tags={"slot": slot})
        return event, event
