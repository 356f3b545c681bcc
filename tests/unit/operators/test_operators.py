"""What all operators and sensors share: templates, copies, and which errors a retry is left for."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

import airflow_bottledwater.provision.create as creation
import airflow_bottledwater.provision.drop as dropping
from airflow_bottledwater import errors, processes
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.spark_job import SparkJobHook
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, failing
from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator, DropReplicationSlotOperator
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor
from airflow_bottledwater.spark import supervise
from airflow_bottledwater.task_group import BottledWaterTaskGroup

OPERATORS = [
    ReplicationPreflightOperator, CreateReplicationSlotOperator, DropReplicationSlotOperator, SnapshotToKafkaOperator,
    StreamToKafkaOperator, StreamErrorSensor,
]  # fmt: skip


CONTEXT: Any = {
    "ti": SimpleNamespace(start_date=None, try_number=1, max_tries=0, dag_id="d", run_id="r", task_id="t"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_all_of_a_pipelines_parameters_are_templated(operator: Any) -> None:
    assert set(PIPELINE_FIELDS) <= set(operator.template_fields)
    made = operator(task_id="t", slot="{{ params.slot }}", settings={"lanes": "{{ 3 }}"})
    for name in operator.template_fields:
        assert hasattr(made, name), name
    # as given: Airflow renders them before they are used
    assert (made.slot, made.settings) == ("{{ params.slot }}", {"lanes": "{{ 3 }}"})


@pytest.mark.parametrize("operator", [*OPERATORS, ReplicationSlotLagSensor])
def test_templates_are_rendered(operator: Any) -> None:
    with DAG("d", schedule=None, render_template_as_native_obj=True):
        made = operator(task_id="t", slot="{{ name }}")
    made.render_template_fields({"name": "orders"})
    assert made.slot == "orders"


def test_native_templates_that_look_like_numbers_stay_texts() -> None:
    with DAG("d", schedule=None, render_template_as_native_obj=True):
        made = ReplicationPreflightOperator(task_id="t", slot="{{ s }}", topic_prefix="{{ p }}", tables="{{ t }}")
    made.render_template_fields({"s": "5", "p": "2024", "t": ["a", "b"]})
    assert (
        made.pipeline_settings() | {"slot": "5", "topic_prefix": "2024", "tables": ["a", "b"]}
        == made.pipeline_settings()
    )


@pytest.mark.parametrize("value", [None, "", [], " , "])
def test_no_tables_means_all(value: Any) -> None:
    assert ReplicationPreflightOperator(task_id="t", tables=value).pipeline_settings()["tables"] == []


@pytest.mark.parametrize("value", ["a, public.b", ["a", " public.b "], ("a", "public.b", "")])
def test_tables_may_come_as_text(value: Any) -> None:
    assert ReplicationPreflightOperator(task_id="t", tables=value).pipeline_settings()["tables"] == ["a", "public.b"]


@pytest.mark.parametrize("operator", [*OPERATORS, ReplicationSlotLagSensor])
def test_an_operator_can_be_copied(operator: Any) -> None:
    made = operator(task_id="t", slot="orders")
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again.slot == "orders"
        again.on_kill()


@pytest.mark.parametrize("operator", [*OPERATORS, ReplicationSlotLagSensor])
def test_a_parameter_that_is_not_known_is_refused(operator: Any) -> None:
    with pytest.raises(TypeError):
        operator(task_id="t", slott="orders")


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (errors.Refused("no"), True),
        (errors.SettingError("slot", "X", "x"), True),
        (errors.PreflightError(["a", "b"]), True),
        (errors.SlotError("gone"), True),
        (errors.StateError("gone"), True),
        (errors.RecordError("too large"), True),
        (errors.TakenOver("other"), True),
        (errors.Outage("away"), False),
        (errors.SlotInUse("busy"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_retry_cannot_mend_fails_at_once(error: errors.BottledWaterError, permanent: bool) -> None:
    with pytest.raises(AirflowFailException if permanent else type(error)) as raised, failing():
        raise error
    assert str(raised.value) == str(error)


def test_what_is_not_ours_passes() -> None:
    with pytest.raises(ZeroDivisionError), failing():
        raise ZeroDivisionError


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("operator", "module", "function"),
    [
        (ReplicationPreflightOperator, preflight, "run"),
        (CreateReplicationSlotOperator, creation, "create"),
        (DropReplicationSlotOperator, dropping, "drop"),
    ],
)
def test_operators_tell_permanent_from_transient(
    monkeypatch: pytest.MonkeyPatch, operator: Any, module: Any, function: str
) -> None:
    for error, expected in ((errors.Refused("no"), AirflowFailException), (errors.Outage("away"), errors.Outage)):

        def fails(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(module, function, fails)
        with pytest.raises(expected):
            operator(task_id="t").execute(CONTEXT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_missing_connection_fails_at_once(operator: Any) -> None:
    context = {**CONTEXT, "task_state_store": None}
    with pytest.raises(AirflowFailException, match="no connection 'pg_nowhere'"):
        operator(task_id="t", postgres_conn_id="pg_nowhere").execute(context)


@pytest.mark.usefixtures("connections")
def test_when_to_drop_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "airflow_bottledwater.provision.drop.drop", lambda pipeline, when: asked.append(when) or "Dropped."
    )
    with pytest.raises(AirflowFailException, match="retired, always or never"):
        DropReplicationSlotOperator(task_id="t", when="sometimes").execute(CONTEXT)
    assert DropReplicationSlotOperator(task_id="t", when="always").execute(CONTEXT) == "Dropped."
    assert DropReplicationSlotOperator(task_id="t").execute(CONTEXT) == "Dropped."
    assert asked == ["always", "retired"]


@pytest.mark.usefixtures("connections")
def test_a_snapshot_that_is_skipped_starts_nothing() -> None:
    assert SnapshotToKafkaOperator(task_id="t", skip_snapshot="True").execute({}) == {"skipped": True}


def test_killed_while_the_slot_is_made_the_creation_ends(monkeypatch: pytest.MonkeyPatch, connections: str) -> None:
    made = CreateReplicationSlotOperator(task_id="t")

    def create(pipeline: Any, *, stopped: Any) -> None:
        assert not stopped.is_set()
        made.on_kill()
        assert stopped.is_set()
        raise errors.StopRequested("asked")

    monkeypatch.setattr("airflow_bottledwater.provision.create.create", create)
    with pytest.raises(AirflowFailException):
        made.execute({})


# ------------------------------------------------------------------ what Spark cannot do is said first
@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to source and broker."""
    done: list[str] = []
    findings = SimpleNamespace(tables=[], warnings=[])
    record = SimpleNamespace(name="orders", consistent_point=0)
    monkeypatch.setattr(preflight, "run", lambda pipeline: done.append("preflight") or findings)
    monkeypatch.setattr(
        "airflow_bottledwater.provision.create.create", lambda pipeline, stopped: done.append("create") or record
    )
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    return done


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("extra", "executor", "problem", "advised"),
    [
        ({"deploy-mode": "cluster"}, "LocalExecutor", "deploy-mode cluster", {"extra": {"deploy-mode": "client"}}),
        ({}, "CeleryExecutor,LocalExecutor", "executor is CeleryExecutor", {"executor": "LocalExecutor"}),
        (None, "LocalExecutor", "no Spark connection 'spark_other'", {"extra": {}}),
    ],
    ids=["cluster mode", "executor", "no connection"],
)
def test_what_the_stream_cannot_do_is_refused_before_anything_is_made(
    connect: Any,
    checked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: Any,
    executor: str,
    problem: str,
    advised: Any,
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    if extra is not None:
        connect("spark_other", conn_type="spark", host="yarn", extra=extra)
    operators: list[Any] = [ReplicationPreflightOperator, CreateReplicationSlotOperator]
    for operator in operators:
        with pytest.raises(AirflowFailException, match=problem):
            operator(task_id="t", spark_conn_id="spark_other").execute(CONTEXT)
        # without the connection nothing of it is known
        operator(task_id="t").execute(CONTEXT)
    assert checked == ["preflight", "preflight", "create"]
    # as it advises
    if "extra" in advised:
        connect("spark_other", conn_type="spark", host="yarn", extra=advised["extra"])
    for operator in operators:
        operator(task_id="t", spark_conn_id="spark_other", stream_executor=advised.get("executor")).execute(CONTEXT)


@pytest.mark.usefixtures("connections", "checked")
def test_preflight_names_the_problems_of_spark_with_all_others(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connect("spark_other", conn_type="spark", host="local[2]", extra={"spark-binary": "spark3-submit"})

    def fails(_: Any) -> None:
        raise errors.PreflightError(["wal_level is replica"])

    made = ReplicationPreflightOperator(task_id="t", spark_conn_id="spark_other")
    with pytest.raises(AirflowFailException, match=r"spark3-submit .* is not on the PATH"):
        made.execute(CONTEXT)
    monkeypatch.setattr(preflight, "run", fails)
    with pytest.raises(AirflowFailException, match=r"(?s)spark3-submit .* is not on the PATH.*wal_level"):
        made.execute(CONTEXT)
    # the stream's task runs elsewhere: what this host has does not tell
    made.stream_executor, made.executor = "LocalExecutor", "CeleryExecutor"
    with pytest.raises(AirflowFailException) as raised:
        made.execute(CONTEXT)
    assert str(raised.value) == "wal_level is replica"


# ------------------------------------------------------------------ the snapshot's job
OLD, NEW = ({"folder": f"/tmp/nowhere/{name}", "host": socket.gethostname()} for name in ("old", "new"))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, connections: str, tmp_path: Path) -> SimpleNamespace:
    """Jobs that are not there: who lives, and what was done."""
    world = SimpleNamespace(done=[], living=set(), result={"ok": True, "rows": 7}, stops=True)

    def stop(identity: Any, **_: Any) -> bool:
        world.done.append(f"stop {identity['folder'][-3:]}")
        if world.stops:
            world.living.discard(identity["folder"])
        return bool(world.stops)

    prepared = (NEW, tmp_path / "pipeline-x.json")
    monkeypatch.setattr(SparkJobHook, "prepare", staticmethod(lambda *_: prepared))
    monkeypatch.setattr(SparkJobHook, "start", lambda self, identity, application: world.done.append("start"))
    monkeypatch.setattr(
        spark_job, "wait", lambda identity, write: world.done.append(f"wait {identity['folder'][-3:]}") or world.result
    )
    monkeypatch.setattr(supervise, "running", lambda folder: str(folder) in world.living)
    monkeypatch.setattr(spark_job, "stop", stop)
    monkeypatch.setattr(spark_job, "forget", lambda identity: world.done.append(f"forget {identity['folder'][-3:]}"))
    return world


def snapshot_of(known: Any, *, try_number: int = 2, max_tries: int = 2, retries: int = 2) -> tuple[Any, dict[str, Any]]:
    values = {"bottledwater_job": known}
    store = SimpleNamespace(get=values.get, set=lambda key, value: values.update({key: value}))
    ti = SimpleNamespace(try_number=try_number, max_tries=max_tries, dag_id="d", run_id="r", task_id="t")
    return SnapshotToKafkaOperator(task_id="t", retries=retries).execute({"task_state_store": store, "ti": ti}), values


def test_a_retry_of_the_snapshot_follows_a_job_that_runs(jobs: SimpleNamespace) -> None:
    jobs.living.add(OLD["folder"])
    assert snapshot_of(OLD)[0] == {"rows": 7}
    assert jobs.done == ["wait old", "forget old"]


def test_a_retry_of_the_snapshot_submits_behind_a_job_that_died(jobs: SimpleNamespace) -> None:
    assert snapshot_of(OLD)[1]["bottledwater_job"] == NEW
    assert jobs.done == ["forget old", "start", "wait new", "forget new"]


@pytest.mark.parametrize("tries", [(2, 2), (4, 5)])
def test_a_retry_of_the_snapshot_on_another_host_takes_over(jobs: SimpleNamespace, tries: tuple[int, int]) -> None:
    """On Kubernetes each try, and each life of a cleared task, has a host of its own; the new job's claim ends the old one."""
    snapshot_of({**OLD, "host": "pod-1"}, try_number=tries[0], max_tries=tries[1])
    assert jobs.done == ["start", "wait new", "forget new"]


def test_a_cleared_snapshot_ends_the_earlier_job_first(jobs: SimpleNamespace) -> None:
    jobs.living.add(OLD["folder"])
    snapshot_of(OLD, try_number=5, max_tries=5, retries=1)
    assert jobs.done == ["stop old", "forget old", "start", "wait new", "forget new"]
    jobs.done.clear()
    jobs.stops = False
    with pytest.raises(AirflowFailException, match="does not end"):
        snapshot_of(OLD, try_number=5, max_tries=5, retries=1)
    assert jobs.done == ["stop old"]


def test_a_snapshot_that_was_interrupted_is_left_for_a_retry(jobs: SimpleNamespace) -> None:
    jobs.result = {"ok": False, "kind": "Interrupted", "error": "SIGTERM from outside", "transient": True}
    with pytest.raises(errors.JobFailed, match="SIGTERM"):
        snapshot_of(None)
    jobs.result = {"ok": True, "stopped": True}
    with pytest.raises(AirflowFailException, match="Clear the task"):
        snapshot_of(None)


# ------------------------------------------------------------------ the teardown
@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("when", ["retired", "always", "never"])
def test_the_teardown_stops_what_its_run_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str) -> None:
    """Marked while no triggerer runs, a stream's job is stopped by nobody else."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    pipeline = ReplicationPreflightOperator(task_id="t").pipeline_hook.pipeline()
    owner = {"dag_id": "d", "run_id": "r", "slot": "bottledwater", "postgres_conn_id": "postgres_default"}
    folders = []
    for for_whom in (owner, {**owner, "run_id": "another"}):
        identity, _ = SparkJobHook.prepare(pipeline, "stream", for_whom)
        folders.append(Path(identity["folder"]))
        supervise.start(folders[-1], ["sleep", "100"], dict(os.environ))
    left = json.loads((folders[0] / "supervisor.json").read_text())
    running = []
    monkeypatch.setattr(
        "airflow_bottledwater.provision.drop.drop",
        lambda pipeline, when: running.append(list(map(supervise.running, folders))),
    )
    try:
        # a command without a driver is given five seconds
        DropReplicationSlotOperator(task_id="t", when=when).execute(CONTEXT)
        # before the slot is dropped or kept
        assert running == [[False, True]]
        assert processes.started(left["pid"]) is None and not folders[0].exists()
    finally:
        for folder in folders:
            supervise.stop(folder, timeout=0.1)


def test_the_task_group_is_the_pipeline() -> None:
    with DAG("d", schedule=None):
        group = BottledWaterTaskGroup(
            pipeline={"slot": "orders", "tables": ["a"]}, stream={"timeout": 5.0}, snapshot={"retries": 3}
        )
    assert group.stream.upstream_task_ids == {"bottledwater.snapshot"}
    assert group.drop_slot.is_teardown and group.create_slot.is_setup
    assert {
        "bottledwater.stream",
        "bottledwater.slot_lag",
        "bottledwater.error_state",
    } <= group.drop_slot.upstream_task_ids
    assert group.preflight.spark_conn_id == group.create_slot.spark_conn_id == "spark_default"
    assert (group.stream.timeout, group.snapshot.retries, group.slot_lag.slot) == (5.0, 3, "orders")
    # a stream has no end: a week, Airflow's default, is too short for whoever watches it
    assert group.error_state.timeout > 365 * 86400


@pytest.mark.parametrize("operator", [*OPERATORS, ReplicationSlotLagSensor])
def test_the_parameters_that_are_documented_are_those_that_it_takes(operator: Any) -> None:
    taken = {p for p in inspect.signature(operator.__init__).parameters if p not in ("self", "kwargs", "args")}
    documented = set(re.findall(r":param (\w+):", operator.__doc__))
    assert documented
    # Airflow's own: its documentation has it
    assert taken - {"deferrable"} <= documented
    made = operator(task_id="t", slot="orders")
    assert [name for name in documented if not hasattr(made, name) and not hasattr(made, f"_{name}")] == []
