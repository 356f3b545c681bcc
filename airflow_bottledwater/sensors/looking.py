"""What the sensors have in common: how they look, and what does not end them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseSensorOperator

from airflow_bottledwater.errors import CredentialsRefused, Outage
from airflow_bottledwater.operators.base import failing

if TYPE_CHECKING:
    from airflow.sdk import Context


class LookingSensor(BaseSensorOperator):
    """A sensor whose first look tells whether it is set up well. From then on, a server that is away, or that refuses a
    password which is being changed, says nothing about what the sensor waits for."""

    _looked = False

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
            except (Outage, CredentialsRefused) as error:
                if first:
                    raise
                self.log.warning("The check failed and is tried again: %s", error)
        return False
