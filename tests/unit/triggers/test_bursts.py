"""Events that come while a run works, in Airflow's own functions: which run gets which of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, Asset, BaseOperator

from airflow_bottledwater.hooks.changes import ChangesHook
from airflow_bottledwater.model.changes import ChangeRange, TopicRange

pytestmark = pytest.mark.slow

BURST = Asset("burst")


def at(start: int, end: int) -> ChangeRange:
    return ChangeRange("1/d/shop", start, end, {"public.a": TopicRange("a", "i", (start,), (end,))})


@pytest.fixture
def dag() -> Any:
    """A DAG that runs by the asset, in a database of Airflow."""
    from airflow import settings
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.models.tasklog import LogTemplate
    from airflow.serialization.definitions.dag import SerializedDAG
    from airflow.serialization.serialized_objects import LazyDeserializedDAG
    from airflow.utils.session import create_session

    import_all_models()
    if settings.engine is None:
        settings.configure_orm()
    Base.metadata.create_all(settings.engine)
    with DAG("on_burst", schedule=[BURST], catchup=False, max_active_runs=1, is_paused_upon_creation=False) as made:
        BaseOperator(task_id="load", inlets=[BURST])
    with create_session() as session:
        session.merge(DagBundleModel(name="dags"))
        session.merge(LogTemplate(id=1, filename="x", elasticsearch_id="x"))
        session.flush()
        lazy = LazyDeserializedDAG.from_dag(made)
        SerializedDAG.bulk_write_to_db("dags", None, [lazy], session=session)
        SerializedDagModel.write_dag(lazy, bundle_name="dags", session=session)
    return made


def test_what_airflow_keeps_back_is_read_by_the_run_of_an_event_without_changes(dag: DAG) -> None:
    from airflow.assets.manager import asset_manager
    from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
    from airflow.models.asset import AssetDagRunQueue, AssetEvent
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.utils.db_cleanup import run_cleanup
    from airflow.utils.session import create_session
    from sqlalchemy import select

    store: dict[str, Any] = {}
    read: list[dict[str, Any]] = []

    def tell(*told: ChangeRange) -> None:
        for each in told:
            with create_session() as session:
                extra = {"from_trigger": True, "payload": each.as_event()}
                asset_manager.register_asset_change(asset=BURST, extra=extra, session=session)

    def run() -> ChangeRange | None:
        """What the next run reads; None if there is none."""
        with create_session() as session:
            if not session.scalars(select(AssetDagRunQueue)).all():
                return None
            current = SerializedDagModel.get_dag(dag.dag_id, session=session)
            scheduler: Any = SimpleNamespace(
                _get_current_dag=lambda **_: current,
                _multi_team=False,
                job=SimpleNamespace(id=None),
                log=SimpleNamespace(debug=print, info=print, error=print),
            )
            model = session.get(DagModel, dag.dag_id)
            SchedulerJobRunner._create_dag_runs_asset_triggered(scheduler, dag_models=[model], session=session)
            session.flush()
            events = session.scalars(select(DagRun).order_by(DagRun.id.desc())).first().consumed_asset_events
            all_events = session.scalars(select(AssetEvent).order_by(AssetEvent.timestamp.desc())).all()
            inlet = SimpleNamespace(ascending=lambda _: inlet, limit=lambda _: all_events)
            inlet.before = lambda _: inlet
            context = {
                "triggering_asset_events": {BURST: list(events)},
                "inlet_events": {BURST: inlet},
                "asset_state_store": {BURST: SimpleNamespace(get=store.get, set=store.__setitem__)},
                "dag": dag,
                "run_id": f"run {len(read)}",
            }
            read.append(context)
            return ChangesHook.of_run(context, BURST)

    def paused(on: bool) -> None:
        with create_session() as session:
            session.get(DagModel, dag.dag_id).is_paused = on

    tell(at(0, 1))
    assert run() == at(0, 1)
    # while that run works; the scheduler begins the next one behind it
    tell(at(1, 2), at(2, 3), at(3, 4))
    assert run() == at(1, 2)
    assert run() is None, "Airflow gives a run all events of a burst: none has to be told again"
    tell(at(4, 4))
    assert run() == at(2, 4)
    assert store["bottledwater_read"] == {"on_burst": {"i": [4]}} and run() is None
    # paused, while 'airflow db clean' deletes the first events that it has not read
    paused(True)
    tell(at(4, 5), at(5, 6), at(6, 7))
    assert run() is None
    with create_session() as session:
        run_cleanup(
            clean_before_timestamp=session.scalars(select(AssetEvent.timestamp).order_by(AssetEvent.id.desc())).all()[
                1
            ],
            table_names=["asset_event"],
            skip_archive=True,
            confirm=False,
            session=session,
        )
        assert [each.extra["payload"]["to"] for each in session.scalars(select(AssetEvent))] == ["0/7"]
    paused(False)
    tell(at(7, 8))
    whole = dataclasses.replace(at(4, 8), start=0)
    assert run() == whole
    # a run is cleared; others are not changed by it, nor it by others
    assert run() is None
    tell(at(8, 9))
    assert run() == at(8, 9)
    assert ChangesHook.of_run(read[-2], BURST) == whole and ChangesHook.of_run(read[-1], BURST) == at(8, 9)
    assert store["bottledwater_read"] == {"on_burst": {"i": [9]}}
