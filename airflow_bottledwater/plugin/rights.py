"""Who may see a pipeline, and what Airflow knows of it: both by the task that has submitted its job."""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import ConnectionDetails, DagAccessEntity, DagDetails
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState, TaskInstanceState
from sqlalchemy import func, select
from sqlalchemy.orm import aliased

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.operators.base import PIPELINE_FIELDS
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.section import templated
from airflow_bottledwater.plugin import kafkas

#: the operators without which no job of a pipeline begins
_BEGINNING = (
    "ReplicationPreflightOperator",
    "CreateReplicationSlotOperator",
    "SnapshotToKafkaOperator",
    "StreamToKafkaOperator",
)
#: how long ago a run may have begun whose failed tasks are looked at, and seconds for which they are kept
_RECENT, _KEPT = datetime.timedelta(days=7), 5.0

_failed: tuple[float, list[tuple[dict[str, Any], Description]]] = (0.0, [])
_lock = threading.Lock()


class Rights:
    """What one user may do.

    :param user: as Airflow's dependency ``get_user`` has it.
    """

    def __init__(self, user: Any) -> None:
        self._user = user
        self._connections: dict[str, bool] = {}

    def may_see(self, conn_id: str, dag_id: str | None) -> bool:
        """Whether the user may see a pipeline: whoever may read the DAG that has submitted its job; if this Airflow has
        no such DAG, whoever may read the connection to its Kafka.

        :param conn_id: of the connection to its Kafka.
        :param dag_id: of the DAG; None if no task has submitted the job.
        """
        if dag_id is not None and dag_id in self.readable:
            return True
        if dag_id is not None and dag_id in self._known:
            return False
        return self.may_read(conn_id)

    def may_read(self, conn_id: str) -> bool:
        """Whether the user may read a connection."""
        if conn_id not in self._connections:
            # one of the environment may be a team's, too
            team = Connection.get_team_name(conn_id) or kafkas.team_of(conn_id)
            details = ConnectionDetails(conn_id=conn_id, team_name=team)
            self._connections[conn_id] = bool(
                get_auth_manager().is_authorized_connection(method="GET", details=details, user=self._user)
            )
        return self._connections[conn_id]

    def may_see_rows(self, conn_id: str, dag_id: str | None) -> bool:
        """Whether the user may see of which rows dead letters are: whoever may trigger the pipeline's DAG, and so have
        them published; without such a DAG, whoever may see the pipeline.

        :param conn_id: of the connection to its Kafka.
        :param dag_id: of the DAG; None if no task has submitted the job.
        """
        if dag_id is not None and dag_id in self._known:
            return self.may_trigger(dag_id)
        return self.may_see(conn_id, dag_id)

    @functools.cached_property
    def _known(self) -> set[str]:
        """The ids of all DAGs that this Airflow has."""
        with create_session() as session:
            return set(session.scalars(select(DagModel.dag_id)))

    @functools.cached_property
    def readable(self) -> set[str]:
        """The ids of the DAGs that the user may read."""
        return set(get_auth_manager().get_authorized_dag_ids(user=self._user, method="GET"))

    def may_trigger(self, dag_id: str) -> bool:
        """Whether the user may trigger a DAG, as Airflow itself asks before it does."""
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        return bool(
            get_auth_manager().is_authorized_dag(
                method="POST", access_entity=DagAccessEntity.RUN, details=details, user=self._user
            )
        )


def dags(ids: Iterable[str]) -> dict[str, bool]:
    """Which of these DAGs there are, by their ids, and whether each is paused."""
    with create_session() as session:
        found = session.execute(
            select(DagModel.dag_id, DagModel.is_paused).where(DagModel.dag_id.in_(list(ids)), ~DagModel.is_stale)
        )
        return {dag_id: bool(paused) for dag_id, paused in found}


def full(dag_id: str) -> bool:
    """Whether as many runs of a DAG go on, or wait to, as it may have at a time, so that the next one waits, too."""
    unfinished = select(func.count()).where(
        DagRun.dag_id == dag_id, DagRun.state.in_([DagRunState.RUNNING, DagRunState.QUEUED])
    )
    with create_session() as session:
        most = session.scalar(select(DagModel.max_active_runs).where(DagModel.dag_id == dag_id))
        return most is not None and int(session.scalar(unfinished) or 0) >= most


def is_of(dag_id: str, task_id: str, described: Description) -> bool:
    """Whether a task of a DAG is about this pipeline: its name may be that of one with another source, too."""
    found = SerializedDagModel.get_dag(dag_id)
    task = None if found is None else found.task_dict.get(task_id)
    values = _description({name: getattr(task, name, None) for name in PIPELINE_FIELDS})
    if values is None:
        return False
    own = (values.name, values.source.conn_id, values.kafka.conn_id)
    return own == (described.name, described.source.conn_id, described.kafka.conn_id)


def starts(control: str) -> str:
    """The id of the DAG that a control DAG triggers, whatever it is triggered with; empty if its form says which."""
    found = SerializedDagModel.get_dag(control)
    task = None if found is None else found.task_dict.get("start")
    dag_id = str(getattr(task, "trigger_dag_id", ""))
    return "" if templated(dag_id) else dag_id


def conf_of(task: Mapping[str, Any]) -> dict[str, Any]:
    """With what the run of a task was triggered; empty if Airflow does not know it any more."""
    with create_session() as session:
        found = session.scalar(
            select(DagRun.conf).where(DagRun.dag_id == task["dag_id"], DagRun.run_id == task["run_id"])
        )
    return dict(found or {})


def described(task: Mapping[str, Any] | None, slot: str) -> Description | None:
    """The pipeline as a task had it when it was rendered; None if Airflow does not know it (any more), or if it is
    another one: another Airflow may have a task and a run of the same ids.

    :param task: the ``task`` of a row, see :func:`airflow_bottledwater.plugin.overview.row`.
    :param slot: that of the row.
    """
    found = None if task is None else _rendered(task)
    return found if found is not None and found.name == slot else None


def _rendered(task: Mapping[str, Any]) -> Description | None:
    table = RenderedTaskInstanceFields
    with create_session() as session:
        found = session.scalar(
            select(table.rendered_fields).where(
                table.dag_id == task["dag_id"],
                table.run_id == task["run_id"],
                table.task_id == task["task_id"],
                table.map_index == task["map_index"],
            )
        )
    return _description(found or {})


def _description(fields: Mapping[str, Any]) -> Description | None:
    """What Airflow keeps of a task's pipeline; None if that is not enough to know it.

    :param fields: those of the operators' ``PIPELINE_FIELDS``.
    """
    # that of an earlier version of this package has no summary
    values = fields.get("pipeline_summary") or fields.get("pipeline")
    try:
        if isinstance(values, Mapping):
            return Description.of(values)
        # a description that is too long is a text that is no name (airflow/serialization/helpers.py)
        return Description(values, saved=True) if isinstance(values, str) else None
    except SettingError:
        return None


def failed() -> list[tuple[dict[str, Any], Description]]:
    """The tasks without which no job begins, and that have failed in the last run of their DAG, the newest first, each
    with its pipeline; ``again`` says whether Airflow tries them again. Those of runs that are some days old are left
    out."""
    global _failed
    with _lock:
        at, known = _failed
        if at and time.monotonic() - at < _KEPT:
            return known
        newer = aliased(DagRun)
        asked = (
            select(TaskInstance)
            .join(DagRun, (DagRun.dag_id == TaskInstance.dag_id) & (DagRun.run_id == TaskInstance.run_id))
            .where(
                TaskInstance.operator.in_(_BEGINNING),
                TaskInstance.state.in_([TaskInstanceState.FAILED, TaskInstanceState.UP_FOR_RETRY]),
                DagRun.run_after >= datetime.datetime.now(datetime.UTC) - _RECENT,
                ~select(newer.id).where(newer.dag_id == DagRun.dag_id, newer.id > DagRun.id).exists(),
            )
            .order_by(DagRun.run_after.desc())
        )
        with create_session() as session:
            tasks = [
                {
                    "dag_id": each.dag_id, "run_id": each.run_id, "task_id": each.task_id, "map_index": each.map_index,
                    "again": each.state == TaskInstanceState.UP_FOR_RETRY,
                    "at": each.end_date.timestamp() if each.end_date else None,
                }
                for each in session.scalars(asked)
            ]  # fmt: skip
        known = [(task, found) for task in tasks if (found := _rendered(task)) is not None]
        _failed = time.monotonic(), known
        return known
