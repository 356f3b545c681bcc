"""The sensor that waits for the end of a stream, and fails with its error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    failing,
    known_event,
    number,
)
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.sensors.looking import LookingSensor
from airflow_bottledwater.triggers.stream_error import (
    StreamErrorTrigger,
    ended,
    evaluate,
    identity,
    limit,
    owner_of,
    read,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.model.slot import Cluster
    from airflow_bottledwater.pipeline.settings import Settings
    from airflow_bottledwater.state.control_records import StatusRecord


#: since a stream has no end, Airflow's default timeout of a week would fail the sensor of a healthy one
_NEVER = timedelta(days=3650).total_seconds()

#: the key in the task's state for what was seen of the stream: in mode ``reschedule``, the sensor starts anew at each
#: poke
_SEEN = "bottledwater_seen"
#: seconds between two pokes, at least three times their interval, above which Airflow was away
_AWAY = 60.0


class StreamErrorSensor(PipelineMixin, LookingSensor):
    """Fails as soon as the stream reports an error, too many dead letters are open, or it does not report any more;
    succeeds when the stream ends in order.

    Beside a stream task, it reports the stream's error as a task of its own, with its own callbacks. In another DAG, it
    watches a stream that runs elsewhere, for example from the command line. If a job had already ended when the sensor
    began, its end counts only if no other job reports within ``max_silence``.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param max_dead_letters: more than this many dead letters of stream and snapshots that nobody has re-driven or
        dismissed are an error; None: any number is allowed. (templated)
    :param max_silence: seconds without any report, by the watching host's own clock, after which the stream counts as
        dead, or as never started; in any case at least ten times ``heartbeat_interval`` and twice ``outage_timeout``.
        (templated)
    :param poke_interval: seconds between two checks.
    :param timeout: seconds after which the sensor fails; by default ten years, since a stream has no end.
    :param deferrable: wait in the triggerer instead of a worker slot; by default ``[operators] default_deferrable``.
        Beside a stream that runs for long, set it.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "max_dead_letters", "max_silence")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#e2e3e5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        max_dead_letters: int | str | None = 0,
        max_silence: float | str = 600.0,
        poke_interval: float = 10.0,
        timeout: float = _NEVER,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, timeout=timeout, **kwargs)
        self._set_pipeline(pipeline)
        self.max_dead_letters = max_dead_letters
        self.max_silence = max_silence
        self.deferrable = deferrable

    def begin(self, context: Context) -> None:
        """Look once; then wait in the triggerer, unless that was the verdict."""
        with failing():
            pipeline, cluster = self.pipeline_hook.pipeline(), self._cluster()
            status, _ = read(pipeline, cluster)
            event = self._evaluate(pipeline, status, earlier=ended(status), silent=0.0)
        if event is not None:
            self._conclude(event)
            return
        self.defer(
            trigger=StreamErrorTrigger(
                cluster=asdict(cluster),
                earlier=ended(status),
                max_silence=self._limits()[0],
                max_dead_letters=self._limits()[1],
                poll_interval=self.poke_interval,
                hook=self.pipeline_hook.arguments(),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=float(self.timeout)),
        )

    def _cluster(self) -> Cluster:
        from airflow_bottledwater.postgres.connect import session
        from airflow_bottledwater.postgres.server import identify

        with session(self.pipeline_hook.pipeline().postgres, "Identifying the source") as connection:
            return identify(connection)

    def look(self, context: Context) -> bool:
        """Check the stream once; returns whether it has finished. What was seen is kept in the task's state,
        since in mode ``reschedule`` each poke is a new process.

        :raises AirflowFailException: the stream failed, is silent, or has written too many dead letters.
        """
        store: Any = context["task_state_store"]
        ti: Any = context["ti"]
        pipeline, seen, now = self.pipeline_hook.pipeline(), store.get(_SEEN), time.time()
        # while Airflow is away, it submits no job either: that time is not the stream's silence
        away = max(0.0, now - seen.get("looked", now) - max(3 * self.poke_interval, _AWAY)) if seen else 0.0
        try:
            status, _ = read(pipeline, self._cluster(), now=True)
        except BottledWaterError:
            if seen:
                # the silence is Kafka's, or the source's
                store.set(_SEEN, {**seen, "since": now, "looked": now})
            raise
        record = [status.job.id, status.state, status.at] if status else None
        if not seen or seen["try"] != ti.try_number:
            seen = {"try": ti.try_number, "earlier": ended(status), "record": record, "since": now}
        else:
            since = seen["since"] + away if seen["record"] == record else now
            seen = {**seen, "record": record, "since": since}
        store.set(_SEEN, {**seen, "looked": now})
        event = self._evaluate(pipeline, status, earlier=seen["earlier"], silent=now - seen["since"])
        owner = None if event is None else owner_of(event)
        if owner is not None and tasks.owners_fate(owner).may_continue:
            return False  # a retry, say, submits another job
        return event is not None and self._conclude(event)

    def _evaluate(
        self, pipeline: Settings, status: StatusRecord | None, *, earlier: str, silent: float
    ) -> dict[str, Any] | None:
        max_silence, max_dead_letters = self._limits()
        return evaluate(
            status,
            silent=silent,
            longest=limit(pipeline, max_silence),
            earlier=earlier,
            max_dead_letters=max_dead_letters,
        )

    def _limits(self) -> tuple[float, int | None]:
        """``max_silence`` and ``max_dead_letters`` as numbers, after templating.

        :raises SettingError: one is not a number.
        """
        letters = number("max_dead_letters", self.max_dead_letters)
        return number("max_silence", self.max_silence) or 0.0, None if letters is None else int(letters)

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> None:
        """Succeed or fail by the trigger's event; if it is old news, since another status was reported meanwhile, wait
        on.

        The event may be days old, if the DAG was paused.
        """
        event = known_event(event, "ok", "failed")
        if "seen" in event:
            with failing():
                status, _ = read(self.pipeline_hook.pipeline(), self._cluster(), now=True)
            if status is not None and not status.ended and event["seen"] != identity(status):
                self.log.info("That was seen: %s But a job runs by now.", event.get("message", "the stream's end."))
                self.begin(context)
                return
        self._conclude(event)

    def _conclude(self, event: dict[str, Any]) -> bool:
        if event["status"] == "failed":
            if "position" not in event:  # it is not the stream's failure, but that of who watches it
                raise AirflowFailException(event["message"])
            where = f" at {event['position']}" if event["position"] else ""
            raise AirflowFailException(f"The stream failed{where}: {event['message']}")
        self.log.info("The stream finished at %s: %s", event["position"], event["counters"])
        return True
