"""What the sensors have in common: how they look, and what does not end them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.hooks.connections import connections
from airflow_bottledwater.operators.base import failing
from airflow_bottledwater.triggers.stored import stored_again
from airflow_bottledwater.triggers.watching import LACKING, PASSING, UNSEEN

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.triggers.base import BaseTrigger

#: key in the task's state: when what the triggerer lacks was found here, and in which try
_FOUND = "bottledwater_found_here"


class LookingSensor(BaseSensorOperator):
    """A sensor whose first look tells whether it is set up well. From then on, a server that is away, or that refuses a
    password which is being changed, says nothing about what the sensor waits for."""

    deferrable: bool
    _looked = False

    def execute(self, context: Context) -> Any:
        """Look until what the sensor waits for has happened; if deferrable, once here and then in the triggerer.

        :raises AirflowSkipException: with ``soft_fail`` or ``never_fail``, instead of what fails the sensor.
        """
        if not self.deferrable:
            return super().execute(context)
        try:
            self.begin(context)
        except AirflowSkipException:
            raise
        except Exception as error:
            # as Airflow's own loop has it (airflow/sdk/bases/sensor.py)
            if self.never_fail or (self.soft_fail and isinstance(error, AirflowFailException)):
                raise AirflowSkipException(f"Skipped, since the sensor shall not fail: {error}") from error
            raise
        return None

    def begin(self, context: Context) -> None:
        """Look once; then wait in the triggerer, unless that was enough."""
        if not self.poke(context):
            self.defer(
                trigger=self.trigger(context),
                method_name="execute_complete",
                timeout=timedelta(seconds=float(self.timeout)),
            )

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """If the trigger cannot look, since its triggerer lacks what is found here, the sensor fails: nothing is
        watched."""
        event = (next_kwargs or {}).get("event") or {}
        if event.get("status") == UNSEEN:
            if not self._only_there(event, context):
                # that a task is resumed leaves its start as it was
                passed = datetime.now(UTC) - context["ti"].start_date  # type: ignore[operator]
                self.defer(
                    trigger=stored_again(*event["trigger"]),
                    method_name=next_method,
                    timeout=max(timedelta(seconds=1), timedelta(seconds=float(self.timeout)) - passed),
                )
            next_kwargs = {"event": {"status": "failed", "message": event["message"]}}
        return super().resume_execution(next_method, next_kwargs, context)

    def _only_there(self, event: dict[str, Any], context: Context) -> bool:
        """Whether only the triggerer lacks something, for two of its waits in turn. In an outage, such as that of a
        secrets backend, it is not found here, either, or the outage has ended since the trigger looked."""
        store: Any = context["task_state_store"]
        try:
            connections(event["lacking"])
        except Outage as error:
            self.log.warning("%s Nor is it found here: %s", event["message"], error)
            store.delete(_FOUND)
            return False
        attempt, now, before = context["ti"].try_number, time.time(), store.get(_FOUND)
        store.set(_FOUND, {"try": attempt, "at": now})
        # an older one is that of another outage: since then, the trigger could look
        longest = event["seconds"] + float(self.poke_interval) + 2 * LACKING
        if before is not None and before["try"] == attempt and now - before["at"] <= longest:
            return True
        self.log.warning("%s It is found here; the triggerer looks for it once more.", event["message"])
        return False

    def trigger(self, context: Context) -> BaseTrigger:
        """What looks in the triggerer."""
        raise NotImplementedError

    def look(self, context: Context) -> bool:
        """Look once; returns whether what the sensor waits for has happened."""
        raise NotImplementedError

    def poke(self, context: Context) -> bool:
        """Look once, see :meth:`look`.

        :raises AirflowFailException: the sensor's own verdict; or the first look fails for good.
        :raises Outage: at the first look, a server does not answer.
        """
        # in mode "reschedule", each look is a process of its own
        first = not self._looked and not context.get("task_reschedule_count")
        self._looked = True
        with failing():
            try:
                return self.look(context)
            except PASSING as error:
                if first:
                    raise
                self.log.warning("The check failed and is tried again: %s", error)
        return False
