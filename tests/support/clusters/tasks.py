"""Operators run as Airflow would run them, without Airflow: a task's state is kept here, and its trigger runs in a
thread."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from airflow.sdk.exceptions import TaskDeferred

from tests.support.lives import made_at, run_of


class Store:
    """A task's state, which survives its tries."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        if value is None:
            raise ValueError("Cannot set value as None")  # as Airflow does
        self.values[key] = value

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class Task:
    """One task of a run: it is executed, deferred and resumed as often as it wants.

    :param make: makes the operator, anew for each process that Airflow would use.
    """

    def __init__(self, make: Any, run_id: str = "run") -> None:
        self._make, self.store = make, Store()
        self._ti = SimpleNamespace(
            id=made_at(time.time()),
            try_number=1,
            max_tries=0,
            dag_id="dag",
            run_id=run_id,
            task_id=make().task_id,
            map_index=-1,
        )
        self._run_of = run_of(at=time.time())
        self._threads = ThreadPoolExecutor(8)
        self.trigger: Any = None
        self._last: Any = None

    @property
    def context(self) -> Any:
        return {"task_state_store": self.store, "ti": self._ti, "dag_run": self._run_of}

    @property
    def identity(self) -> Any:
        """The job that it has submitted last."""
        # between two of them there is none
        self._last = self.store.values.get("bottledwater_job", self._last)
        return self._last

    def start(self) -> Future[Any]:
        """Begin; the future has the task's result or its error, however often it is deferred in between."""
        return self._threads.submit(self._run)

    def _run(self) -> Any:
        act = self._make().execute
        arguments: dict[str, Any] = {}
        while True:
            try:
                return act(self.context, **arguments)
            except TaskDeferred as deferred:
                self.trigger = deferred.trigger
                event = asyncio.run(self._event(deferred.trigger))
                act, arguments = getattr(self._make(), deferred.method_name), {"event": event}

    @staticmethod
    async def _event(trigger: Any) -> Any:
        async for event in trigger.run():
            return event.payload
        raise AssertionError("the trigger ended without an event")
