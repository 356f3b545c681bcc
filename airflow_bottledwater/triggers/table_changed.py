"""The trigger of an asset that changes when tables do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.observability import stats

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.hooks.changes import READ, READ_AT
from airflow_bottledwater.model.changes import ChangeRange
from airflow_bottledwater.pipeline.argument import PipelineArgument, described
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.watcher import WatcherTrigger
from airflow_bottledwater.triggers.watching import Watch

if TYPE_CHECKING:
    from airflow_bottledwater.jobs.changes import ChangeWatch

log = logging.getLogger(__name__)

#: seconds between two looks at how far the DAGs have read
_READ_EVERY = 60.0
#: looks between two events without changes, at most: Airflow keeps none of them for a DAG that is paused
_MOST_APART = 256
#: seconds after which a DAG that does not run is waited for no longer: it may have been deleted, or have another name
_FORGOTTEN = 30 * 86_400.0


class _ReadWatch:
    """Watches for changes, and for DAGs that have not read what was told.

    Airflow gives a run the events up to the first one for which the run was queued. The later ones, which came before
    the run began, wait for another event: so one without changes is told as long as a DAG is behind.

    :param changes: watches for changes.
    :param last: the last range that was told.
    :param read: gives what is kept under :data:`~airflow_bottledwater.hooks.changes.READ`.
    """

    def __init__(
        self, changes: ChangeWatch, last: ChangeRange | None, read: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        self._changes, self._last, self._read = changes, last, read
        #: of each DAG that is behind, what it has read, and at how many looks it had not read more
        self._behind: dict[str, tuple[Any, int]] = {}
        self._next = time.monotonic() + _READ_EVERY

    async def fetch(self) -> tuple[ChangeRange, ChangeRange | None] | None:
        """What is to be kept, and what is told of it, if anything."""
        found, last = await asyncio.to_thread(self._changes.fetch), self._last
        known = () if last is None else last.missing
        missing = known if self._changes.missing is None else self._changes.missing
        # nobody else tells of a name without a table: nothing is wrong with the pipeline
        news = tuple(each for each in missing if each not in known)
        if last is not None:
            self._last = last = dataclasses.replace(last, missing=missing)
        if found is None:
            if last is None or not (news or (time.monotonic() >= self._next and await self._again(last))):
                return None
            tables = {table: each.begun_at(each.end) for table, each in last.tables.items()}
            tells, found = True, dataclasses.replace(last, start=last.end, tables=tables)
        else:
            tells = bool(news) or not found.empty
        self._last = dataclasses.replace(found, missing=missing)
        return self._last, dataclasses.replace(found, missing=news) if tells else None

    async def _again(self, last: ChangeRange) -> bool:
        """Look how far the DAGs have read; returns whether one is to be told again, ever more seldom while it does not
        run."""
        before, self._behind = self._behind, {}
        for dag, offsets in (await self._read()).items():
            if any(list(each.end) > offsets.get(each.id, []) for each in last.tables.values()):
                was, n = before.get(dag, (None, 0))
                self._behind[dag] = offsets, n + 1 if was == offsets else 0
        self._next = time.monotonic() + _READ_EVERY
        # after 1, 2, 4, ..., 256, 512, 768, ... looks
        looks = [n for _, n in self._behind.values()]
        return any(n > 0 and n % min(1 << n.bit_length() - 1, _MOST_APART) == 0 for n in looks)

    def close(self) -> None:
        """End the watch."""
        self._changes.close()


class TableChangedTrigger(WatcherTrigger):
    """Fires when a pipeline has published changes of tables: for an ``AssetWatcher``, so that DAGs run when tables have
    changed.

    The payload of each event is a range of changes (:class:`~airflow_bottledwater.model.changes.ChangeRange`): it
    begins where the one before has ended, and has whole transactions of the source. With
    :class:`~airflow_bottledwater.hooks.changes.ChangesHook` a DAG reads exactly these records. The first range begins
    where the pipeline is when the trigger first runs. If Airflow has begun one run for several events, so that a DAG
    has not read all that was told, an event without changes begins the next run.

    The stream may run anywhere, also without Airflow: it is watched through Kafka.

    :param pipeline: see :class:`~airflow_bottledwater.triggers.watcher.WatcherTrigger`.
    :param tables: ``[schema.]table``, with ``*`` and ``?``; without a schema, ``public`` is meant. One that is new, for
        the pipeline or here, begins with all that is in its topic. One that matches no table of the pipeline, or none
        any more, is told once: ``of_run`` fails in the run that this event begins.
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
        if described(pipeline).kafka.share_topics:
            # at each look it would be refused, of which only the triggerer's log tells
            raise SettingError(
                "share_topics", True, "false for changes by position; or schedule the DAG by the asset of the topic"
            )
        self.tables = [tables] if isinstance(tables, str) else list(tables)
        self.min_rows, self.max_wait = min_rows, max_wait
        #: the pipeline's, once the source was asked for it
        self._name = ""
        # two DAGs that read at the same moment may leave the time of only one of them
        self._began = time.time()

    async def _begin(self, pipeline: Settings, kept: Any) -> Watch:
        from airflow_bottledwater.jobs.changes import ChangeWatch
        from airflow_bottledwater.provision import live

        self._name = await asyncio.to_thread(live.name_of, pipeline)
        if kept is None:  # by its name, what was told with other connections is known, too
            kept = await self._kept()
        last = ChangeRange.of_event(kept) if kept else None
        changes = ChangeWatch(
            pipeline,
            self._name,
            self.tables,
            min_records=self.min_rows,
            max_wait=self.max_wait,
            last=last,
        )
        return _ReadWatch(changes, last, self._read)

    async def _read(self) -> dict[str, Any]:
        """How far each DAG has read within the last month; nothing if that is not known."""
        store = self.asset_state_store
        try:
            if store is None:
                return {}
            read, at = await store.aget(READ) or {}, await store.aget(READ_AT) or {}
            return {dag: read[dag] for dag in read if time.time() - at.get(dag, self._began) < _FORGOTTEN}
        except Exception as error:
            # its errors are of many classes; it is asked again
            log.info("Airflow does not say how far the DAGs have read (%s).", type(error).__name__)
            return {}

    def _keys(self) -> list[str]:
        # the second one is that of all choices of tables, so that what was told is known when `tables` changes
        names = ["", self._name] if self._name else [""]
        return [self._key(watched, name) for name in names for watched in (sorted(self.tables), None)]

    def _together(self, kept: list[Any]) -> Any:
        # of each table where it was told last, by whichever trigger; the position is this trigger's own
        tables = {table: each for of in kept for table, each in of["tables"].items()}
        return {**kept[0], "tables": tables} if kept else None

    def _told(self, found: tuple[ChangeRange, ChangeRange | None]) -> tuple[dict[str, Any] | None, Any]:
        kept, told = found
        if told is None:
            return None, kept.as_event()
        if told.missing:
            log.warning("The pipeline %s has no table that matches %s.", told.pipeline, ", ".join(told.missing))
        stats.incr("bottledwater.changes.events", tags={"slot": told.pipeline.rpartition("/")[2]})
        return told.as_event(), kept.as_event()
