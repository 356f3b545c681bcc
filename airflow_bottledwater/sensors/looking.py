"""What the sensors have in common: how they look, and what does not end them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.hooks.connections import connections
from airflow_bottledwater.operators.base import failing
from airflow_bottledwater.triggers.stored import stored_again
from airflow_bottledwater.triggers.watching import PASSING, UNSEEN

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.triggers.base import BaseTrigger


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
        """If the trigger cannot look, since its triggerer lacks something, the sensor fails: nothing is watched. Unless
        a connection is not found here, either: as in an outage of a secrets backend, which passes."""
        event = (next_kwargs or {}).get("event") or {}
        if event.get("status") == UNSEEN:
            try:
                connections(event["lacking"])
            except Outage as error:
                self.log.warning("%s Nor is it found here: %s", event["message"], error)
                self.defer(
                    trigger=stored_again(*event["trigger"]),
                    method_name=next_method,
                    timeout=timedelta(seconds=float(self.timeout)),
                )
            next_kwargs = {"event": {"status": "failed", "message": event["message"]}}
        return super().resume_execution(next_method, next_kwargs, context)

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
