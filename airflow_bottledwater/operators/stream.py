"""The stream of changes: submitted once, watched by a trigger, for as long as it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from airflow_bottledwater.errors import JobFailed, Outage, Refused
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
#: a job that ran this long starts the count of restarts anew
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
            if not self._client_mode:
                raise Refused(
                    "The stream in deploy-mode cluster is not supported yet.",
                    "Use a Spark connection with deploy-mode client and LocalExecutor, or run the 'bottledwater' command as a service.",
                )
            spark_job.refuse_foreign_hosts("The stream", self.executor)
            store: Any = context["task_state_store"]
            known = store.get(_JOB)
            if known and self._is_fresh(context):
                # cleared: whatever an earlier life of the task left must be gone before a new job starts
                self.log.info("The job of the task's earlier life is stopped first.")
                stop_job(pipeline, known)
                spark_job.forget(known)
                known = None
            if known and spark_job.running(known):
                self.log.info("The job still runs; attaching to it.")
                self._identity = known
            elif known and (result := spark_job.outcome(known))["ok"] and not result.get("stopped"):
                return self._finish(result)
            else:
                store.set(_RESTARTS, {"count": 0, "at": time.time()}, retention=NEVER_EXPIRE)
                self._identity = self._start(store)
        self._watch(self._identity)

    def _is_fresh(self, context: Context) -> bool:
        """The first try of the task's life: clearing sets max_tries to try_number + retries."""
        ti: Any = context["ti"]
        return bool(ti.try_number == ti.max_tries - self.retries + 1)

    def _start(self, store: Any) -> Identity:
        return self._submit(
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
            raise Outage(
                f"The stream ran longer than its timeout of {self.timeout:.0f} s and was stopped.", "The slot is kept."
            )
        result = spark_job.outcome(identity)
        if result["ok"] or not result.get("transient"):
            self.log.info("The job's log ends with:\n%s", event.get("log", ""))
            spark_job.forget(identity)
            return self._finish(result)
        return self._again(context, identity, result)

    def _again(self, context: Context, identity: Identity, result: dict[str, Any]) -> dict[str, Any]:
        """Submit a job that died of a transient cause again, without using up a try."""
        store: Any = context["task_state_store"]
        count = store.get(_RESTARTS) or {"count": 0, "at": time.time()}
        number = 0 if time.time() - count["at"] > _STABLE else count["count"]
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
        spark_job.forget(identity)
        store.set(_RESTARTS, {"count": number + 1, "at": time.time()}, retention=NEVER_EXPIRE)
        with failing():
            self._identity = self._start(store)
        self._watch(self._identity)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """If the trigger itself failed, the job may still run: the retry attaches to it; a last try stops it."""
        if next_method == "__fail__":
            store: Any = context["task_state_store"]
            known = store.get(_JOB)
            ti: Any = context["ti"]
            if known and ti.try_number > ti.max_tries:
                stop_job(self.pipeline_hook.pipeline(), known)
        return super().resume_execution(next_method, next_kwargs, context)


def _true(value: bool | str) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1", "yes", "y", "on")
