"""What Airflow says of tasks, asked from within the triggerer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from airflow.sdk.configuration import conf
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from asgiref.sync import sync_to_async

log = logging.getLogger(__name__)

#: seconds for Airflow's answer: a little less than a trigger has for its end (``[triggerer] on_kill_timeout``). What stops a job goes on
#: when these are over
_ASK_SECONDS = 25.0 / 30.0 * conf.getint("triggerer", "on_kill_timeout", fallback=30)
#: the states of a task that is not over: Airflow has given its trigger to another triggerer, or it resumes the task or tries it again,
#: as after a time-out of the trigger. Its next process decides about what the task has begun: a retry goes on with it, the first try
#: after a clear ends it
GOES_ON = frozenset({"deferred", "scheduled", "queued", "running", "restarting", "up_for_retry"})
#: the states of a task that has ended, and is not going to be tried again
OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


def states_now(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
    """The states of a task in a run: one, or none if Airflow has no such task or it was cleared. For a task's process, in which a call
    may block.

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


def known_states(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
    """Like :func:`states_now`; none either if Airflow does not answer."""
    try:
        return states_now(dag_id, run_id, task_id, map_index)
    except Exception as error:
        # its errors are of many classes
        log.warning("Airflow does not say whether the task %r has ended (%s).", task_id, type(error).__name__)
        return set()


async def ask_early(ti: Any) -> None:
    """Ask Airflow once, so that :func:`goes_on` gets its answer quickly later: a triggerer makes what answers when it is first asked, which
    takes seconds, and half a minute on a busy host.

    :param ti: the trigger's task instance; None if it has none.
    """
    if ti is not None:
        with contextlib.suppress(Exception):
            await states(ti.dag_id, ti.run_id, ti.task_id, ti.map_index)


async def goes_on(ti: Any) -> bool:
    """Whether the task of a trigger that is cancelled goes on. Otherwise a user has ended it, or has cleared it and it is not scheduled
    yet; Airflow cancels a trigger in the same way in all these cases. If Airflow does not answer, the task is assumed to be ended.

    :param ti: the trigger's task instance; None if it has none.
    """
    if ti is None:
        return False
    try:
        return bool(GOES_ON & await states(ti.dag_id, ti.run_id, ti.task_id, ti.map_index))
    except Exception as error:
        log.warning("Airflow does not say whether the task was ended (%s).", type(error).__name__)
        return False
