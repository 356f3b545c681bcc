"""Wait for the end of a stream, and fail with its error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PipelineMixin,
    failing,
    known_event,
    take_pipeline_arguments,
)
from airflow_bottledwater.triggers.stream_error import StreamErrorTrigger, ended, judge, limit, read

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.model.slot import Cluster
    from airflow_bottledwater.settings import Pipeline


#: a stream has no end: Airflow's default of a week would fail the sensor of a healthy one
_NEVER = timedelta(days=3650).total_seconds()


#: key of the task's state with what is known of the stream, for a sensor that is not deferred and starts anew at each look
_SEEN = "bottledwater_seen"


class StreamErrorSensor(PipelineMixin, BaseSensorOperator):
    """Fails as soon as the stream reports an error, writes too many dead letters or reports nothing any more; succeeds when it ends
    in order.

    Beside a stream task it makes the error a task of its own, with its own callbacks; in another DAG it watches a stream that runs
    elsewhere, for example from the command line. The end of a job that was known before the sensor began counts only if no other
    job reports within ``max_silence``.

    :param max_dead_letters: more than this many dead letters since the slot was made are an error; None: any number is fine.
    :param max_silence: seconds without any report, by the watching host's own clock, after which the stream counts as dead, or as
        never started; in any case at least ten times ``heartbeat_interval`` and twice ``outage_timeout``.
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
        max_silence: float = 600.0,
        poke_interval: float = 10.0,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        kwargs.setdefault("timeout", _NEVER)
        super().__init__(poke_interval=poke_interval, **kwargs)
        self._set_pipeline(**pipeline)
        self.max_dead_letters = max_dead_letters
        self.max_silence = max_silence
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        """Look once, then defer."""
        if not self.deferrable:
            return super().execute(context)
        with failing():
            pipeline, cluster = self.pipeline_hook.pipeline(), self._cluster()
            status, _ = read(pipeline, cluster)
            event = self._judge(pipeline, status, earlier=ended(status), silent=0.0)
        if event is not None:
            self._conclude(event)
            return None
        self.defer(
            trigger=StreamErrorTrigger(
                cluster=asdict(cluster),
                earlier=ended(status),
                max_silence=self.max_silence,
                max_dead_letters=self.max_dead_letters,
                poll_interval=self.poke_interval,
                **self.trigger_arguments(),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=float(self.timeout)),
        )

    def _cluster(self) -> Cluster:
        from airflow_bottledwater.postgres.connect import identify, session

        with session(self.pipeline_hook.pipeline().postgres, "Identifying the source") as connection:
            return identify(connection)

    def poke(self, context: Context) -> bool:
        """One look, without a trigger. What was seen is the task's state, since in mode ``reschedule`` each look is a process."""
        store: Any = context["task_state_store"]
        ti: Any = context["ti"]
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            status, _ = read(pipeline, self._cluster(), now=True)
            record = [status["job"]["id"], status["state"], status["at"]] if status else None
            seen = store.get(_SEEN)
            if not seen or seen["try"] != ti.try_number:
                seen = {"try": ti.try_number, "earlier": ended(status), "record": record, "since": time.time()}
                store.set(_SEEN, seen)
            elif seen["record"] != record:
                seen = {**seen, "record": record, "since": time.time()}
                store.set(_SEEN, seen)
            event = self._judge(pipeline, status, earlier=seen["earlier"], silent=time.time() - seen["since"])
        return event is not None and self._conclude(event)

    def _judge(
        self, pipeline: Pipeline, status: dict[str, Any] | None, *, earlier: str, silent: float
    ) -> dict[str, Any] | None:
        return judge(
            status,
            silent=silent,
            most=limit(pipeline, self.max_silence),
            earlier=earlier,
            max_dead_letters=self.max_dead_letters,
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> None:
        """The trigger's verdict."""
        self._conclude(known_event(event))

    def _conclude(self, event: dict[str, Any]) -> bool:
        if event["status"] == "failed":
            where = f" at {event['position']}" if event.get("position") else ""
            raise AirflowFailException(f"The stream failed{where}: {event['message']}")
        self.log.info("The stream ended in order at %s: %s", event["position"], event["counters"])
        return True
