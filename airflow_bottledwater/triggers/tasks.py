"""What Airflow says of tasks, asked from within the triggerer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from asgiref.sync import sync_to_async

log = logging.getLogger(__name__)

#: seconds for Airflow's answer: half of what a trigger has for its end (``[triggerer] on_kill_timeout``). On a busy host it takes several
_ASK_SECONDS = 15.0
#: the states of a task that is not over: Airflow has given its trigger to another triggerer, or it resumes the task or tries it again,
#: as after a time-out of the trigger. Its next process decides about what the task has begun: a retry goes on with it, the first try
#: after a clear ends it
_GOES_ON = frozenset({"deferred", "scheduled", "queued", "running", "restarting", "up_for_retry"})


async def states(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
    """The states of a task in a run: one, or none if Airflow has no such task or it was cleared.

    :raises Exception: Airflow does not answer; its errors are of many classes.
    """
    async with asyncio.timeout(_ASK_SECONDS):
        found = await sync_to_async(RuntimeTaskInstance.get_task_states)(
            dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
        )
    return {str(getattr(state, "value", state)) for state in found.get(run_id, {}).values()}


async def goes_on(ti: Any) -> bool:
    """Whether the task of a trigger that is cancelled goes on. Otherwise a user has ended it, or has cleared it and it is not scheduled
    yet; Airflow cancels a trigger in the same way in all these cases. If Airflow does not answer, the task is assumed to be ended.

    :param ti: the trigger's task instance; None if it has none.
    """
    if ti is None:
        return False
    try:
        return bool(_GOES_ON & await states(ti.dag_id, ti.run_id, ti.task_id, ti.map_index))
    except Exception as error:
        log.warning("Airflow does not say whether the task was ended (%s).", type(error).__name__)
        return False
