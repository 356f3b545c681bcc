"""The trigger that waits until a pipeline's job ends, reports an error, or does not report any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.hooks.instance import ours
from airflow_bottledwater.jobs import orphans
from airflow_bottledwater.jobs.alive import longest_silence, silence
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import letters, problems
from airflow_bottledwater.state.control_records import (
    REPLACEMENT,
    TASK,
    StatusRecord,
    last_status,
    status_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.triggers.pipeline import PipelineTrigger
from airflow_bottledwater.triggers.watching import LACKING, LONGEST_PAUSE, AsyncWatch

log = logging.getLogger(__name__)

#: how many times outage_timeout may pass without a report: a job waits for servers before its first report, and one
#: that failed for a transient reason is submitted again after a pause
_OUTAGES = 2
#: seconds for which nobody continues a job that was stopped with its task, before that counts as the stream's end, if
#: that task is not known to go on: one that was cleared submits another job
_CONTINUED = 60.0
#: seconds between two lines in the log about a stream of which nothing but its position and its counters has changed
_TELL = 600.0
#: seconds between two looks for jobs whose task has ended, and for Airflow's answer
_ORPHANS, _ANSWER = 60.0, 60.0
#: threads for such looks: those of pipelines whose Kafka is away may be many, and nobody else waits behind them
_LOOKING = ThreadPoolExecutor(2, "look for jobs")


def limit(pipeline: Settings, max_silence: float) -> float:
    """Seconds without a report after which a stream counts as dead: at least ``max_silence``, see
    :class:`StreamErrorSensor`."""
    return max(max_silence, longest_silence(pipeline.heartbeat_interval), _OUTAGES * pipeline.outage_timeout)


def ended(status: StatusRecord | None) -> str:
    """The id of the stream's job, if the last status reports its end; otherwise empty.

    When a watch begins, this is the end of an earlier job, and a new one may be about to start.
    """
    return status.job.id if status is not None and status.job.kind == "stream" and status.ended else ""


def _unreported(status: StatusRecord | None, silent: float) -> str:
    """That no stream has reported for so many seconds."""
    last = "No job has ever reported." if status is None else f"The last report is of a {status.job.kind} job."
    if status is not None and status.not_begun:
        last += f" No job could begin since: {status.error}"
    return (
        f"No stream has reported for {silent:.0f} s. {last} The log of the stream's task says why it does not start; "
        "check that this task has the same slot and connections."
    )


def evaluate(
    status: StatusRecord | None, *, silent: float, longest: float, earlier: str, max_dead_letters: int | None
) -> dict[str, Any] | None:
    """The event for a status; None if there is nothing to report yet, so that it has to be fetched again.

    That no job could begin is a failure. A transient failure does not count at once, since the stream operator submits
    the job again; nor does the end of an earlier job, or of one that was stopped with its task or to be replaced. They
    count when nothing else was reported for a while. The event for a job that was stopped with its task has this task
    as ``owner``: as long as that goes on, it is no end.

    :param silent: seconds for which the status has not changed, by the reader's own clock; clocks of other hosts are
        not used.
    :param longest: seconds that a silence may last.
    :param earlier: the id of the job whose end was known before the watch began; empty for none.
    :param max_dead_letters: more open dead letters than these are an error; None: any number is allowed.
    """
    late = silent >= longest
    if status is None or status.job.kind != "stream":
        if late and status is not None and status.ended and not status.wanted:
            return _ok(status)  # it was asked to stop before a stream could begin
        return _failed(_unreported(status, silent)) if late else None
    if max_dead_letters is not None and status.open_dead_letters > max_dead_letters:
        why = problems.summary(each for each in status.problems if each.kind == letters.KIND)
        more = f"{letters.are_open(status.open_dead_letters)}, more than {max_dead_letters}."
        return _failed(f"{more} {why}".strip(), status.position)
    others = [each for each in status.standing if each.kind != letters.KIND]
    if not status.ended:
        if found := problems.lasting(others, status.at):
            return _failed(problems.summary(found), status.position)
        if not late:
            return None
        job = status.job
        return _failed(
            f"The job {job.id[:8]} (epoch {job.epoch}, process {job.pid} on {job.host}) has not reported for "
            f"{silent:.0f} s: it was killed, or its host is gone. Start the stream again, it goes on where it was.",
            status.position,
        )
    if status.job.id == earlier and not late:
        return None
    if status.failed or status.not_begun:
        if not status.permanent and not late:
            return None
        return {**_failed(status.error, status.position), "permanent": status.permanent}
    if status.stopped_by == REPLACEMENT:
        if not late:
            return None
        return _failed(
            f"A job was stopped to be replaced, and no other has reported for {silent:.0f} s.", status.position
        )
    if others:
        return _failed(problems.summary(others), status.position)
    if status.stopped_by == TASK and silent < min(_CONTINUED, longest):
        return None
    owner = status.job.owner if status.stopped_by == TASK else None
    return _ok(status, owner)


def owner_of(event: dict[str, Any]) -> Owner | None:
    """The task of this Airflow with which the job of an event was stopped; None if there is none."""
    owner = Owner(**told) if (told := event.get("owner")) else None
    return owner if owner is not None and ours(owner) else None


def identity(status: StatusRecord | None) -> list[Any] | None:
    """What tells a status from a later one."""
    return None if status is None else [status.job.id, status.state, status.at]


def sight(status: StatusRecord) -> str:
    """What a status says, without what changes all the time."""
    job = status.job
    stopped = f" (stopped by: {status.stopped_by})" if status.stopped_by else ""
    error = f" {status.error}" if status.error else ""
    found = f" {problems.summary(status.problems)}" if status.problems else ""
    return f"{job.kind} job {job.id[:8]}, epoch {job.epoch} on {job.host}: {status.state}{stopped}.{error}{found}"


def _ok(status: StatusRecord, owner: Owner | None = None) -> dict[str, Any]:
    told = None if owner is None else asdict(owner)
    return {"status": "ok", "position": status.position, "counters": status.counters, "owner": told}


def _failed(message: str, position: str = "") -> dict[str, Any]:
    return {"status": "failed", "message": message, "position": position}


class StatusWatch:
    """Fetches one pipeline's status repeatedly; it has to be closed.

    :param earlier: see :func:`evaluate`.
    :param max_silence: see :func:`limit`.
    """

    def __init__(
        self, pipeline: Settings, cluster: Cluster, *, earlier: str, max_silence: float, max_dead_letters: int | None
    ) -> None:
        self._records = ControlTopic.of(pipeline.kafka)
        self._name = cluster.pipeline(pipeline.slot)
        self._earlier, self._max_dead_letters = earlier, max_dead_letters
        self._longest = limit(pipeline, max_silence)
        self._told: tuple[str, float] = ("", 0.0)
        self._began = time.monotonic()

    def fetch(self) -> dict[str, Any] | None:
        """Fetch the status and evaluate it; returns an event, or None, see :func:`evaluate`. This call blocks.

        :raises Outage: Kafka does not answer; the silence then begins anew.
        """
        try:
            event = self._evaluate(now=False)
            if event is not None and event["status"] == "failed":
                # the silence may be Kafka's: make sure that it answers
                event = self._evaluate(now=True)
        except BottledWaterError:
            self._began = time.monotonic()
            raise
        return event

    def _evaluate(self, *, now: bool) -> dict[str, Any] | None:
        found, changed = self._records.get(status_key(self._name), now=now)
        status = last_status(self._name, found)
        silent = silence(self._records, changed, self._began)
        self._tell(status, silent)
        event = evaluate(
            status,
            silent=silent,
            longest=self._longest,
            earlier=self._earlier,
            max_dead_letters=self._max_dead_letters,
        )
        return None if event is None else {**event, "seen": identity(status)}

    def _tell(self, status: StatusRecord | None, silent: float) -> None:
        """Say what is seen, at each change, and from time to time."""
        line = "No job has ever reported." if status is None else sight(status)
        late = status is not None and not status.ended and silent > longest_silence(status.heartbeat)
        kind = f"{line}{late}"
        if kind != self._told[0] or time.monotonic() - self._told[1] >= _TELL:
            self._told = kind, time.monotonic()
            numbers = "" if status is None else f" Position {status.position or 'none yet'}; {status.counters}."
            log.info("%s%s%s", line, numbers, f" It has not reported for {silent:.0f} s." if late else "")

    def close(self) -> None:
        """End the watch."""
        self._records.close()


def read(pipeline: Settings, cluster: Cluster, *, now: bool = False) -> tuple[StatusRecord | None, float]:
    """Fetch a pipeline's status once, and when it last changed, see :meth:`ControlTopic.get`.

    :raises StateError: see :func:`last_status`.
    """
    name = cluster.pipeline(pipeline.slot)
    with ControlTopic.of(pipeline.kafka) as topic:
        found, changed = topic.get(status_key(name), now=now)
        return last_status(name, found), changed


class StreamErrorTrigger(PipelineTrigger):
    """Fires when the stream has ended, in order or with an error, has written too many dead letters, or does not report
    any more; also if it cannot look for so long, since its triggerer lacks something.

    :param cluster: the source's :class:`Cluster` as a dictionary, which the sensor has read.
    :param earlier: the id of the job whose end was known before the sensor began; empty for none.
    :param max_silence: seconds without a report after which the stream counts as dead, see :func:`limit`.
    :param max_dead_letters: the trigger fires if more dead letters are open; None: any number is allowed.
    :param poll_interval: seconds between two checks.
    """

    def __init__(
        self,
        *,
        hook: dict[str, Any],
        cluster: dict[str, Any],
        earlier: str = "",
        max_silence: float = 600.0,
        max_dead_letters: int | None = None,
        poll_interval: float = 10.0,
    ) -> None:
        super().__init__(hook=hook)
        self.cluster, self.earlier, self.max_silence = cluster, earlier, max_silence
        self.max_dead_letters, self.poll_interval = max_dead_letters, poll_interval

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event."""
        looked, looking = -_ORPHANS, asyncio.create_task(asyncio.sleep(0))
        async with AsyncWatch(self._begin, "The stream's status") as watching:
            while True:
                await asyncio.sleep(min(self.poll_interval, LONGEST_PAUSE))
                due = looking.done() and not watching.away and time.monotonic() - looked >= _ORPHANS
                if self._known is not None and due:
                    # what this trigger is for, the watch, does not wait for it
                    looked, looking = time.monotonic(), asyncio.create_task(self._stop_orphans())
                try:
                    event = await watching.fetch()
                except BottledWaterError as error:
                    # without a position, since it is not the stream that has failed
                    event = {"status": "failed", "message": f"The stream cannot be watched any more: {error}"}
                event = event or watching.lack.event(self, "The stream", max(self.max_silence, LACKING))
                owner = None if event is None else owner_of(event)
                if owner is not None and (await tasks.fate(owner)).may_continue:
                    continue  # a retry, say, submits another job
                if event is not None:
                    yield TriggerEvent(event)
                    return

    async def _stop_orphans(self) -> None:
        """Stop jobs without a task, with the connections as they are now: those of the watch may be months old."""
        loop = asyncio.get_running_loop()

        def has_ended(owner: Owner) -> bool:
            if not ours(owner):
                return False
            asked = tasks.states(owner.dag_id, owner.run_id, owner.task_id, owner.map_index)
            return bool(tasks.OVER & asyncio.run_coroutine_threadsafe(asked, loop).result(_ANSWER))

        try:
            pipeline = await self.pipeline()
            name = Cluster(**self.cluster).pipeline(pipeline.slot)
            await loop.run_in_executor(_LOOKING, orphans.stop_all, pipeline, name, has_ended)
        except Exception as error:
            # whatever it is, the next look comes
            log.info("Jobs without a task could not be looked for: %s", type(error).__name__)

    async def _begin(self) -> StatusWatch:
        """Begin to watch.

        :raises Outage: a connection could not be looked up.
        """
        return StatusWatch(
            await self.pipeline(),
            Cluster(**self.cluster),
            earlier=self.earlier,
            max_silence=self.max_silence,
            max_dead_letters=self.max_dead_letters,
        )
