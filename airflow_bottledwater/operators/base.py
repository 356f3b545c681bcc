"""What the operators and sensors have in common: connections, settings, and how errors end a task."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from airflow.sdk import NEVER_EXPIRE, BaseOperatorLink  # type: ignore[attr-defined]  # its stub lacks the first
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_bottledwater.errors import BottledWaterError, JobFailed, Outage, PipelineStopped, SettingError
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.operators import links
from airflow_bottledwater.operators.assets import alias_of, inlets_of
from airflow_bottledwater.pipeline import argument
from airflow_bottledwater.pipeline.argument import PipelineArgument, as_values, summary
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.section import templated
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient

log = logging.getLogger(__name__)

#: what each operator of a pipeline has templated, and how Airflow's UI renders it: the description, and what stays of
#: it where Airflow cuts it, by which the page knows the pipeline
PIPELINE_FIELDS: Sequence[str] = ("pipeline", "pipeline_summary")
PIPELINE_RENDERERS: Mapping[str, str] = dict.fromkeys(PIPELINE_FIELDS, "json")


class ConstantsMixin:
    """For operators whose parameters may be templates: a text that is none stays as it is. Airflow renders all of them,
    and where templates are rendered to native values, a constant like ``1.10``, ``2024_01`` or ``None`` would be
    evaluated, too."""

    def render_template(self, content: Any, *arguments: Any, **more: Any) -> Any:
        """See :meth:`airflow.sdk.BaseOperator.render_template`."""
        if isinstance(content, str) and not templated(content):
            return content
        return super().render_template(content, *arguments, **more)  # type: ignore[misc]  # that of the operator


class PipelineMixin(ConstantsMixin):
    """The one parameter that describes a pipeline, which each operator lists itself, so that ``default_args``, mapped
    tasks and editors see it. Jinja templates work inside of it.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, or the path of its YAML file; or only its name, if it
        exists: then its settings are those of its saved state, and its connections have the usual ids
        (``postgres_default`` and so on; for other ones, ``Pipeline("shop", source=Source("shop_postgres"),
        kafka=Kafka("shop_kafka"), saved=True)``). (templated)
    """

    pipeline: dict[str, Any] | str
    pipeline_summary: dict[str, Any] | str
    retries: int
    operator_extra_links: Collection[BaseOperatorLink] = links.of_pipeline()
    _hook: PipelineHook | None = None

    def _set_pipeline(self, pipeline: PipelineArgument) -> None:
        self.pipeline = as_values(pipeline)  # what is wrong is said when the DAG is parsed
        self.pipeline_summary = summary(self.pipeline)

    def _has_assets(self, tables: Any = None) -> None:
        """Give the operator the tables that the description names as inlets, and as an outlet the alias of the
        pipeline's topics, to which it adds those that it has published to.

        :param tables: those that it reads; None for all of the pipeline.
        """
        self.inlets: list[Any] = [*getattr(self, "inlets", ()), *inlets_of(self.pipeline, tables)]
        self.outlets: list[Any] = [*getattr(self, "outlets", ()), alias_of(self.pipeline)]

    def described(self) -> Description:
        """The description, to be used after templating. With ``saved``, its other settings are in the saved state.

        :raises SettingError: a value is not allowed.
        """
        return argument.described(self.pipeline)

    def own_settings(self) -> dict[str, Any]:
        """Settings that are the operator's own arguments."""
        return {}

    @property
    def pipeline_hook(self) -> PipelineHook:
        """The pipeline's hook, to be used after templating.

        :raises BottledWaterError: a value is not allowed; or the settings are those of its saved state, which cannot be
            read.
        """
        if self._hook is None:
            described = self.described()
            connections = (described.source.conn_id, described.kafka.conn_id, described.kafka.registry)
            settings = described.settings()
            if described.saved:
                settings = {**PipelineHook(*connections, settings).saved_settings(), **settings}
            self._hook = PipelineHook(*connections, {**settings, **self.own_settings()})
        return self._hook

    def noting(
        self, context: Any, pipeline: Settings, *, again: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """See :func:`airflow_bottledwater.jobs.requests.noting`.

        :param again: whether the task has had a job that is followed by another one.
        """
        from airflow_bottledwater.jobs import requests

        def retry() -> bool:
            return again or not is_first_try(context, self.retries) or self._is_stopped(context, pipeline)

        return requests.noting(pipeline, retry=retry)

    def _is_stopped(self, context: Any, pipeline: Settings) -> bool:
        """Whether the pipeline was, or may have been, asked to stop since."""
        try:
            self.refuse_stopped(context, pipeline)
        except BottledWaterError:
            return True
        return False

    def refuse_stopped(self, context: Any, pipeline: Settings) -> None:
        """See :func:`airflow_bottledwater.jobs.requests.refuse_stopped`. If it is not known for what a person has asked
        for, or has begun already, that goes on: jobs wait for servers for longer than tasks do.

        :raises PipelineStopped: the pipeline was asked to stop since.
        :raises Outage: whether it was is not known, no person has asked for this, and nothing has begun.
        """
        from airflow_bottledwater.jobs import requests

        asked = asked_at(context)
        try:
            requests.refuse_stopped(pipeline, asked)
        except Outage as error:
            if asked is None and not has_begun(context):
                raise
            log.warning("Whether the pipeline was asked to stop since is not known: %s", error)


#: keys in the task's state: for the number of tries that its life had when it began something; and for that of the life
#: that was looked at last, with when a person has asked for this, in seconds since 1970 (0: nobody has)
_LIFE, _ASKED = "bottledwater_life", "bottledwater_asked"


def is_first_try(context: Any, retries: int) -> bool:
    """Whether this try is not a retry: the task runs for the first time, or for the first time since it was cleared.

    Airflow does not report this, and the task's state survives a clear. It follows from the counts: at first, a task
    has ``max_tries = retries``, and clearing it sets ``max_tries = try_number + retries`` (``clear_task_instances`` in
    airflow/models/taskinstance.py); the first try after that has the next number. These retries are those that the run
    was created with, and the operator's those of the file as it is now. So another ``max_tries`` than the one that was
    noted tells of a clear, too.

    :param retries: the operator's retries.
    """
    ti, noted = context["ti"], context["task_state_store"].get(_LIFE)
    return bool(ti.try_number == ti.max_tries - retries + 1 or noted not in (None, ti.max_tries))


def asked_at(context: Any) -> float | None:
    """When a person has asked for what this life of a task does, by triggering its run or clearing the task, in seconds
    since 1970; None if nobody has: a schedule, a backfill of Airflow or another DAG has begun the run.

    Airflow does not tell a task when it was cleared. But its id is a UUID of version 7, which begins with the time, and
    gets made anew when it is cleared, and also for each retry, which goes on with what was asked for its life
    (``TaskInstance.prepare_db_for_next_try`` in airflow/models/taskinstance.py). So an operator calls this before
    anything can fail; only a process that was lost before that leaves it to the next try, which takes its own time for
    that of the clear.
    """
    store, ti, run = context["task_state_store"], context["ti"], context["dag_run"]
    noted = store.get(_ASKED)
    if noted is not None and noted[0] == ti.max_tries:
        return noted[1] or None
    made, found = (ti.id.int >> 80) / 1000, 0.0
    # by the API, a task may also be cleared without its run; clearing changes its number of tries
    if run.clear_number or noted is not None:
        found = made
    elif run.run_type == "manual":
        # a task may be made only after one before it has ended (a mapped one), and a run may be meant for later
        found = min(made, run.run_after.timestamp())
    store.set(_ASKED, [ti.max_tries, found], retention=NEVER_EXPIRE)
    return found or None


def note_life(context: Any) -> None:
    """Note in the task's state that this life of the task begins something, for :func:`is_first_try`."""
    context["task_state_store"].set(_LIFE, context["ti"].max_tries, retention=NEVER_EXPIRE)


def has_begun(context: Any) -> bool:
    """Whether this life of the task has begun something, see :func:`note_life`."""
    return bool(context["task_state_store"].get(_LIFE) == context["ti"].max_tries)


def is_last_try(ti: Any) -> bool:
    """Whether no retry follows if this try of a task fails."""
    return bool(ti.try_number > ti.max_tries)


def number(name: str, value: float | str | None) -> float | None:
    """A numeric parameter, which may be text if it comes from a template; None if it is not set.

    :raises SettingError: it is not a finite number.
    """
    if value is None or (isinstance(value, str) and value.strip() in ("", "None")):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise SettingError(name, value, "a number, or nothing")
    return found


def true(value: bool | str) -> bool:
    """A parameter that is true or false, which may be text if it comes from a template."""
    return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1", "yes", "y", "on")


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Within this block, errors after which a retry cannot help fail the task at once. The task's log has each error
    once: its message says what happened and what can be done, so that where it was raised, and what it was made of, is
    only in the log of level DEBUG.

    :raises AirflowFailException: instead of an error that is not transient.
    :raises AirflowSkipException: instead of one that says that nothing is begun, since the pipeline was stopped.
    """
    try:
        yield
    except BottledWaterError as error:
        log.debug("The error was raised here.", exc_info=error)
        if isinstance(error, PipelineStopped):
            log.warning("%s", error)
            raise AirflowSkipException(str(error)) from None
        if transient(error):
            raise error.with_traceback(None) from None
        raise AirflowFailException(str(error)) from None


def known_event(event: dict[str, Any] | None, *statuses: str) -> dict[str, Any]:
    """The event of a trigger, checked.

    :param statuses: those that it may have.
    :raises JobFailed: it has another one, or there is none; the task must not succeed with it.
    """
    if event is None or event.get("status") not in statuses:
        raise JobFailed(f"Unexpected trigger event: {event!r}.")
    return event
