"""What Airflow says of tasks, asked from within the triggerer."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from airflow.sdk.configuration import conf
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from asgiref.sync import sync_to_async

from airflow_bottledwater.hooks.instance import ours
from airflow_bottledwater.model.job import Owner

log = logging.getLogger(__name__)

#: seconds for one answer of Airflow: a little less than a trigger has for its end (``[triggerer] on_kill_timeout``)
_ASK_SECONDS = 25.0 / 30.0 * conf.getint("triggerer", "on_kill_timeout", fallback=30)
#: seconds for which Airflow is asked what became of a task whose trigger it has cancelled, and seconds between two
#: questions
_SETTLE_SECONDS, _SETTLE_PAUSE = 600.0, 5.0
#: the states of a task that is not over: Airflow has given its trigger to another triggerer, or it resumes the task or
#: tries it again, as after a time-out of the trigger. Its next process decides about what the task has begun: a retry
#: goes on with it, the first try after a clear ends it
GOES_ON = frozenset({"deferred", "scheduled", "queued", "running", "restarting", "up_for_retry"})
#: the states of a task that has ended, and is not going to be tried again
OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


class Fate(enum.Enum):
    """What became of a task whose trigger Airflow has cancelled."""

    #: it is deferred, resumed or tried again: its next process decides
    GOES_ON = enum.auto()
    #: it was marked, timed out, skipped, or removed from its DAG: what it has begun is to end
    ENDED = enum.auto()
    #: it was cleared, and is going to run anew: what it has begun is going to be replaced
    CLEARED = enum.auto()
    #: Airflow has no such task any more: its row was removed (``airflow db clean``, a run or DAG that was deleted),
    #: which ends nothing
    GONE = enum.auto()
    #: it is one of another Airflow, which is the only one that knows
    FOREIGN = enum.auto()
    #: Airflow has not said it
    UNKNOWN = enum.auto()

    @property
    def may_continue(self) -> bool:
        """Whether another process of the task may come, which goes on with what it has begun, or begins it anew."""
        return self in (Fate.GOES_ON, Fate.CLEARED, Fate.UNKNOWN)


def fate_of(states: set[str]) -> Fate:
    """What became of a task.

    :param states: what :func:`states` says of it.
    """
    if not states:
        return Fate.GONE
    if GOES_ON & states:
        return Fate.GOES_ON
    return Fate.ENDED if OVER & states else Fate.CLEARED


def states_now(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
    """The states of a task in a run: one; none if Airflow has no such task, and ``None`` as a word if it was cleared.
    For a task's process, in which a call may block.

    :raises Exception: Airflow does not answer; its errors are of many classes.
    """
    found = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
    )
    return {str(getattr(state, "value", state)) for state in found.get(run_id, {}).values()}


async def states(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
    """:func:`states_now` for the triggerer.

    :raises Exception: Airflow does not answer; its errors are of many classes.
    """
    async with asyncio.timeout(_ASK_SECONDS):
        return await sync_to_async(states_now)(dag_id, run_id, task_id, map_index)


def known_fate(dag_id: str, run_id: str, task_id: str, map_index: int) -> Fate:
    """What became of a task, for a task's process."""
    try:
        return fate_of(states_now(dag_id, run_id, task_id, map_index))
    except Exception as error:
        # its errors are of many classes
        log.warning("Airflow does not say whether the task %r has ended (%s).", task_id, type(error).__name__)
        return Fate.UNKNOWN


def owners_fate(owner: Owner) -> Fate:
    """What became of the task that has submitted a job, for a task's process."""
    if not ours(owner):
        return Fate.FOREIGN
    return known_fate(owner.dag_id, owner.run_id, owner.task_id, owner.map_index)


async def ask_early(ti: Any) -> None:
    """Ask Airflow once, so that :func:`fate` gets its answer quickly later: a triggerer makes what answers when it is
    first asked, which takes seconds, and half a minute on a busy host.

    :param ti: the trigger's task instance; None if it has none.
    """
    if ti is not None:
        with contextlib.suppress(Exception):
            await states(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)


async def fate(ti: Any) -> Fate:
    """What became of the task of a trigger that is cancelled: Airflow cancels it in the same way in all cases.

    :param ti: the trigger's task instance; None if it has none.
    """
    if ti is None:
        return Fate.UNKNOWN
    try:
        return fate_of(await states(ti.dag_id, ti.run_id, ti.task_id, ti.map_index))
    except Exception as error:
        log.warning("Airflow does not say whether the task was ended (%s).", type(error).__name__)
        return Fate.UNKNOWN


#: what is settled at the moment: the event loop itself keeps no reference to its tasks
_settling: set[asyncio.Task[None]] = set()


async def settle(ti: Any, what: str, end: Callable[[Fate], Awaitable[None]]) -> None:
    """End what a task has begun if Airflow says that the task was ended or cleared, and only then. Airflow is asked
    until it answers, also when the time of ``on_kill`` is over, which bounds only how long this waits.

    :param ti: the trigger's task instance; None if it has none.
    :param what: the task has begun, for the log.
    :param end: ends it; called with :attr:`Fate.ENDED` or :attr:`Fate.CLEARED`.
    """
    task = asyncio.create_task(_settle(ti, what, end))
    _settling.add(task)
    task.add_done_callback(_settling.discard)
    await asyncio.shield(task)


async def _settle(ti: Any, what: str, end: Callable[[Fate], Awaitable[None]]) -> None:
    asked, found = 0.0, await fate(ti)
    while found is Fate.UNKNOWN and ti is not None and asked < _SETTLE_SECONDS:
        await asyncio.sleep(_SETTLE_PAUSE)
        asked += _SETTLE_PAUSE
        found = await fate(ti)
    if found is Fate.GOES_ON:
        log.info("The trigger was given to another triggerer, or the task is resumed: %s goes on.", what)
    elif found is Fate.GONE:
        log.warning(
            "Airflow has no row of this task any more: it was removed (airflow db clean, or its run or DAG was "
            "deleted). This ends nothing: %s goes on, without a task. The next run of its pipeline finds it; "
            "bottledwater_health tells of it.",
            what,
        )
    elif found is Fate.UNKNOWN:
        log.warning("Airflow has not said whether the task was ended: %s goes on, without a task that is known.", what)
    else:
        cleared = found is Fate.CLEARED
        log.info("The task was %s: %s is ended.", "cleared" if cleared else "marked, skipped or removed", what)
        await end(found)
