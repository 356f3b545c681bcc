"""The triggers of assets that change when something goes wrong: DAGs that repair it, or tell somebody, run by them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from airflow_bottledwater.errors import SettingError, StateError
from airflow_bottledwater.pipeline.argument import PipelineArgument, described
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.dead_letters import LettersWatch
from airflow_bottledwater.triggers.slot_lag import Seen, evaluate, known_status
from airflow_bottledwater.triggers.slots import SlotReader
from airflow_bottledwater.triggers.watcher import WatcherTrigger
from airflow_bottledwater.triggers.watching import LACKING, AsyncWatch, Watch

Found = dict[str, Any]
Row = tuple[Any, ...]


class _Change:
    """Tells when something is wrong, and when it is right again.

    :param wrong: whether it was when that was told last.
    """

    def __init__(self, wrong: bool) -> None:
        self._wrong = wrong

    def __call__(self, found: Found | None) -> Found | None:
        """What is wrong, if it was not before; an empty dictionary if it is right again; None if nothing has changed.

        :param found: what is wrong, as JSON values; an empty dictionary if nothing is; None if that is not known.
        """
        if found is None or bool(found) == self._wrong:
            return None
        self._wrong = bool(found)
        return found


class _SlotWatch:
    """Looks at a slot in the event loop, over the session of all triggers with that database.

    :param connected: looks the pipeline's connections up.
    :param judge: what is wrong, by a row of :data:`~airflow_bottledwater.triggers.slots.LAG_SQL`.
    """

    def __init__(
        self,
        pipeline: Settings,
        connected: Callable[[], Awaitable[Settings]],
        judge: Callable[[Row | None], Found | None],
        change: _Change,
    ) -> None:
        self._pipeline: Settings | None = pipeline
        self._connected, self._judge, self._change, self._reader = connected, judge, change, SlotReader()

    async def fetch(self) -> Found | None:
        """See :class:`_Change`.

        :raises Outage: the source does not answer; its connection is then looked up again, since it may have new
            credentials.
        :raises Refused: the source does not let its slots be seen.
        """
        # imported here, since a DAG processor needs no libpq
        import psycopg

        from airflow_bottledwater.postgres.connect import outage

        pipeline, self._pipeline = self._pipeline or await self._connected(), None
        try:
            row = await self._reader.row(pipeline.postgres, pipeline.slot)
        except psycopg.Error as error:
            raise outage(error, "Reading the slot's lag") from None
        self._pipeline = pipeline
        return self._change(self._judge(row))

    async def close(self) -> None:
        """Read no more."""
        await self._reader.close()


class _LettersWatch:
    """Looks at the dead letters, by calls that block."""

    def __init__(self, look: Callable[[], Found | None], change: _Change) -> None:
        self._look, self._change = look, change

    def fetch(self) -> Found | None:
        """See :class:`_Change`."""
        return self._change(self._look())

    def close(self) -> None:
        """Nothing is kept open."""


class _AlarmTrigger(WatcherTrigger):
    """Fires when something goes wrong: once, and again only after it was right in between. So it does if that has not
    been known for :attr:`_patience` seconds, since no look has succeeded."""

    @property
    def _patience(self) -> float:
        return LACKING

    async def _begin(self, pipeline: Settings, kept: Any) -> Watch:
        return self._looking(pipeline, _Change(bool(kept and kept["wrong"])))

    def _looking(self, pipeline: Settings, change: _Change) -> Watch:
        """What looks at the pipeline."""
        raise NotImplementedError

    def _told(self, found: Found) -> tuple[Found | None, Any]:
        return found or None, {"wrong": bool(found)}

    def _news(self, found: Any, watching: AsyncWatch, kept: Any) -> tuple[Found | None, Any] | None:
        if found is not None:
            return self._told(found)
        kept = kept or {"wrong": False}
        if watching.error is None:
            # what is wrong from now on is told, although it was told before that it could not be seen
            return (None, {"wrong": kept["wrong"]}) if kept.get("unseen") else None
        unseen = time.monotonic() - watching.seen
        if unseen < self._patience or kept["wrong"] or kept.get("unseen"):
            return None
        since = datetime.datetime.fromtimestamp(time.time() - unseen, datetime.UTC).isoformat(timespec="seconds")
        message = f"{self.WHAT} cannot be seen since {since}: {watching.error}"
        return {"slot": described(self.pipeline).name, "message": message}, {**kept, "unseen": True}


class SlotLagAlarmTrigger(_AlarmTrigger):
    """Fires when a pipeline falls behind, or its slot is in danger or lost: for an ``AssetWatcher``. It fires once, and
    again only after all was right in between.

    The payload has ``slot``, and ``message`` if the slot is lost or gone, or if it could not be looked at for ten
    minutes, or for ``max_lag_seconds``, if that is longer; otherwise ``lag`` and ``retained`` (bytes of
    WAL), ``wal_status`` and ``safe_wal_size``.

    :param pipeline: see :class:`~airflow_bottledwater.triggers.watcher.WatcherTrigger`.
    :param max_lag: bytes of WAL; None for any number.
    :param max_lag_seconds: what was there so many seconds ago has to be published; None for any number.
    :param wal_status: the worst ``wal_status`` that is good enough: ``reserved``, ``extended`` or ``unreserved``; None
        for any.
    :param min_safe_wal: bytes of WAL that may be written at least until the slot may be lost; None for any number.
    :param poll_interval: seconds between two looks, at most ten.
    """

    WHAT: ClassVar[str] = "The slot"
    KEY: ClassVar[str] = "bottledwater_lag"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        max_lag: int | None = None,
        max_lag_seconds: float | None = 600.0,
        wal_status: str | None = "extended",
        min_safe_wal: int | None = None,
        poll_interval: float = 10.0,
    ) -> None:
        super().__init__(pipeline=pipeline, poll_interval=poll_interval)
        self.max_lag, self.max_lag_seconds = max_lag, max_lag_seconds
        self.wal_status, self.min_safe_wal = known_status(wal_status), min_safe_wal
        # kept while the watch begins anew after an outage
        self._seen = Seen(max_lag_seconds)

    @property
    def _patience(self) -> float:
        return max(self.max_lag_seconds or 0.0, LACKING)

    def _looking(self, pipeline: Settings, change: _Change) -> Watch:
        limits: dict[str, Any] = {"wal_status": self.wal_status, "min_safe_wal": self.min_safe_wal}

        def judge(row: Row | None) -> Found | None:
            event = evaluate(pipeline.slot, row, self.max_lag, **limits)
            if row is not None:
                self._seen.on(row[6])
            # a lag in seconds is known only after so many seconds: until then, a restart has made nothing right
            late = row is not None and row[1] is not None and self._seen.exceeded(row[4] + row[1], row[4])
            if event is not None and event["status"] == "failed":
                return {"slot": pipeline.slot, "message": event["message"]}
            if row is None or row[1] is None or (event is not None and late is None):
                return None
            if event is not None and not late:
                return {}
            found = {"lag": row[1], "retained": row[2], "wal_status": row[0], "safe_wal_size": row[5]}
            return {"slot": pipeline.slot, **found}

        return _SlotWatch(pipeline, self._connected, judge, change)


class DeadLettersAlarmTrigger(_AlarmTrigger):
    """Fires when more dead letters are open than may be: for an ``AssetWatcher``. It fires once, and again only after
    few enough were open in between.

    The payload has ``slot``, ``open``, and the numbers by table; or ``message``, if the pipeline has no table of a name
    that was given, or they could not be counted for ten minutes.

    :param pipeline: see :class:`~airflow_bottledwater.triggers.watcher.WatcherTrigger`.
    :param max_open: how many may be open.
    :param tables: ``[schema.]table``, with ``*`` and ``?``; empty for all.
    :param poll_interval: seconds between two looks, at most ten.
    """

    WHAT: ClassVar[str] = "The dead letters"
    KEY: ClassVar[str] = "bottledwater_dead_letters"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        max_open: int = 0,
        tables: Sequence[str] = (),
        poll_interval: float = 10.0,
    ) -> None:
        super().__init__(pipeline=pipeline, poll_interval=poll_interval)
        self.max_open, self.tables = max_open, [tables] if isinstance(tables, str) else list(tables)

    def _looking(self, pipeline: Settings, change: _Change) -> Watch:
        watch = LettersWatch(pipeline, max_open=self.max_open, tables=self.tables)

        def look() -> Found | None:
            try:
                counts = watch.counts()
            except StateError:
                return {}  # there is no pipeline yet, or no more
            except SettingError as error:
                return {"slot": pipeline.slot, "message": str(error)}
            found = sum(counts.values())
            return {"slot": pipeline.slot, "open": found, "tables": counts} if found > self.max_open else {}

        return _LettersWatch(look, change)
