"""The stream of changes: submitted once, watched by a trigger, for as long as it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from airflow_bottledwater.errors import BottledWaterError, Interrupted, JobFailed, Outage
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.spark_job import Identity
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, failing
from airflow_bottledwater.operators.snapshot import BottledWaterSparkOperator
from airflow_bottledwater.triggers.stream import StreamTrigger, stop_job

if TYPE_CHECKING:
    from airflow.sdk import Context

_JOB, _RESTARTS = "bottledwater_job", "bottledwater_restarts"
#: seconds of back-off before a job that died of a transient cause is submitted again, doubling
_BACKOFF, _MOST_BACKOFF = 2.0, 300.0
#: a job that ran this long, and worked, starts the count of restarts anew
_STABLE = 600.0


class StreamToKafkaOperator(BottledWaterSparkOperator):
    """Publish every committed change, in order, exactly once; deferred while the stream runs.

    The job goes on whether or not Airflow is up: a retry or a restarted triggerer attaches to it. Marking the task, clearing it,
    its timeout or a teardown stop the job; the slot is kept.

    :param bounded: end when everything is published that is committed now, instead of running until stopped. (templated)
    :param timeout: seconds after which the job is stopped and the task fails; None: never. ``execution_timeout`` is not
        enforced by Airflow while a task is deferred.
    :param poll_interval: seconds between two looks at the job.
    :param restarts: how often a job that died of a transient cause is submitted again without using up a try.
    :param conn_id: connection of type Spark; one that does not exist is an error.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin` and of ``SparkSubmitOperator``, too.
    """

    job_name = "stream"
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, *PIPELINE_FIELDS, "bounded")
    ui_color = "#cce5ff"

    def __init__(
        self,
        *,
        bounded: bool | str = False,
        timeout: float | None = None,
        poll_interval: float = 5.0,
        restarts: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.bounded = bounded
        self.timeout = timeout
        self.poll_interval = poll_interval
        self.restarts = restarts

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit the job, or attach to the one of an earlier try, and defer."""
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            spark_job.refuse_stream(self._conn_id, mode=self._deploy_mode, executor=self.executor)
            store: Any = context["task_state_store"]
            known = self._earlier(store.get(_JOB), context, lambda identity: stop_job(pipeline, identity))
            if known and spark_job.running(known):
                self.log.info("The job still runs; attaching to it.")
                self._identity = known
            elif known and (result := spark_job.outcome(known))["ok"] and not result.get("stopped"):
                spark_job.forget(known)
                return self._finish(result)
            else:
                if known:
                    spark_job.forget(known)
                store.set(_RESTARTS, {"count": 0, "at": time.time(), "position": None}, retention=NEVER_EXPIRE)
                self._identity = self._start(context)
        self._watch(self._identity)

    def _start(self, context: Context) -> Identity:
        store: Any = context["task_state_store"]
        return self._submit(
            context,
            self.pipeline_hook.pipeline(),
            lambda identity: store.set(_JOB, identity, retention=NEVER_EXPIRE),
            bounded=_true(self.bounded),
        )

    def _watch(self, identity: Identity) -> NoReturn:
        """Wait a little here (a trigger that fires at once can confuse the scheduler), then defer."""
        deadline = time.time() + self.timeout if self.timeout else None
        settled = time.monotonic() + 3.0
        while time.monotonic() < settled:
            if not spark_job.running(identity):
                break
            time.sleep(0.2)
        self.defer(
            trigger=StreamTrigger(
                identity=identity, poll_interval=self.poll_interval, deadline=deadline, **self.trigger_arguments()
            ),
            method_name="execute_complete",
            # a backstop: the trigger keeps the deadline itself, since nobody stops the job when this one expires
            timeout=timedelta(seconds=self.timeout + 10 * self.poll_interval + 120) if self.timeout else None,
        )
        raise AssertionError("defer does not return")

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """The job has ended, or its time is over."""
        if event is None or event.get("status") not in ("ended", "timeout"):
            raise JobFailed(f"The trigger sent an event that is not known: {event!r}.")
        identity: Identity = event["identity"]
        self._identity = identity
        if event["status"] == "timeout":
            with failing():
                stop_job(self.pipeline_hook.pipeline(), identity)
            spark_job.forget(identity)
            raise Outage(
                f"The stream ran longer than its timeout of {self.timeout:.0f} s and was stopped.", "The slot is kept."
            )
        result = spark_job.outcome(identity)
        if result["ok"] and result.get("stopped") and spark_job.stop_asked(identity):
            # by a triggerer whose trigger was given to another one: Airflow tells it that a user ended the task
            result = {
                "ok": False,
                "transient": True,
                "error": "It was stopped on its host, but its task still waits for it.",
            }
        if result["ok"] or not result.get("transient"):
            self.log.info("The job's log ends with:\n%s", event.get("log", ""))
            spark_job.forget(identity)
            return self._finish(result)
        return self._again(context, identity, result)

    def _again(self, context: Context, identity: Identity, result: dict[str, Any]) -> dict[str, Any]:
        """Submit a job that died of a transient cause again, without using up a try."""
        store: Any = context["task_state_store"]
        last = {"count": 0, "at": time.time(), "position": None, **(store.get(_RESTARTS) or {})}
        reached = self._reached()
        number = 0 if self._was_well(last, reached, result) else last["count"]
        spark_job.forget(identity)
        if number >= self.restarts:
            return self._finish(result)
        pause = min(_BACKOFF * 2**number, _MOST_BACKOFF)
        self.log.warning(
            "The job died: %s\nIt is submitted again in %.0f s (%d of %d).",
            result["error"],
            pause,
            number + 1,
            self.restarts,
        )
        time.sleep(pause)
        position = last["position"] if reached is None else reached
        store.set(_RESTARTS, {"count": number + 1, "at": time.time(), "position": position}, retention=NEVER_EXPIRE)
        with failing():
            self._identity = self._start(context)
        self._watch(self._identity)

    @staticmethod
    def _was_well(last: dict[str, Any], reached: int | None, result: dict[str, Any]) -> bool:
        """Whether the job that ended has worked, so that its end is not one more of the same trouble.

        Time alone does not tell: a job that waits for a server lives as long as its ``outage_timeout``.
        """
        if time.time() - last["at"] <= _STABLE:
            return False
        progress = reached is not None and last["position"] is not None and reached > last["position"]
        return progress or result.get("kind") == Interrupted.__name__

    def _reached(self) -> int | None:
        """How far the slot is confirmed: what is published; None if the source does not say."""
        from airflow_bottledwater.postgres import slot
        from airflow_bottledwater.postgres.connect import session

        try:
            pipeline = self.pipeline_hook.pipeline()
            with session(pipeline.postgres, "Reading the slot's position") as connection:
                found = slot.state(connection, pipeline.slot)
        except BottledWaterError as error:
            self.log.info("The slot's position is not known: %s", error)
            return None
        return None if found is None else found.confirmed

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """If the trigger itself failed, the job may still run: the retry attaches to it; a last try stops it."""
        if next_method == "__fail__":
            store: Any = context["task_state_store"]
            known = store.get(_JOB)
            ti: Any = context["ti"]
            if known and ti.try_number > ti.max_tries:
                stop_job(self.pipeline_hook.pipeline(), known)
                spark_job.forget(known)
        return super().resume_execution(next_method, next_kwargs, context)


def _true(value: bool | str) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1", "yes", "y", "on")
