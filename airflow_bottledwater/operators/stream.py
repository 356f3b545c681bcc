"""The operator of the stream: its job is submitted once, and watched by a trigger for as long as it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub (__init__.pyi) lacks it

from airflow_bottledwater import restarts as policy
from airflow_bottledwater.errors import BottledWaterError, JobFailed, Outage
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.spark_job import Identity
from airflow_bottledwater.operators.base import failing, number
from airflow_bottledwater.operators.snapshot import BottledWaterSparkOperator
from airflow_bottledwater.spark.run_directory import Outcome
from airflow_bottledwater.triggers.stream import PauseTrigger, StreamTrigger, stop_job

if TYPE_CHECKING:
    from airflow.sdk import Context

_JOB, _RESTARTS = "bottledwater_job", "bottledwater_restarts"


class StreamToKafkaOperator(BottledWaterSparkOperator):
    """Publish every committed change, in order, exactly once; deferred while the stream runs.

    The job goes on whether or not Airflow is up: a retry or a restarted triggerer attaches to it. The job is stopped when the task is
    marked or cleared, by its timeout and by the teardown; the slot is kept.

    The task always defers, whatever ``[operators] default_deferrable`` is: a stream has no end, and must not occupy a worker slot.

    :param slot: name of the replication slot; it names the pipeline. (templated)
    :param tables: ``[schema.]table`` patterns, a list or comma-separated; empty means all. (templated)
    :param schemas: patterns of schemas whose tables are taken. (templated)
    :param topic_prefix: put before every topic's name. (templated)
    :param output_format: ``avro`` or ``json``. (templated)
    :param on_error: ``exit`` or ``log``: what is done about a record that cannot be published. (templated)
    :param allow_unkeyed: publish tables without a usable key. (templated)
    :param skip_snapshot: start with the changes from now on. (templated)
    :param postgres_conn_id: connection of type Postgres: the source. (templated)
    :param kafka_conn_id: connection of type Apache Kafka. (templated)
    :param schema_registry_conn_id: connection of type Schema Registry; unused with JSON. (templated)
    :param settings: any other setting (docs/settings.md). (templated)
    :param conn_id: connection of type Spark; one that does not exist is an error. (templated)
    :param deploy_mode: ``client``; None: the connection's.
    :param name: the job's name in Spark; None: ``bottledwater-stream``. (templated)
    :param bounded: end when everything is published that is committed now, instead of running until stopped. (templated)
    :param timeout: seconds after which the job is stopped and the task fails; None: never. ``execution_timeout`` is not
        enforced by Airflow while a task is deferred. (templated)
    :param poll_interval: seconds between two checks of the job.
    :param restarts: how often a job that failed for a transient reason is submitted again without using up a try. (templated)

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name = "stream"
    template_fields: Sequence[str] = (*BottledWaterSparkOperator.template_fields, "bounded", "timeout", "restarts")
    ui_color = "#cce5ff"

    def __init__(
        self,
        *,
        slot: str = "bottledwater",
        tables: Sequence[str] | str | None = None,
        schemas: Sequence[str] | str | None = None,
        topic_prefix: str | None = None,
        output_format: str = "avro",
        on_error: str = "exit",
        allow_unkeyed: bool | str = False,
        skip_snapshot: bool | str = False,
        postgres_conn_id: str = "postgres_default",
        kafka_conn_id: str = "kafka_default",
        schema_registry_conn_id: str | None = "schema_registry_default",
        settings: Mapping[str, Any] | None = None,
        conn_id: str = "spark_default",
        deploy_mode: str | None = None,
        name: str | None = None,
        bounded: bool | str = False,
        timeout: float | str | None = None,
        poll_interval: float = 5.0,
        restarts: int | str = policy.RESTARTS,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            slot=slot,
            tables=tables,
            schemas=schemas,
            topic_prefix=topic_prefix,
            output_format=output_format,
            on_error=on_error,
            allow_unkeyed=allow_unkeyed,
            skip_snapshot=skip_snapshot,
            postgres_conn_id=postgres_conn_id,
            kafka_conn_id=kafka_conn_id,
            schema_registry_conn_id=schema_registry_conn_id,
            settings=settings,
            conn_id=conn_id,
            deploy_mode=deploy_mode,
            name=name,
            **kwargs,
        )
        self.bounded = bounded
        self.timeout = timeout
        self.poll_interval = poll_interval
        self.restarts = restarts

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit the job, or attach to the one of an earlier try, and defer."""
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            self._limits()
            spark_job.refuse_stream(self.conn_id, mode=self.deploy_mode, executor=self.executor)
            store: Any = context["task_state_store"]
            known = self._earlier(store.get(_JOB), context, lambda identity: stop_job(pipeline, identity))
            if known and spark_job.running(known):
                self.log.info("The job still runs; attaching to it.")
                self._identity = known
            elif known and (outcome := spark_job.outcome(known)).ok and not outcome.stopped:
                spark_job.forget(known)
                return self._finish(outcome)
            else:
                if known:
                    spark_job.forget(known)
                store.set(_RESTARTS, asdict(policy.Restarts(at=time.time())), retention=NEVER_EXPIRE)
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

    def _limits(self) -> tuple[float | None, int]:
        """``timeout`` and ``restarts`` as numbers, after templating.

        :raises SettingError: one is not a number.
        """
        return number("timeout", self.timeout), int(number("restarts", self.restarts) or 0)

    def _watch(self, identity: Identity) -> NoReturn:
        timeout, _ = self._limits()
        self.defer(
            trigger=StreamTrigger(
                identity=identity,
                poll_interval=self.poll_interval,
                deadline=time.time() + timeout if timeout else None,
                **self.trigger_arguments(),
            ),
            method_name="execute_complete",
            # longer than the deadline, which the trigger itself keeps: when this timeout expires, the job is not stopped
            timeout=timedelta(seconds=timeout + 10 * self.poll_interval + 120) if timeout else None,
        )
        raise AssertionError("defer does not return")

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """Handle the trigger's event: the job has ended, or its timeout has expired.

        :raises JobFailed: the job failed for a transient reason after all restarts were used up, or the event is not known.
        :raises AirflowFailException: the job failed for good.
        :raises Outage: the timeout has expired; the job was stopped.
        """
        if event is None or event.get("status") not in ("ended", "timeout"):
            raise JobFailed(f"The trigger sent an event that is not known: {event!r}.")
        identity: Identity = event["identity"]
        self._identity = identity
        if event["status"] == "timeout":
            with failing():
                stop_job(self.pipeline_hook.pipeline(), identity)
            spark_job.forget(identity)
            raise Outage(
                f"The stream ran longer than its timeout of {self._limits()[0] or 0:g} s and was stopped.",
                "The slot is kept.",
            )
        outcome = spark_job.outcome(identity)
        if outcome.ok and outcome.stopped and spark_job.stop_asked(identity):
            # stopped by a triggerer whose trigger was given to another one, since Airflow reports this to it as the end of the task
            outcome = Outcome(
                ok=False, error="It was stopped on its host, but its task still waits for it.", transient=True
            )
        if outcome.ok or not outcome.transient:
            self.log.info("The job's log ends with:\n%s", event.get("log", ""))
            spark_job.forget(identity)
            return self._finish(outcome)
        return self._again(context, identity, outcome)

    def _again(self, context: Context, identity: Identity, outcome: Outcome) -> dict[str, Any]:
        """Defer until a job that failed for a transient reason is to be submitted again, without using up a try; fail if there were
        too many restarts."""
        store: Any = context["task_state_store"]
        now = time.time()
        last = policy.Restarts(**{"at": now, **(store.get(_RESTARTS) or {})})
        again = last.after(outcome.kind, reached=self._reached(), now=now)
        _, restarts = self._limits()
        spark_job.forget(identity)
        if again.count > restarts:
            return self._finish(outcome)
        self.log.warning(
            "The job died: %s\nIt is submitted again in %.0f s (%d of %d).",
            outcome.error,
            again.pause,
            again.count,
            restarts,
        )
        store.set(_RESTARTS, asdict(again), retention=NEVER_EXPIRE)
        self.defer(trigger=PauseTrigger(until=again.at), method_name="submit_again")
        raise AssertionError("defer does not return")

    def submit_again(self, context: Context, event: dict[str, Any] | None = None) -> NoReturn:
        """Submit the job again, after the backoff."""
        if event is None or event.get("status") != "over":
            raise JobFailed(f"The trigger sent an event that is not known: {event!r}.")
        with failing():
            self._identity = self._start(context)
        self._watch(self._identity)

    def _reached(self) -> int | None:
        """The LSN up to which the slot is confirmed; None if it, or the connection, cannot be looked up."""
        try:
            pipeline = self.pipeline_hook.pipeline()
        except BottledWaterError as error:
            self.log.info("The slot's position is not known: %s", error)
            return None
        return policy.reached(pipeline)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """If the trigger itself failed, the job may still run. A retry attaches to it; if there are no retries left, it is stopped."""
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
