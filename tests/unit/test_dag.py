"""The DAGs of a pipeline, and the form: what their templates are rendered to."""

from __future__ import annotations

import runpy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pendulum
import pytest
from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, CronDataIntervalTimetable, MultipleCronTriggerTimetable
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRuntimeError,
    DagRunTriggerException,
    ErrorType,
    ParamValidationError,
)
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables import interval, trigger
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater import form
from airflow_bottledwater.dag import Pipeline, dag_of
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.operators.control import PipelineControlOperator
from airflow_bottledwater.operators.health import PipelineHealthOperator
from airflow_bottledwater.pipeline.description import Description, Kafka, Schedules, Source, Spark
from airflow_bottledwater.pipeline.section import templated
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.sensors.dead_letters import DeadLettersSensor

DAGS = Path(__file__).parents[2] / "dags"
#: texts that Python takes for something else
LOOKING: Any = ["4711", "1234e5678901", "2024_01", "1.10", "None", "True", "['a']", "'quoted'", "0x10", "{{ ds }}"]


def rendered(dag: DAG, task_id: str, more: dict[str, Any] | None = None, **params: Any) -> Any:
    """A copy of a task, rendered with what was filled into the DAG's form.

    :param more: of the context.
    """
    task = dag.get_task(task_id).prepare_for_execution()
    context: Any = {"dag": dag, "params": {**dag.params.dump(), **params}, **(more or {})}
    task.render_template_fields(context)
    return task


@pytest.mark.parametrize("text", LOOKING)
def test_what_is_asked_of_a_pipeline_is_asked_as_it_was_filled_in(text: str) -> None:
    # how templates are rendered is no matter of the user's
    for dag in (Pipeline("shop").control_dag(), Pipeline("shop").control_dag(render_template_as_native_obj=False)):
        control: PipelineControlOperator = rendered(
            dag, "control", reason=text, where=text, snapshot_id=text, tables=[text, "b"], sweep=True
        )
        assert (control.reason, control.where, control.snapshot_id) == (text, text, text)
        assert (control.tables, control.sweep) == ([text, "b"], True)
        empty: PipelineControlOperator = rendered(dag, "control", reason=None)
        assert (empty.reason, empty.where) == ("", "")


@pytest.mark.parametrize("text", [each for each in LOOKING if not templated(each)])
def test_what_is_no_template_is_no_matter_of_rendering(text: str) -> None:
    pipeline = Pipeline(
        "2024_01",
        source=Source("pg", tables=[text], table_options={"users": Table(exclude=[text])}),
        kafka=Kafka(topic_prefix="1.10"),
        spark=Spark(text, conf={"spark.a": text}),
    )
    dags = pipeline.dag(), pipeline.verify_dag(tables=[text]), pipeline.bounded_dag(), pipeline.control_dag()
    for dag in dags:
        for task in (rendered(dag, each) for each in dag.task_ids if hasattr(dag.get_task(each), "pipeline")):
            assert task.described() == Description.of(pipeline.as_dict())
    assert rendered(dags[1], "verify").verify_tables == [text]
    # that of a DAG, and of what is not a pipeline's
    assert rendered(dags[3], "start").trigger_dag_id == "2024_01"
    assert rendered(pipeline.control_dag(starts=text), "start").trigger_dag_id == text
    with dag_of("d", "") as dag:
        PipelineHealthOperator(task_id="t", kafka_conn_id=text, pipelines=[text])
    assert (rendered(dag, "t").kafka_conn_id, rendered(dag, "t").pipelines) == (text, [text])


@given(st.text())
def test_any_text_is_rendered_to_itself(text: str) -> None:
    control = _CONTROL.get_task("control")
    found = control.render_template(control.reason, {"params": {"reason": text}}, _CONTROL.get_template_env())  # type: ignore[typeddict-item]
    assert (type(found), found) == (str, text)


_CONTROL = Pipeline("shop").control_dag()


@pytest.mark.parametrize("only", [(), ("name", "kafka.topic_prefix", "source.conn_id")])
def test_a_text_of_the_form_is_the_pipelines_to_the_letter(only: tuple[str, ...]) -> None:
    with DAG("d", schedule=None, params=form.fields(only), render_template_as_native_obj=True) as dag:
        DeadLettersSensor(task_id="t", pipeline=form.pipeline(only))
    found = rendered(dag, "t", slot="2024_01", topic_prefix="1.10", postgres_conn_id="None").described()
    assert (found.name, found.kafka.topic_prefix, found.source.conn_id) == ("2024_01", "1.10", "None")
    if not only:
        assert found == Description("2024_01", source=Source("None"), kafka=Kafka(topic_prefix="1.10"))


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("topic_config", {"retention.ms": 604800000}, ("604800000",)),
        ("spark_conf", {"spark.executor.instances": 2, "spark.task.maxFailures": "9"}, ("2", "9")),
        ("table_options", {"users": {"mask": {"email": None, "name": "hash"}}}, ("null", "hash")),
        ("table_options", {"users": {"topic_config": {"retention.ms": 5}}}, ("5",)),
    ],
)
def test_the_form_takes_what_a_file_takes(name: str, value: dict[str, Any], meant: tuple[Any, ...]) -> None:
    """Airflow checks a field against its schema: numbers and nulls for texts are allowed as in YAML."""
    fields = form.fields()
    assert fields[name].resolve(value) == value
    with pytest.raises(ParamValidationError):
        fields[name].resolve({"users": ["no", "mapping", "of", "texts"]})
    with DAG("d", schedule=None, params=fields, render_template_as_native_obj=True) as dag:
        DeadLettersSensor(task_id="t", pipeline=form.pipeline())
    found = rendered(dag, "t", slot="shop", **{name: value}).described()
    options = found.source.table_options.get("users")
    texts = {
        "topic_config": found.kafka.topic_config,
        "spark_conf": found.spark.conf,
        "table_options": options and (options.mask or options.topic_config),
    }[name]
    assert tuple(texts.values()) == meant


def test_the_fields_of_the_ready_dags_are_as_they_were_filled_in() -> None:
    control, health = (runpy.run_path(str(DAGS / f"bottledwater_{name}.py"))["dag"] for name in ("control", "health"))
    assert rendered(control, "start", dag_id="2024_01").trigger_dag_id == "2024_01"
    # that of the pipeline, and none that begins with the defaults of its form
    for empty in ({}, {"dag_id": None}):
        assert rendered(control, "start", slot="2024_02", **empty).trigger_dag_id == "2024_02"
    assert rendered(health, "health", kafka_conn_id="2024_01").kafka_conn_id == "2024_01"


def test_a_dag_that_is_paused_is_not_triggered_as_if_it_started() -> None:
    start: Any = Pipeline("shop").control_dag().get_task("start").prepare_for_execution()
    dags = [SimpleNamespace(is_paused=True), SimpleNamespace(is_paused=False)]
    asked = []

    def get_dag(dag_id: str) -> Any:
        asked.append(dag_id)
        if not dags:
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.GENERIC_ERROR))
        return dags.pop(0)

    context: Any = {"ti": SimpleNamespace(get_dag=get_dag, xcom_push=lambda **_: None)}
    with pytest.raises(AirflowFailException, match=r"'shop' is paused.*Unpause it, and clear this task"):
        start.execute(context)
    for _ in range(2):  # one that does not exist is told by Airflow itself
        with pytest.raises(DagRunTriggerException):
            start.execute(context)
    assert asked == ["shop"] * 3


SCHEDULED = Schedules(bounded="@hourly", verify="@daily", backfill_by="changed_at")


def test_a_run_takes_up_what_is_changed_in_its_dag() -> None:
    """A bundle with versions pins a run to the one of its creation, and that of a stream lasts for months."""
    dags = Pipeline("shop", schedules=SCHEDULED).dags()
    assert [dag.disable_bundle_versioning for dag in dags] == [True] * 5
    assert not Pipeline("shop").dag(disable_bundle_versioning=False).disable_bundle_versioning


def test_default_args_are_added_to_those_of_each_dag() -> None:
    made = [
        Pipeline("shop", schedules=SCHEDULED).dags(default_args=more)
        for more in (None, {}, {"owner": "data", "retries": 7})
    ]
    assert [dag.default_args["retries"] for dag in made[0]] == [3, 2, 3, 3, 3]
    for before, empty, after in zip(*made, strict=True):
        assert empty.default_args == before.default_args
        assert after.default_args == {**before.default_args, "owner": "data", "retries": 7}


def test_a_verification_that_fails_for_a_reason_that_passes_is_tried_again() -> None:
    for dag in (Pipeline("shop").verify_dag(), runpy.run_path(str(DAGS / "bottledwater_verify.py"))["dag"]):
        assert dag.get_task("verify").retries == 3


@pytest.mark.parametrize(
    ("source", "tables"),
    [
        ({}, ["*.*"]),
        ({"tables": ["orders", "!tmp_*"]}, ["orders", "!tmp_*"]),
        ({"tables": ["!tmp_*"]}, ["*.*", "!tmp_*"]),
        ({"schemas": ["sales", "!tmp"]}, ["sales.*"]),
        ({"schemas": ["sales"], "tables": ["orders"]}, ["orders", "sales.*"]),
    ],
)
def test_a_backfill_is_of_all_tables_of_its_pipeline(source: dict[str, Any], tables: list[str]) -> None:
    dag = Pipeline("shop", source=Source("pg", **source)).backfill_dag(by="d")
    assert list(dag.get_task("backfill").tables) == tables


#: the bounds of that day, with the zone's offsets
BERLIN = "2026-03-29T00:00:00+01:00", "2026-03-30T00:00:00+02:00"


@pytest.mark.parametrize(
    ("schedule", "bounds"),
    [
        (None, ("2026-03-28T00:00:00+00:00", "2026-03-29T00:00:00+00:00")),
        ("@daily", ("2026-03-28T00:00:00+00:00", "2026-03-29T00:00:00+00:00")),
        ("5 * * * *", ("2026-03-29T22:05:00+00:00", "2026-03-29T23:05:00+00:00")),
        (timedelta(hours=2), ("2026-03-29T21:30:00+00:00", "2026-03-29T23:30:00+00:00")),
        # the days of that zone, of which this one has 23 hours
        (
            CronDataIntervalTimetable("0 0 * * *", timezone="Europe/Berlin"),
            BERLIN,
        ),
        (interval.CronDataIntervalTimetable("0 0 * * *", timezone="Europe/Berlin"), BERLIN),
        (
            AssetOrTimeSchedule(
                assets=[Asset("a")], timetable=CronDataIntervalTimetable("0 0 * * *", timezone="Europe/Berlin")
            ),
            BERLIN,
        ),
        *(
            (
                # a run by hand is of the time before it
                several("0 0 * * *", "0 0 1 * *", timezone="Europe/Berlin", interval=timedelta(hours=2)),
                ("2026-03-29T23:30:00+02:00", "2026-03-30T01:30:00+02:00"),
            )
            for several in (MultipleCronTriggerTimetable, trigger.MultipleCronTriggerTimetable)
        ),
        (
            interval.DeltaDataIntervalTimetable(timedelta(hours=2)),
            ("2026-03-29T21:30:00+00:00", "2026-03-29T23:30:00+00:00"),
        ),
    ],
)
def test_a_backfill_is_of_the_data_interval_of_its_run(schedule: Any, bounds: tuple[str, str]) -> None:
    dag = Pipeline("shop").backfill_dag(by="{{ params.column }}", schedule=schedule, params={"column": "d"})
    scheduled = DagSerialization.from_dict(DagSerialization.to_dict(dag)).timetable
    run = scheduled.infer_manual_data_interval(run_after=pendulum.datetime(2026, 3, 29, 23, 30))
    backfill = rendered(dag, "backfill", {"data_interval_start": run.start, "data_interval_end": run.end})
    assert backfill.where == "d >= '{}' AND d < '{}'".format(*bounds)


def test_a_timetable_whose_time_zone_is_not_known_is_refused() -> None:
    schedule: Any = SimpleNamespace(next_dagrun_info=None)
    with pytest.raises(Refused, match=r"SimpleNamespace does not say in which time zone .* an attribute timezone"):
        Pipeline("shop").backfill_dag(by="d", schedule=schedule)
