"""The operator of the stream: its job is submitted once, and watched by a trigger for as long as it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub (__init__.pyi) lacks it

from airflow_bottledwater.errors import (
    BottledWaterError,
    CredentialsRefused,
    Outage,
    SlotInUse,
    TakenOver,
    being_changed,
)
from airflow_bottledwater.hooks.holder import living
from airflow_bottledwater.hooks.tasks import Fate, owners_fate
from airflow_bottledwater.jobs import restarts as policy
from airflow_bottledwater.jobs import stop
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.watch import Ended
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.base import asked_at, failing, known_event, number, true
from airflow_bottledwater.operators.spark import BottledWaterSparkOperator
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.triggers.job import PauseTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.pipeline.settings import Settings

#: keys in the task's state: how often the job was submitted again, and when this try's timeout expires (seconds since
#: 1970; 0: never)
_RESTARTS = "bottledwater_restarts"
_DEADLINE = "bottledwater_deadline"
#: the key for where a bounded run has begun
_BEGAN = "bottledwater_began"


class StreamToKafkaOperator(BottledWaterSparkOperator):
    """Publish every committed change, in order, exactly once; deferred while the stream runs. At the end of a bounded
    run, the assets of the topics that its tries have changed get events; it does not succeed without them.

    The job goes on whether or not Airflow is up: a retry or a restarted triggerer attaches to it. The job is stopped
    when the task is marked or cleared, by its timeout and by the teardown; the slot is kept.

    The task defers, whatever ``[operators] default_deferrable`` is: a stream has no end, and must not occupy a worker
    slot. With ``deferrable=False`` the task stays instead, as the supervisor of its job, which ends with it: for
    workers that end with their task (KubernetesExecutor).

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param name: the job's name in Spark; None: ``bottledwater-stream``. (templated)
    :param bounded: end when everything is published that is committed now, instead of running until stopped.
        (templated)
    :param take_over: whether a bounded run may take the slot from a stream that lives, and that would end for good;
        otherwise the run fails while there is one. (templated)
    :param timeout: seconds after which the job is stopped and the task fails, counted from the begin of a try, over all
        its jobs; None: never. ``execution_timeout`` is not enforced by Airflow while a task is deferred. (templated)
    :param restarts: how often a job that failed for a transient reason is submitted again without using up a try.
        (templated)
    :param deferrable: whether the task is deferred while the stream runs.
    :param poll_interval: seconds between two checks of the job.
    :param start_timeout: seconds in which the job has to report for the first time; on a cluster, it may wait in a
        queue.

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name = "stream"
    ends_with_task: ClassVar[bool] = True
    template_fields: Sequence[str] = (
        *BottledWaterSparkOperator.template_fields,
        "bounded",
        "take_over",
        "timeout",
        "restarts",
    )
    ui_color = "#cce5ff"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        name: str | None = None,
        bounded: bool | str = False,
        take_over: bool | str = False,
        timeout: float | str | None = None,
        restarts: int | str = policy.RESTARTS,
        deferrable: bool = True,
        poll_interval: float = 5.0,
        start_timeout: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            pipeline=pipeline,
            name=name,
            deferrable=deferrable,
            poll_interval=poll_interval,
            start_timeout=start_timeout,
            **kwargs,
        )
        self.bounded = bounded
        self.take_over = take_over
        self.timeout = timeout
        self.restarts = restarts
        self._has_assets()

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit the job, or attach to the one of an earlier try; then defer, or stay with it until it ends."""
        asked_at(context)
        with failing():
            self._pipeline = pipeline = self.pipeline_hook.pipeline()
            with self.noting(context, pipeline):
                found = self._begin(context, pipeline)
            if isinstance(found, Ended):
                return self._finish(found.outcome)
            self._identity, store = found, context["task_state_store"]
            timeout, _ = self._limits()
            store.set(_DEADLINE, time.time() + timeout if timeout else 0.0, retention=NEVER_EXPIRE)
        if not self.deferrable:
            return self._stay(context, found)
        self._defer_until_end(found, self._left(context))

    def _begin(self, context: Context, pipeline: Settings) -> Identity | Ended:
        """Submit the job, or find the one of an earlier try, or how it has ended."""
        self._limits()
        place = self._place()
        if (found := self._earlier(context, pipeline)) is not None:
            return found
        store: Any = context["task_state_store"]
        self.refuse_stopped(context, pipeline)
        self._make_way(context, pipeline)
        store.set(_RESTARTS, asdict(policy.Restarts(at=time.time())), retention=NEVER_EXPIRE)
        # what earlier tries have published, also before the task was cleared, is told with what this one does
        events = AssetEvents(context, self.outlets, pipeline)
        if true(self.bounded) and not (self._is_untold(context) and store.get(_BEGAN)):
            store.set(_BEGAN, events.begin(), retention=NEVER_EXPIRE)
        submitted = self._submit(context, pipeline, place, bounded=true(self.bounded))
        events.begun()
        return submitted

    def _make_way(self, context: Context, pipeline: Settings, *, again: bool = False) -> None:
        """See who works on the slot. A job whose task has ended, or is gone, is stopped in order: this one takes its
        place.

        :param again: whether a job of this task has ended, and this one is to continue it: nobody has asked then that
            a stream takes the slot from another one, which may have been begun meanwhile.
        :raises SlotInUse: a bounded run would end a stream that lives.
        :raises TakenOver: a stream that is submitted again would.
        :raises Outage: it is not known whether a bounded run would. A stream is submitted all the same: its job waits
            for the servers, for longer than restarts do.
        """
        from airflow_bottledwater.provision import live

        bounded = true(self.bounded)
        spares = not true(self.take_over) if bounded else again
        try:
            holder = living(pipeline, live.name_of(pipeline))
        except Outage as error:
            if spares and bounded:
                raise
            self.log.warning("Whether a job works on the slot is not known: %s", error)
            return
        if holder is None:
            return
        ti: Any = context["ti"]
        self.log.info("The slot is held by the %s.", holder)
        if (owner := holder.owner) is not None and holder.identity is not None:
            fate = owners_fate(owner)
            key = (owner.dag_id, owner.run_id, owner.task_id, owner.map_index)
            mine = fate is not Fate.FOREIGN and key == (ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
            if mine or fate in (Fate.GONE, Fate.ENDED):
                self.log.info("Nobody waits for it any more: it is stopped, and this task goes on.")
                stop.stop_and_forget(pipeline, holder.identity, final=False)
                return
        if spares and not bounded:
            raise TakenOver(f"The slot was taken over by the {holder}: the job that has ended is not submitted again.")
        if spares:
            raise SlotInUse(
                f"The slot {pipeline.slot!r} is held by a stream that lives, the {holder}: a bounded run would end it "
                "for good.",
                "Pause this schedule while a stream runs; or stop that stream (bottledwater stop, or the DAG "
                "bottledwater_control); or give this task take_over.",
            )

    def _is_done(self, ended: Ended) -> bool:
        """Whether nothing is left to do after a job of an earlier try: a retry does not undo that the pipeline was
        asked to stop."""
        return ended.outcome.ok and not (ended.outcome.stopped and ended.asked)

    def _stay(self, context: Context, identity: Identity) -> dict[str, Any]:
        """Supervise the job in this process, until it ends in order or for good."""
        while True:
            ended = self._wait(identity, self._left(context))
            if ended is None:
                self._end_at_deadline(identity)
            judged = self._judge(context, identity, ended)
            if isinstance(judged, dict):
                return judged
            again: Identity | float = judged
            while isinstance(again, float):
                self._sleep_until(again)
                if self._asked_meanwhile(context):
                    return {}
                again = self._submit_again(context)
            identity = again

    def _sleep_until(self, at: float) -> None:
        """:raises Outage: Airflow has ended the task."""
        # the clock may be set back meanwhile
        deadline = time.monotonic() + min(at - time.time(), policy.LONGEST_BACKOFF)
        while (left := deadline - time.monotonic()) > 0:
            self._check_killed()
            time.sleep(min(1.0, left))

    def _left(self, context: Context) -> float | None:
        """Seconds until the task's timeout, which runs on while the job is submitted again; None: never."""
        store: Any = context["task_state_store"]
        deadline = store.get(_DEADLINE)
        return max(0.1, deadline - time.time()) if deadline else None

    def _limits(self) -> tuple[float | None, int]:
        """``timeout`` and ``restarts`` as numbers, after templating.

        :raises SettingError: one is not a number.
        """
        return number("timeout", self.timeout), int(number("restarts", self.restarts) or 0)

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """Handle the trigger's event: the job has ended, or its timeout has expired.

        :raises JobFailed: the job failed for a transient reason after all restarts were used up, or the event is not
            known.
        :raises AirflowFailException: the job failed for good.
        :raises Outage: the timeout has expired; the job was stopped.
        """
        event = known_event(event, "ended", "timeout")
        if event["status"] == "timeout":
            self._identity = event["identity"]
            self._end_at_deadline(event["identity"])
        identity, ended = self._ended(event)
        judged = self._judge(context, identity, ended)
        if isinstance(judged, dict):
            return judged
        self._pause(judged)

    def _end_at_deadline(self, identity: Identity) -> NoReturn:
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            stop.stop_and_forget(pipeline, identity)
        raise Outage(
            f"The stream ran longer than its timeout of {self._limits()[0] or 0:g} s and was stopped.",
            "The slot is kept.",
        )

    def _judge(self, context: Context, identity: Identity, ended: Ended) -> dict[str, Any] | float:
        """The task's result after the job's end; or, if it failed for a transient reason, when it is to be submitted
        again (seconds since 1970), without using up a try.

        :raises JobFailed: it failed for a transient reason too often.
        :raises AirflowFailException: it failed for good.
        """
        outcome = self._outcome(ended)
        if outcome.kind == CredentialsRefused.__name__ and self._last_start(context).count:
            # an earlier job of this try was let in: the password is being changed
            outcome = replace(outcome, transient=True)
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            if outcome.ok or not outcome.transient:
                self.log.info("The job's log ends with:\n%s", ended.log)
            reached = None if outcome.ok or not outcome.transient else policy.reached(pipeline)
            self._clear_away(context, pipeline, identity, ended)
        if outcome.ok or not outcome.transient:
            return self._finish(outcome)
        return self._again(context, outcome, reached)

    def _tell(self, context: Context, pipeline: Settings) -> None:
        """Give the assets of the topics that a bounded run has changed their events."""
        if true(self.bounded):
            store: Any = context["task_state_store"]
            AssetEvents(context, self.outlets, pipeline).stream(store.get(_BEGAN))
        self.keep_lineage()

    def _again(self, context: Context, outcome: Outcome, reached: int | None) -> float:
        """When the job is to be submitted again (seconds since 1970).

        :param reached: see :meth:`airflow_bottledwater.jobs.restarts.Restarts.after`.
        :raises JobFailed: it was submitted again too often.
        """
        store: Any = context["task_state_store"]
        now = time.time()
        again = self._last_start(context).after(outcome.kind, reached=reached, now=now)
        _, restarts = self._limits()
        if again.count > restarts:
            self._finish(outcome)
        self.log.warning(
            "The job died: %s\nIt is submitted again in %.0f s (%d of %d).",
            outcome.error,
            again.pause,
            again.count,
            restarts,
        )
        store.set(_RESTARTS, asdict(again), retention=NEVER_EXPIRE)
        return again.at

    def _last_start(self, context: Context) -> policy.Restarts:
        store: Any = context["task_state_store"]
        return policy.Restarts(**{"at": time.time(), **(store.get(_RESTARTS) or {})})

    def submit_again(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """Submit the job again, after the backoff; or end, if the pipeline was asked to stop meanwhile."""
        event = known_event(event, "over")
        if self._asked_meanwhile(context):
            return {}
        found = self._submit_again(context)
        if isinstance(found, float):
            self._pause(found)
        self._defer_until_end(found, self._left(context))

    def _asked_meanwhile(self, context: Context) -> bool:
        from airflow_bottledwater.jobs import fence

        with failing():
            asked = fence.asked_meanwhile(self.pipeline_hook.pipeline(), self._last_start(context).before)
        if asked:
            self.log.info("The pipeline was asked to stop: its job is not submitted again.")
        return asked

    def _submit_again(self, context: Context) -> Identity | float:
        """Submit the job again; or, if that failed for a transient reason, when it is to be tried again (seconds since
        1970).

        :raises SlotInUse: a bounded run would end a stream that was begun meanwhile.
        :raises AirflowFailException: it cannot be submitted; or such a stream has taken over.
        """
        try:
            with failing():
                pipeline = self.pipeline_hook.pipeline()
                with self.noting(context, pipeline, again=True), being_changed():
                    self._make_way(context, pipeline, again=True)
                    return self._submit(context, pipeline, self._place(), bounded=true(self.bounded))
        except SlotInUse:
            raise  # as at the first start: it would be there at each of the restarts
        except BottledWaterError as error:
            self._check_killed()
            outcome = Outcome(ok=False, kind=type(error).__name__, error=str(error), transient=True)
            return self._again(context, outcome, None)

    def _pause(self, until: float) -> NoReturn:
        """Defer until the job is to be submitted again."""
        self.defer(trigger=PauseTrigger(until=until), method_name="submit_again")
        raise AssertionError("defer does not return")
