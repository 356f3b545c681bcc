"""What Airflow says of tasks, asked from within the triggerer."""

from __future__ import annotations

import asyncio

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from asgiref.sync import sync_to_async

#: seconds for Airflow's answer
_ASK_SECONDS = 3.0


async def states(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
    """The states of a task in a run: one, or none if Airflow has no such task or it was cleared.

    :raises Exception: Airflow does not answer; its errors are of many classes.
    """
    async with asyncio.timeout(_ASK_SECONDS):
        found = await sync_to_async(RuntimeTaskInstance.get_task_states)(
            dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
        )
    return {str(getattr(state, "value", state)) for state in found.get(run_id, {}).values()}
