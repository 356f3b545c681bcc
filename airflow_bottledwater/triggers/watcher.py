"""What the triggers of asset watchers have in common: they fire again and again, and go on where they were."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer

from airflow_bottledwater.errors import BottledWaterError, SettingError
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.pipeline.argument import PipelineArgument, as_values, described
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.stored import StoredTrigger
from airflow_bottledwater.triggers.watching import LONGEST_PAUSE, AsyncWatch, Watch

log = logging.getLogger(__name__)

#: seconds after which a look is over although nothing was found yet, and the next one waits on. Airflow ends a trigger
#: that takes longer for one than ``[triggerer] shared_stream_ack_timeout``, 300 s
_LONGEST_LOOK = 60.0


@dataclass
class _Look:
    """One look at what is watched.

    :ivar over: set when the trigger has ended it.
    :ivar confirmed: what is done once Airflow has stored the event that it has led to.
    """

    over: asyncio.Event = field(default_factory=asyncio.Event)
    confirmed: Callable[[], Awaitable[None]] | None = None


class _Looks(SharedStreamProducer):
    """Lets a trigger look again and again, and tells it when Airflow has stored its event.

    :param pause: seconds between two looks.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause

    async def open_stream(self) -> AsyncIterator[tuple[_Look, _Look]]:
        """The looks; the next one comes when the last one is over."""
        while True:
            look = _Look()
            yield look, look
            await look.over.wait()
            await asyncio.sleep(self._pause)

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """The events of these looks are in Airflow's database."""
        for item in batch:
            look: _Look = item.broker_payload
            if item.outcome.is_clean and look.confirmed is not None:
                await look.confirmed()


class WatcherTrigger(StoredTrigger, BaseEventTrigger):
    """Watches a pipeline for an asset.

    What was told last is kept in the asset's store, only after Airflow has stored the event: whatever dies before that,
    the event comes again, and none is lost.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. Only its name and
        its connections are used.
    :param poll_interval: seconds between two looks, at most ten.
    :cvar WHAT: is watched, for the log.
    :cvar KEY: how the keys in the asset's store begin.
    """

    WHAT: ClassVar[str]
    KEY: ClassVar[str]

    def __init__(self, *, pipeline: PipelineArgument, poll_interval: float) -> None:
        super().__init__()
        described(pipeline)  # what is wrong is said when the DAG is parsed
        self.pipeline = as_values(pipeline)
        self.poll_interval = poll_interval

    @abstractmethod
    async def _begin(self, pipeline: Settings, kept: Any) -> Watch:
        """Begin to watch.

        :param kept: what was kept last; None if nothing was.
        """

    @abstractmethod
    def _told(self, found: Any) -> tuple[dict[str, Any] | None, Any]:
        """What is found, as the payload of an event, if there is to be one, and as what is kept of it."""

    def _news(self, found: Any, watching: AsyncWatch, kept: Any) -> tuple[dict[str, Any] | None, Any] | None:
        """What a look has led to, as :meth:`_told` has it; None if nothing.

        :param found: None if nothing was found, or it cannot be seen.
        :param kept: what was kept last.
        """
        return None if found is None else self._told(found)

    # ---------------------------------------------------------------- what Airflow calls
    def shared_stream_key(self) -> Hashable:
        """Each trigger has a stream of its own, by which it learns when its events are stored."""
        path, arguments = self.serialize()
        return path, json.dumps(arguments, sort_keys=True)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        """What lets a trigger with these arguments look again and again."""
        return _Looks(min(kwargs["poll_interval"], LONGEST_PAUSE))

    async def filter_shared_stream(self, shared_stream: AsyncIterator[_Look]) -> AsyncIterator[TriggerEvent]:
        """Look again and again; yields an event for each thing that is to be told."""
        kept = await self._kept()

        async def begin() -> Watch:
            return await self._begin(await self._connected(), kept)

        async with AsyncWatch(begin, self.WHAT) as watching:
            fetching: asyncio.Task[Any] | None = None
            try:
                async for look in shared_stream:
                    fetching = fetching or asyncio.create_task(watching.fetch())
                    await asyncio.wait([fetching], timeout=_LONGEST_LOOK)
                    if fetching.done():
                        found, fetching = await self._found(fetching), None
                        if (news := self._news(found, watching, kept)) is not None:
                            payload, kept = news
                            # in the order of the looks, so that an event that is confirmed late takes nothing back
                            look.confirmed = self._keeping(kept)
                            if payload is None:
                                await self._keep(kept)
                            else:
                                yield TriggerEvent(payload)
                    look.over.set()
            finally:
                if fetching is not None:
                    fetching.cancel()

    async def _found(self, fetching: asyncio.Task[Any]) -> Any:
        """What was found; None if nothing was, or it cannot be seen."""
        try:
            return await fetching
        except BottledWaterError as error:
            log.warning("%s cannot be seen: %s", self.WHAT, error)
            return None

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """The same for whoever does not tell that events are stored: what was told is not kept, and comes again after a
        restart."""

        async def looks() -> AsyncIterator[_Look]:
            async for look, _ in _Looks(self.poll_interval).open_stream():
                yield look

        async for event in self.filter_shared_stream(looks()):
            yield event

    # ---------------------------------------------------------------- what is kept
    async def _kept(self) -> Any:
        if self.asset_state_store is None:
            return None
        try:
            found = [await self.asset_state_store.aget(key) for key in self._keys()]
        except ValueError:
            raise SettingError(
                "watchers", self.serialize()[0], "one asset for triggers that are the same: let all DAGs use that asset"
            ) from None
        return self._together([each for each in found if each is not None])

    def _together(self, kept: list[Any]) -> Any:
        """What was kept last, of what is kept under each of the keys; None if nothing is."""
        return kept[0] if kept else None

    async def _keep(self, kept: Any) -> None:
        if self.asset_state_store is not None:
            for key in self._keys():
                await self.asset_state_store.aset(key, kept)

    def _keys(self) -> list[str]:
        """The keys in the asset's store: an asset may have several watchers, each of which goes on where it was."""
        watched = self.serialize()[1]
        return [self._key({name: watched[name] for name in watched.keys() - {"pipeline", "poll_interval"}})]

    def _key(self, watched: Any, name: str = "") -> str:
        """The key of what is watched of the pipeline.

        :param name: the pipeline's, with which it is known by other connections, too; empty for these connections.
        """
        of = described(self.pipeline)
        who = [name] if name else [of.source.conn_id, of.kafka.conn_id, of.name]
        what = json.dumps([*who, watched], sort_keys=True)
        return f"{self.KEY}_{hashlib.sha256(what.encode()).hexdigest()[:16]}"

    def _keeping(self, kept: Any) -> Callable[[], Awaitable[None]]:
        return lambda: self._keep(kept)

    async def _connected(self) -> Settings:
        """The pipeline with its connections as they are now; of its settings only its name.

        :raises Outage: a connection could not be looked up.
        """
        of = described(self.pipeline)
        return await PipelineHook.of_state(of.source.conn_id, of.kafka.conn_id, of.name).apipeline()
