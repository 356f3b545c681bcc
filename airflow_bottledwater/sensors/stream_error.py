"""Wait for the end of a stream, and fail with its error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PipelineMixin, failing, take_pipeline_arguments
from airflow_bottledwater.triggers.stream_error import StreamErrorTrigger, look

if TYPE_CHECKING:
    from airflow.sdk import Context


#: a stream has no end: Airflow's default of a week would fail the sensor of a healthy one
_NEVER = timedelta(days=3650).total_seconds()


class StreamErrorSensor(PipelineMixin, BaseSensorOperator):
    """Fails as soon as the stream reports an error or writes too many dead letters; succeeds when it ends in order.

    Beside a stream task it makes the error a task of its own, with its own callbacks; in another DAG it watches a stream that runs
    elsewhere, for example from the command line.

    :param max_dead_letters: more than this many dead letters since the slot was made are an error; None: any number is fine.
    :param poke_interval: seconds between two looks.
    :param timeout: seconds after which the sensor fails; by default ten years.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin`, too.
    """

    template_fields: Sequence[str] = PIPELINE_FIELDS
    ui_color = "#e2e3e5"

    def __init__(
        self,
        *,
        max_dead_letters: int | None = None,
        poke_interval: float = 10.0,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        kwargs.setdefault("timeout", _NEVER)
        super().__init__(poke_interval=poke_interval, **kwargs)
        self._set_pipeline(**pipeline)
        self.max_dead_letters = max_dead_letters
        self.deferrable = deferrable
        self._since = 0.0

    def execute(self, context: Context) -> Any:
        """Look once, then defer."""
        ti: Any = context["ti"]
        self._since = ti.start_date.timestamp() if ti.start_date else time.time()
        if not self.deferrable:
            return super().execute(context)
        if self.poke(context):
            return None
        with failing():
            cluster = asdict(self._cluster())
        self.defer(
            trigger=StreamErrorTrigger(
                cluster=cluster,
                since=self._since,
                max_dead_letters=self.max_dead_letters,
                poll_interval=self.poke_interval,
                **self.trigger_arguments(),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=float(self.timeout)),
        )

    def _cluster(self) -> Any:
        from airflow_bottledwater.postgres.connect import identify, session

        with session(self.pipeline_hook.pipeline().postgres, "Identifying the source") as connection:
            return identify(connection)

    def poke(self, context: Context) -> bool:
        """One look."""
        with failing():
            event = look(
                self.pipeline_hook.pipeline(),
                self._cluster(),
                since=self._since,
                max_dead_letters=self.max_dead_letters,
            )
        return self._conclude(event)

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> None:
        """The trigger's verdict."""
        self._conclude(event)

    def _conclude(self, event: dict[str, Any] | None) -> bool:
        if event is None:
            return False
        if event["status"] == "failed":
            raise AirflowFailException(f"The stream failed at {event.get('position', '?')}: {event['message']}")
        self.log.info("The stream ended in order at %s: %s", event["position"], event["counters"])
        return True
