"""The operator that asks something of a pipeline: what the command's subcommands do, as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    failing,
    number,
)
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.rules import selected

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.pipeline.settings import Settings


#: what can be asked of a pipeline, and what it does, for people
ACTIONS = {
    "stop": "end its job, keep the slot",
    "retire": "stop for good, so that the slot may be dropped",
    "drop_slot": "drop slot, publications and saved state: it begins anew, with a new snapshot",
    "start": "run it again",
    "snapshot": "read tables again while the stream runs",
    "pause": "let a live snapshot wait",
    "resume": "let a paused one go on",
    "cancel": "end a live snapshot; what it has published stays",
    "pause_table": "publish nothing more of tables, while the others go on",
    "resume_table": "go on with tables that were paused or set aside: they are read again",
    "accept_new_keys": "let the keys of tables become others, while the stream is stopped: they are read again",
    "redrive": "publish the dead letters whose cause was mended, while the stream is stopped",
    "dismiss": "give up dead letters, while the stream is stopped",
}
#: what a live snapshot is asked to do
_CHANGES = {"pause": "wait", "resume": "go on", "cancel": "end"}
#: what is asked of single tables
_OF_TABLES = frozenset({"pause_table", "resume_table"})


class PipelineControlOperator(PipelineMixin, BaseOperator):
    """Ask something of a pipeline, wherever its job runs: to stop, to read tables again, to settle its dead letters.

    A stop that is asked for is no failure: the task that runs the job succeeds, and
    :class:`~airflow_bottledwater.operators.health.PipelineHealthOperator` does not expect the pipeline to run.

    In a DAG with ``render_template_as_native_obj``, ``"{{ params.reason | pprint }}"`` gives a text as it is: without
    the filter, one that looks like a number becomes one.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param action: one of :data:`ACTIONS`. (templated)
    :param tables: ``[schema.]table`` patterns, a list or comma-separated: which ``snapshot`` reads again, and whose
        dead letters ``dismiss`` gives up (None or an empty list: all; what comes out empty otherwise is refused); those
        that ``pause_table``, ``resume_table`` and ``accept_new_keys`` are about. (templated)
    :param where: which rows ``snapshot`` reads: SQL over the tables' own columns; empty for all. (templated)
    :param sweep: whether ``snapshot`` also publishes tombstones for keys that the tables do not have. (templated)
    :param snapshot_id: of the live snapshot that ``pause``, ``resume`` and ``cancel`` are about. (templated)
    :param reason: why ``pause_table`` is asked for, for whoever looks at the pipeline. (templated)
    :param timeout: seconds in which a job that is stopped may end by itself; then it is fenced, its slot is released
        and its processes are killed. Of ``pause_table`` and ``resume_table``, seconds to wait for a job's answer.
        (templated)
    """

    template_fields: Sequence[str] = (
        *PIPELINE_FIELDS, "action", "tables", "where", "sweep", "snapshot_id", "reason", "timeout",
    )  # fmt: skip
    template_fields_renderers: ClassVar[dict[str, str]] = {**PIPELINE_RENDERERS, "where": "sql"}
    ui_color = "#f8d7da"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        action: str = "stop",
        tables: Sequence[str] | str | None = None,
        where: str = "",
        sweep: bool | str = False,
        snapshot_id: str = "",
        reason: str = "",
        timeout: float | str = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(pipeline)
        self.action = action
        self.tables = tables
        self.where = where
        self.sweep = sweep
        self.snapshot_id = snapshot_id
        self.reason = reason
        self.timeout = timeout

    @property
    def sweeps(self) -> bool:
        """Whether ``snapshot`` sweeps; a template may have made a text of it."""
        return str(self.sweep).lower() == "true"

    def execute(self, context: Context) -> None:
        """Do what is asked for; except for ``snapshot``, it does no harm to do it again.

        :raises AirflowFailException: no job has ever reported for the slot, a setting is not allowed, or what is asked
            for cannot be done now; the message says why.
        :raises Outage: a server does not answer.
        """
        self.carry_out(context)

    def carry_out(self, context: Context) -> None:
        """See :meth:`execute`."""
        with failing():
            if self.action not in ACTIONS:
                raise SettingError("action", self.action, " or ".join(ACTIONS))
            pipeline = self.pipeline_hook.pipeline()
            if self.action in ("stop", "retire"):
                self._stop(pipeline)
            elif self.action == "drop_slot":
                self._drop(pipeline)
            elif self.action == "start":
                self._start(pipeline)
            elif self.action == "snapshot":
                self._snapshot(pipeline)
            elif self.action in _CHANGES:
                self._change(pipeline)
            elif self.action == "accept_new_keys":
                self._accept(pipeline)
            elif self.action in _OF_TABLES:
                self._ask(pipeline, context)
            else:
                self._settle(pipeline)

    def _stop(self, pipeline: Settings) -> None:
        from airflow_bottledwater.jobs import stop

        retire, timeout = self.action == "retire", number("timeout", self.timeout) or 0.0
        stop.stop_pipeline(pipeline, retire=retire, timeout=timeout, say=lambda line: self.log.info("%s", line))

    def _drop(self, pipeline: Settings) -> None:
        from airflow_bottledwater.provision.drop import drop

        # it was asked for while no job ran; one may have been started since
        self.log.info("%s", drop(pipeline, when="always", alive=False))

    def _start(self, pipeline: Settings) -> None:
        from airflow_bottledwater.jobs import requests
        from airflow_bottledwater.postgres.connect import session
        from airflow_bottledwater.postgres.server import identify

        with session(pipeline.postgres, "Identifying the cluster") as connection:
            cluster = identify(connection)
        status = requests.want(pipeline, cluster)
        if status is not None and not status.ended:
            self.log.info("The pipeline is meant to run, and its job is %s.", status.state)
        else:
            self.log.info("The pipeline is meant to run. Its DAG starts it.")

    def _snapshot(self, pipeline: Settings) -> None:
        from airflow_bottledwater.provision import live
        from airflow_bottledwater.state.control_records import SnapshotRequest

        name, request_id = live.ask(pipeline, SnapshotRequest(tuple(selected(self.tables)), self.where, self.sweeps))
        self.log.info("Live snapshot %s is asked for. %s", request_id, live.publishes(pipeline, name))

    def _change(self, pipeline: Settings) -> None:
        from airflow_bottledwater.jobs import snapshots
        from airflow_bottledwater.provision import live

        name = live.name_of(pipeline)
        if self.action == "cancel":
            live.cancel(pipeline, name, self.snapshot_id)
        else:
            snapshots.change(pipeline, name, self.snapshot_id, paused=self.action == "pause")
        self.log.info("Live snapshot %s is asked to %s.", self.snapshot_id, _CHANGES[self.action])

    def _ask(self, pipeline: Settings, context: Context) -> None:
        from airflow_bottledwater.provision import pausing

        # a run that a schedule or another DAG has begun has no user
        run = context.get("dag_run")
        by = getattr(run, "triggering_user_name", None) or f"DAG {self.dag_id}"
        paused, why = self.action == "pause_table", self.reason if self.action == "pause_table" else ""
        asked = pausing.ask(pipeline, selected(self.tables), paused=paused, by=by, why=why)
        timeout = number("timeout", self.timeout) or 0.0
        self.log.info("Asked to %s. %s", self.action, pausing.outcome(pipeline, *asked, timeout=timeout))

    def _accept(self, pipeline: Settings) -> None:
        from airflow_bottledwater.provision.accept import accept

        accepted = accept(pipeline, selected(self.tables))
        self.log.info("Accepted for %s: the next job reads their rows again.", ", ".join(accepted))

    def _settle(self, pipeline: Settings) -> None:
        from airflow_bottledwater import extras

        extras.require("spark")  # dead letters are encoded anew, as a job does
        from airflow_bottledwater.provision import redrive

        if self.action == "redrive":
            found = redrive.redrive(pipeline.with_hash_key())
        else:
            found = redrive.dismiss(pipeline, selected(self.tables))
        self.log.info(
            "%d dead letters published, %d overtaken by newer records and dropped, %d dismissed, %d still refused, "
            "%d too large to hold their row.",
            found.published,
            found.overtaken,
            found.dismissed,
            found.failed,
            found.incomplete,
        )
