"""What the operators of snapshot and stream have in common: their job is submitted once, watched from anywhere, and
found again by a retry."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub (__init__.pyi) lacks it
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.sdk.observability import stats

from airflow_bottledwater.errors import BottledWaterError, JobFailed, Outage, PipelineStopped, Refused
from airflow_bottledwater.hooks import spark_job, spark_target
from airflow_bottledwater.hooks.instance import instance
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.hooks.spark_job import Given
from airflow_bottledwater.hooks.spark_submit import making
from airflow_bottledwater.hooks.spark_target import SparkTarget
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import leftovers, stop, supervise, watch
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.watch import Ended, JobWatch
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators import links
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    failing,
    is_first_try,
    is_last_try,
    known_event,
    note_life,
)
from airflow_bottledwater.operators.lineage import LineageMixin, parent_of_job
from airflow_bottledwater.operators.watching import BlockingWatch, here, wait_in_triggerer
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import REPORTED
from airflow_bottledwater.triggers.job import JobTrigger
from airflow_bottledwater.triggers.watching import LACKING

if TYPE_CHECKING:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.sdk import Context

#: the key in the task's state for the job's identity; and in this, if nothing is left to do, for how it has ended
JOB = "bottledwater_job"
_ENDED = "ended"
#: the key for whether a job was submitted since Airflow was last told all that the task's jobs have published
_UNTOLD = "bottledwater_untold"
#: the key for whose the task's last job is, see :func:`_whose`
_WHOSE = "bottledwater_whose"


def _whose(pipeline: Settings) -> list[str]:
    """Database and slot of a pipeline, which stay when its server moves or is upgraded. The first is empty if the
    connection does not name it."""
    from airflow_bottledwater.postgres import dsn

    return [dsn.parse(pipeline.postgres).get("dbname", ""), pipeline.slot]


class BottledWaterSparkOperator(LineageMixin, PipelineMixin, SparkSubmitOperator):
    """Runs a job through spark-submit: what the operators of snapshot and stream have in common.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param name: the job's name in Spark; None: ``bottledwater-snapshot`` or ``bottledwater-stream``. (templated)
    :param deferrable: whether the task is deferred while its job runs; None: in deploy-mode cluster only.
    :param poll_interval: seconds between two checks of the job.
    :param start_timeout: seconds in which the job has to report for the first time; on a cluster, it may wait in a
        queue.

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name: str
    operator_extra_links = links.of_job()
    #: whether a job in client mode ends with the task's process, unless the task is deferred
    ends_with_task: ClassVar[bool] = False
    application: str
    conf: dict[Any, Any] | None
    files: str | None
    template_fields: Sequence[str] = (
        *SparkSubmitOperator.template_fields,
        *PIPELINE_FIELDS,
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **SparkSubmitOperator.template_fields_renderers,
        **PIPELINE_RENDERERS,
        "conf": "json",
        "env_vars": "json",
    }

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        name: str | None = None,
        deferrable: bool | None = None,
        poll_interval: float = 5.0,
        start_timeout: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name or f"bottledwater-{self.job_name}", **kwargs)
        self._refuse_what_would_be_ignored()
        self._set_pipeline(pipeline)
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.start_timeout = start_timeout
        self._identity: Identity | None = None
        #: as it was when the task began: when it is ended, Airflow may not answer any more
        self._pipeline: Settings | None = None
        self._submitting: subprocess.Popen[str] | None = None
        #: whether Airflow has ended the task, which does not end its process by itself
        self._killed = False
        #: application, properties (also the pipeline's) and files as the user gave them, before a job adds its own
        self._given: Given | None = None

    def _refuse_what_would_be_ignored(self) -> None:
        """:raises Refused: an argument of ``SparkSubmitOperator`` was given that has no effect here."""
        # what was given, and what is the same as nothing
        ignored = {
            "conn_id": (self._conn_id, "spark_default"),
            "deploy_mode": (self._deploy_mode or None, None),
            "application_args": (self.application_args or None, None),
            # the provider has it since 6.1
            "post_submit_commands": (getattr(self, "post_submit_commands", None) or None, None),
        }
        if given := {name: nothing for name, (value, nothing) in ignored.items() if value != nothing}:
            instead = ", ".join(f"{name}={nothing!r}" for name, nothing in given.items())
            raise Refused(
                f"{type(self).__name__} does not take {' and '.join(given)}, nor from default_args.",
                "Where a pipeline's jobs run is a part of the pipeline: Pipeline(..., spark=Spark(conn_id, "
                "deploy_mode=...)). Their arguments are made of it. Where default_args name it for other operators, "
                f"give this one {instead} (in the task group: snapshot={{...}}, stream={{...}}).",
            )

    def _get_hook(self) -> SparkSubmitHook:
        """The provider's hook, with what the pipeline says of Spark."""
        spark = self.described().spark
        self._conn_id, self._deploy_mode = spark.conn_id, spark.deploy_mode or None
        with making(spark.conn_id):
            return super()._get_hook()

    def _place(self) -> SparkTarget:
        """Where the job is going to run.

        :raises Refused: it cannot run there.
        """
        spark = self.described().spark
        if self._given is None:
            # options of spark-submit, which come before properties
            cores = {"spark.executor.cores": self._executor_cores, "spark.cores.max": self._total_executor_cores}
            options = {name: str(number) for name, number in cores.items() if number}
            self._given = (self.application, {**spark.conf, **(self.conf or {}), **options}, self.files)
        place = spark_target.find(spark.conn_id, mode=spark.deploy_mode or None, properties=self._given[1])
        spark_target.check(
            place, detached=bool(self.deferrable), executor=self.executor, settings_file=spark.settings_file or None
        )
        return place

    def _submit(self, context: Any, pipeline: Settings, place: SparkTarget, *, bounded: bool = False) -> Identity:
        """Submit a job. Its identity is stored and announced before it starts, so that no job can run that nobody knows
        of.

        :raises SettingError: ``hash_key_file`` cannot be read.
        """
        pipeline, store, ti = pipeline.with_hash_key(), context["task_state_store"], context["ti"]
        identity, settings = spark_job.prepare(pipeline, self.job_name, place)
        try:
            assert self._given is not None, "the place is looked for first"
            self.application, self.conf, self.files, self.application_args = spark_job.describe(
                pipeline,
                self.job_name,
                place,
                identity,
                self._given,
                settings,
                self.described().spark.settings_file or None,
                bounded=bounded,
            )
            variables = parent_of_job(ti)
            self.conf |= {f"spark.executorEnv.{name}": value for name, value in variables.items()}
            hook = self._get_hook()
            self._identity = identity
            store.set(_UNTOLD, True, retention=NEVER_EXPIRE)
            store.set(_WHOSE, _whose(pipeline), retention=NEVER_EXPIRE)
            store.set(JOB, identity, retention=NEVER_EXPIRE)
            self._announce(ti, pipeline, identity, place.master)
            self._check_killed()
            if self.job_name in REPORTED:
                # whoever stops the pipeline finds the job from now on; who has done so before is found here
                self.refuse_stopped(context, pipeline)
            note_life(context)
            if not place.cluster:
                spark_job.start(
                    hook,
                    identity,
                    self.application,
                    variables=variables,
                    ends_with_parent=self.ends_with_task and not self.deferrable,
                )
                return identity
        except BaseException:
            watch.forget(pipeline, identity, asked=self._killed)
            shutil.rmtree(settings.parent, ignore_errors=True)
            raise
        try:
            spark_job.send(hook, self.application, self._sending, self._named)
        except BaseException:
            self._give_up(pipeline)
            raise
        finally:
            shutil.rmtree(settings.parent, ignore_errors=True)
        self.log.info("The cluster has accepted the job: %s", self._identity["application"] or "its name is not known")
        store.set(JOB, self._identity, retention=NEVER_EXPIRE)
        return self._identity

    def _announce(self, ti: Any, pipeline: Settings, identity: Identity, master: str) -> None:
        """Let others find the job, and whose it is, before it reports itself."""
        from airflow_bottledwater.jobs import submitted
        from airflow_bottledwater.model.job import Owner
        from airflow_bottledwater.provision import live

        by = (ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        owner = Owner(*by, identity["host"], identity["folder"], master, instance())
        name = ""  # the job itself reports it, if the source does not answer now
        with contextlib.suppress(BottledWaterError):
            name = live.name_of(pipeline)
        try:
            submitted.announce(pipeline, identity["id"], self.job_name, owner, identity["application"], name)
        except BottledWaterError as error:
            self.log.warning("The job could not be announced, it reports itself once it runs: %s", error)

    def _give_up(self, pipeline: Settings) -> None:
        """Give a job up whose submission failed, or was interrupted: the cluster may have accepted it. The request to
        stop stays, with the job's record, for when it begins."""
        assert self._identity is not None
        try:
            stop.stop(pipeline, self._identity, timeout=stop.LAST_CHANCE, final=False)
        except BottledWaterError as error:
            self.log.warning("If the cluster has accepted the job, it was not cancelled: %s", error)

    def _sending(self, child: subprocess.Popen[str]) -> None:
        self._submitting = child

    def _named(self, application: str) -> None:
        assert self._identity is not None
        self._identity = {**self._identity, "application": application}

    @staticmethod
    def _is_untold(context: Context) -> bool:
        """Whether a job of this task, in this life or in one before, may have published what Airflow was not told. It
        stays so through tries that do not know the job any more."""
        return bool(context["task_state_store"].get(_UNTOLD))

    def _earlier(self, context: Context, pipeline: Settings) -> Identity | Ended | None:
        """The job of an earlier try: to attach to, or how it has finished. If the task was cleared since, that
        job is stopped instead; if it has failed or fallen silent, it is replaced: then the result is None.

        :raises Refused: it is another pipeline's, see :meth:`_refuse_other`.
        """
        store: Any = context["task_state_store"]
        known: Any = store.get(JOB)
        if known is None:
            return None
        first = is_first_try(context, self.retries)
        if not (first and _ENDED in known):  # of which nothing is left that could be harmed
            self._refuse_other(context, pipeline)
        if first:
            if _ENDED not in known:
                self._identity = known  # should the task be ended meanwhile
                self.log.info("The job of the task's earlier life is stopped first.")
                stop.stop_and_forget(pipeline, known, final=False)
                self._identity = None
            store.delete(JOB)
            return None
        self._identity = known
        ended = Ended.of_event(known[_ENDED]) if _ENDED in known else watch.still_runs(pipeline, known)
        if ended is None:
            self.log.info("The job of an earlier try still runs; it is followed.")
            return known  # type: ignore[no-any-return]
        self._clear_away(context, pipeline, known, ended)
        self._identity = None
        return ended if self._is_done(ended) else None

    @staticmethod
    def _refuse_other(context: Context, pipeline: Settings) -> None:
        """Check that the task's job is of the pipeline that its DAG describes, which may have been changed since: one
        entry fewer in the list of a mapped task gives each task behind it the pipeline of the next one.

        :raises Refused: it is another one's, which is neither followed, stopped nor replaced.
        """
        now, known = _whose(pipeline), context["task_state_store"].get(_WHOSE)
        # without a name, it is the server's default database, which may have been named since
        if known is None or all(a == b or not (a and b) for a, b in zip(known, now, strict=True)):
            return
        raise Refused(
            f"The job of this task is of the pipeline with slot {known[1]!r} in database {known[0]!r}, and the DAG "
            f"describes the one with slot {now[1]!r} in database {now[0]!r} here now. Nothing was done with either.",
            f"Let the DAG describe {known[1]!r} here again (in the list of a mapped task: at the same place), and "
            "clear the task; nobody starts its job again until then. Or stop that pipeline (bottledwater stop), and "
            "trigger a new run of the DAG for what it describes now.",
        )

    def _clear_away(self, context: Context, pipeline: Settings, identity: Identity, ended: Ended) -> None:
        """Remove what is left of a job that has ended. First Airflow is told what it has published: if this process
        dies in between, the next try still finds the job's end. It does so until the task has succeeded, if nothing is
        left to do."""
        store: Any = context["task_state_store"]
        if done := self._is_done(ended):
            self._tell(context, pipeline)
            store.set(JOB, {**identity, _ENDED: ended.as_event()}, retention=NEVER_EXPIRE)
            store.delete(_UNTOLD)
        stop.clear_away(pipeline, identity, ended)
        if not done:
            store.delete(JOB)

    def _tell(self, context: Context, pipeline: Settings) -> None:
        """Tell Airflow what a job has published that has ended well; nothing, unless an operator says more."""

    def _is_done(self, ended: Ended) -> bool:
        """Whether nothing is left to do after a job of an earlier try."""
        return ended.outcome.ok and not ended.outcome.stopped

    def _follow(self, context: Context, pipeline: Settings, place: SparkTarget, identity: Identity) -> dict[str, Any]:
        """Defer until the job ends, or wait for it in this process; returns the task's result."""
        self._identity = identity
        if place.cluster if self.deferrable is None else self.deferrable:
            self._defer_until_end(identity)
        with failing():
            ended = self._wait(identity)
            assert ended is not None, "there is no time-out"
            self._clear_away(context, pipeline, identity, ended)
        return self._finish(self._outcome(ended))

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """Handle the trigger's event: the job has ended.

        :raises JobFailed: the job failed for a transient reason, or the event is not known.
        :raises AirflowFailException: the job failed for good.
        """
        event = known_event(event, "ended")
        with failing():
            identity, ended = self._ended(event)
            self._clear_away(context, self.pipeline_hook.pipeline(), identity, ended)
        return self._finish(self._outcome(ended))

    def _outcome(self, ended: Ended) -> Outcome:
        """How a job has ended, for its task.

        :raises Outage: Airflow has ended the task, and its job with it.
        """
        self._check_killed()
        if ended.outcome.ok and ended.outcome.stopped and ended.asked:
            # stopped by a triggerer whose trigger was given to another one, since Airflow reports this to it as the end
            # of the task
            return Outcome(ok=False, error="The job was stopped, but its task still waits for it.", transient=True)
        return ended.outcome

    def _defer_until_end(self, identity: Identity, timeout: float | None = None) -> NoReturn:
        """Defer until the job ends.

        :param timeout: seconds after which the trigger fires all the same.
        """
        self._check_killed()
        trigger = JobTrigger(
            identity=identity,
            poll_interval=self.poll_interval,
            start_timeout=self.start_timeout,
            deadline=time.time() + timeout if timeout else None,
            hook=self.pipeline_hook.arguments(),
        )
        wait_in_triggerer(self, trigger)

    def _wait(self, identity: Identity, timeout: float | None = None) -> Ended | None:
        """Wait in this process until the job ends, and pass its log on; returns how it has ended, or None after the
        time-out.

        :param timeout: seconds; None: no limit.
        """
        deadline = time.monotonic() + timeout if timeout else None
        past = iter((None,))  # a watch that begins anew has passed the log on

        def begin() -> JobWatch:
            return JobWatch(
                self.pipeline_hook.pipeline(),
                identity,
                start_timeout=self.start_timeout,
                write=self._write,
                past=next(past, 0),
            )

        with BlockingWatch(begin, "The job") as watching:
            while deadline is None or time.monotonic() < deadline:
                self._check_killed()
                ended: Ended | None = watching.fetch()
                if ended is not None:
                    return ended
                time.sleep(min(1.0, self.poll_interval))
        return None

    def _check_killed(self) -> None:
        """:raises Outage: Airflow has ended the task, and its job with it."""
        if self._killed:
            raise Outage("The task was ended, and its job with it.", "A retry goes on where it was.")

    def _write(self, level: int, line: str) -> None:
        self.log.log(level, "%s", line)

    def _ended(self, event: dict[str, Any]) -> tuple[Identity, Ended]:
        """The event of a trigger that has seen the job's end."""
        self._identity = event["identity"]
        return event["identity"], Ended.of_event(event)

    def _finish(self, outcome: Outcome) -> dict[str, Any]:
        """Turn an ended job's outcome into that of the task.

        :raises JobFailed: the job failed for a transient reason.
        :raises AirflowFailException: it failed for good, so that a retry does not help.
        :raises AirflowSkipException: it has done nothing, since the pipeline was stopped.
        """
        if outcome.kind == PipelineStopped.__name__:
            raise AirflowSkipException(outcome.error)
        tags = {"slot": self.described().name, "job": self.job_name}
        stats.incr("bottledwater.job.ended" if outcome.ok else "bottledwater.job.failed", tags=tags)
        for name, count in outcome.counts.items():
            if type(count) is int:
                stats.gauge(f"bottledwater.job.{name}", count, tags=tags)
        if not outcome.ok:
            message = f"The {self.job_name} job failed: {outcome.error}"
            raise (JobFailed(message) if outcome.transient else AirflowFailException(message))
        return outcome.result

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """If the trigger itself failed, the job may still run. A retry attaches to it; if there are no retries left, it
        is stopped.

        :raises AirflowFailException: the job is of another pipeline than the one that the DAG describes by now.
        """
        with failing():
            next_kwargs = here(self, next_kwargs, self._look)
            self._refuse_other(context, self.pipeline_hook.pipeline())
        if next_method == "__fail__":
            store: Any = context["task_state_store"]
            known = store.get(JOB)
            if known and is_last_try(context["ti"]):
                stop.stop_and_forget(self.pipeline_hook.pipeline(), known)
        return super().resume_execution(next_method, next_kwargs, context)

    def _look(self, trigger: JobTrigger) -> dict[str, Any] | None:
        """The event that a job's trigger would send, by one look here."""
        self._identity = trigger.identity  # should the task be ended meanwhile
        self._pipeline = PipelineHook(**trigger.hook).pipeline()
        # the trigger has waited for its part of it
        left = trigger.start_timeout - LACKING
        ended = watch.still_runs(self._pipeline, trigger.identity, start_timeout=left)
        return None if ended is None else {"status": "ended", "identity": trigger.identity, **ended.as_event()}

    def on_kill(self) -> None:
        """End the job in order, and by force if it does not end."""
        self._killed = True
        if self._submitting is not None:
            self._submitting.terminate()
        if self._identity is None:
            return
        if (folder := identities.folder_here(self._identity)) is not None:
            # first what needs no server, since there may be only seconds
            supervise.interrupt(folder)
        try:
            stop.stop_and_forget(self._pipeline or self.pipeline_hook.pipeline(), self._identity)
        except BottledWaterError as error:
            self.log.warning("The job could not be stopped in order: %s", error)
            leftovers.end(self._identity)
            identities.forget(self._identity)
