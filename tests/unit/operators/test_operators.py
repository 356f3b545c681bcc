"""What all operators and sensors share: templates, copies, and which errors a retry is left for."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import inspect
import json
import math
import pickle
import re
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models import dagbag, taskinstance
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization

import airflow_bottledwater.provision.create as creation
import airflow_bottledwater.provision.drop as dropping
from airflow_bottledwater import errors
from airflow_bottledwater.hooks import spark_job, tasks
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import orphans, requests, run_directory, snapshots, stop, watch
from airflow_bottledwater.jobs.run_directory import Differences
from airflow_bottledwater.jobs.watch import Ended
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.base import PipelineMixin, asked_at, failing, is_first_try, note_life
from airflow_bottledwater.operators.control import PipelineControlOperator
from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator, DropReplicationSlotOperator
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.operators.verify import VerifyTopicsOperator
from airflow_bottledwater.pipeline.description import Description, Kafka, Source, Spark
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import accept, consequences, live, pausing, preflight, redrive
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor
from airflow_bottledwater.sensors.stream_position import StreamPositionSensor
from airflow_bottledwater.state import control_topic, saved
from airflow_bottledwater.state.control_records import JobRecord, SnapshotRequest, encode, job_key
from airflow_bottledwater.task_group import BottledWaterTaskGroup
from tests.support.lives import TRIGGERED, made_at, run_of, ti_of

OPERATORS: list[Any] = [
    ReplicationPreflightOperator, CreateReplicationSlotOperator, DropReplicationSlotOperator, SnapshotToKafkaOperator,
    StreamToKafkaOperator, StreamErrorSensor,
]  # fmt: skip


ON_OTHER = Description("orders", spark=Spark("spark_other"))
NO_SNAPSHOT = Description("orders", source=Source(skip_snapshot=True), spark=Spark("spark_other"))

CONTEXT: Any = {
    "task_state_store": SimpleNamespace(get=lambda key: None, set=lambda *_, **__: None, delete=lambda key: None),
    "ti": SimpleNamespace(
        id=made_at(), start_date=None, try_number=1, max_tries=0, dag_id="d", run_id="r", task_id="t", map_index=-1
    ),
    "dag_run": run_of(),
}


ORDERS = Description("orders", kafka=Kafka(format="json"))

#: nested, and with a number, a list and a switch among the values
TEMPLATES = Description(
    "{{ name }}",
    source=Source("{{ pg }}", tables="{{ tables }}"),  # type: ignore[arg-type]
    kafka=Kafka(format="json", topic_prefix="{{ prefix }}", partitions="{{ partitions }}"),  # type: ignore[arg-type]
    outage_timeout="{{ seconds }}",  # type: ignore[arg-type]
)

ALL = [*OPERATORS, ReplicationSlotLagSensor, StreamPositionSensor]


@pytest.mark.parametrize("operator", ALL)
def test_templates_work_inside_of_a_pipeline(operator: Any) -> None:
    for name in operator.template_fields:
        assert hasattr(operator(task_id=f"{name}_", pipeline=ORDERS), name), name
    with DAG("d", schedule=None, render_template_as_native_obj=True):
        made = operator(task_id="t", pipeline=TEMPLATES)
    # a native template makes a number of 2024
    given = {"name": "orders", "pg": "pg", "tables": ["a", "b"], "prefix": "2024", "partitions": 6, "seconds": 7}
    made.render_template_fields(given)
    described = made.described()
    assert (described.name, described.source.conn_id, described.source.tables) == ("orders", "pg", ("a", "b"))
    assert (described.kafka.topic_prefix, described.kafka.partitions, described.outage_timeout) == ("2024", 6, 7.0)
    assert made.pipeline_summary == {"name": "orders", "source": {"conn_id": "pg"}, "kafka": {}}
    # the object that other tasks have, too, is as it was
    assert TEMPLATES.name == "{{ name }}"
    made.pipeline["kafka"]["partitions"] = 0
    with pytest.raises(errors.SettingError, match=r"'kafka.partitions' cannot be 0"):
        made.described()


@pytest.mark.parametrize("operator", ALL)
def test_default_arguments_of_a_dag_reach_every_operator(operator: Any) -> None:
    """All of one DAG work on one pipeline."""
    with DAG("d", schedule=None, default_args={"pipeline": ORDERS, "max_lag": 5}):
        made, own = operator(task_id="t"), operator(task_id="own", pipeline="items")
    assert (made.described().name, own.described().name) == ("orders", "items")
    if operator is ReplicationSlotLagSensor:
        assert made.max_lag == 5


@pytest.mark.filterwarnings("ignore:Task .* was never mapped")
@pytest.mark.parametrize("operator", ALL)
def test_an_operator_can_be_mapped(operator: Any) -> None:
    with DAG("d", schedule=None, default_args={"retries": 3}) as dag:
        mapped = operator.partial(task_id="t").expand(pipeline=[ORDERS.as_dict(), "items"])
        other = operator.partial(task_id="u", pipeline=ORDERS).expand(doc=["a", "b"])
    made = mapped.unmap({"pipeline": ORDERS.as_dict()})
    assert (type(made), made.described(), made.retries) == (operator, ORDERS, 3)
    assert mapped.unmap({"pipeline": "items"}).described().name == "items"
    assert other.unmap({"doc": "a"}).described() == ORDERS
    # as the scheduler and the UI have it
    assert "'name': 'orders'" in json.dumps(DagSerialization.to_dict(dag))
    with pytest.raises(TypeError, match="slott"):
        operator.partial(task_id="t", slott="orders")
    with DAG("d", schedule=None), pytest.raises(TypeError, match="slott"):
        operator.partial(task_id="t").expand(slott=["orders"])


def test_what_the_pipeline_says_of_spark_is_templated() -> None:
    connected: Any = [SnapshotToKafkaOperator, StreamToKafkaOperator]
    for operator in connected:
        made = operator(task_id="t", pipeline=Description("orders", spark=Spark("{{ spark }}", deploy_mode="client")))
        made.render_template_fields({"spark": "spark_other"})
        hook = made._get_hook()
        assert (hook._conn_id, hook._deploy_mode) == ("spark_other", "client")
    streaming = StreamToKafkaOperator(
        task_id="t", pipeline=ORDERS, timeout="{{ t }}", restarts="{{ r }}", bounded="{{ b }}"
    )
    streaming.render_template_fields({"t": 60, "r": 2, "b": True})  # type: ignore[arg-type]
    assert (streaming._limits(), streaming.bounded) == ((60.0, 2), "True")


@pytest.mark.parametrize("operator", [SnapshotToKafkaOperator, StreamToKafkaOperator, VerifyTopicsOperator])
@pytest.mark.parametrize(
    "given",
    [{"conn_id": "yarn"}, {"deploy_mode": "cluster"}, {"application_args": ["a"]}, {"post_submit_commands": ["a"]}],
)
def test_what_a_job_would_not_heed_is_refused(operator: Any, given: dict[str, Any]) -> None:
    with pytest.raises(errors.Refused, match=rf"does not take {next(iter(given))}, .*Spark\(conn_id"):
        operator(task_id="t", pipeline=ORDERS, **given)
    with DAG("d", schedule=None, default_args=given):
        with pytest.raises(errors.Refused) as raised:
            operator(task_id="t", pipeline=ORDERS)
        advised = re.search(r"default_args name it .* give this one (\w+)=(\S+) \(in the task group", str(raised.value))
        assert advised
        advice = {advised[1]: ast.literal_eval(advised[2])}
        operator(task_id="advised", pipeline=ORDERS, **advice)
        BottledWaterTaskGroup(pipeline=ORDERS, snapshot=advice, stream=advice)


def test_the_oldest_provider_of_spark_that_is_allowed_has_no_commands_behind_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = SparkSubmitOperator.__init__

    def without(self: Any, **arguments: Any) -> None:
        begin(self, **arguments)
        vars(self).pop("post_submit_commands")

    monkeypatch.setattr(SparkSubmitOperator, "__init__", without)
    StreamToKafkaOperator(task_id="t", pipeline=ORDERS)


@pytest.mark.parametrize("operator", ALL)
def test_what_the_ui_shows_is_a_template_field_without_secrets(operator: Any) -> None:
    assert set(operator.template_fields_renderers) <= set(operator.template_fields)
    assert operator.template_fields_renderers["pipeline"] == "json"
    secret = Description(
        "orders",
        source=Source(dsn="host=db password=hunter2"),
        kafka=Kafka(properties={"sasl.password": "hunter3"}, registry_properties={"url": "http://me:hunter4@r"}),
    )
    with DAG("d", schedule=None, default_args={"pipeline": secret}) as dag:
        made = operator(task_id="t")
    assert json.loads(json.dumps(made.pipeline)) == {"name": "orders"}
    assert "hunter" not in json.dumps(DagSerialization.to_dict(dag))
    # Airflow keeps a DAG's arguments as they are
    for name, value in secret.as_dict(secrets=True).items():
        if name != "name":
            with pytest.raises(errors.SettingError, match=rf"'{name}\.\w+' may hold a secret") as raised:
                operator(task_id="t", pipeline={name: value})
            assert "hunter" not in str(raised.value)


def description(operator: Any) -> str:
    """The docstring of the class that lists an operator's parameters: its own, or its base's."""
    return next(str(each.__doc__) for each in operator.__mro__ if "__init__" in vars(each))


@pytest.mark.parametrize("operator", ALL)
def test_all_operators_take_a_pipeline_in_one_way(operator: Any) -> None:
    """Each lists the parameter itself: with one type and one description."""
    taken = inspect.signature(PipelineMixin._set_pipeline).parameters["pipeline"]
    own = inspect.signature(operator.__init__).parameters["pipeline"]
    assert own.annotation == taken.annotation and own.default is inspect.Parameter.empty
    line = (
        "    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its "
        "file. (templated)"
    )
    assert line in description(operator).splitlines()


def test_a_pipeline_may_be_the_path_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "orders.yaml"
    path.write_text("name: orders\nkafka: {format: json}\n")
    for given in (path, str(path)):
        assert ReplicationPreflightOperator(task_id="t", pipeline=given).described() == ORDERS
    path.write_text("name: orders\nkafka: {formt: json}\n")
    with pytest.raises(errors.SettingError, match=rf"{path}: setting 'kafka.formt' .* \(did you mean 'format'\?\)"):
        ReplicationPreflightOperator(task_id="t", pipeline=path)
    with pytest.raises(errors.SettingError, match=r"'kafka.formt'"):
        ReplicationPreflightOperator(task_id="t", pipeline={"kafka": {"formt": "json"}})
    templated = ReplicationPreflightOperator(task_id="t", pipeline="{{ folder }}/orders.yaml")
    path.write_text("name: orders\nkafka: {format: json}\n")
    templated.render_template_fields({"folder": str(tmp_path)})  # type: ignore[arg-type]
    assert templated.described() == ORDERS


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    "given", ["orders", Description("orders", kafka=Kafka(partitions=5), saved=True)], ids=["name", "object"]
)
def test_the_settings_of_a_pipeline_that_exists_are_those_of_its_saved_state(
    monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    asked: list[Settings] = []
    found = {"format": "json", "tables": ["a"], "partitions": 6}
    monkeypatch.setattr(saved, "settings_of", lambda pipeline: asked.append(pipeline) or found)
    made = StreamToKafkaOperator(task_id="t", pipeline=given)
    pipeline = made.pipeline_hook.pipeline()
    assert (pipeline.slot, pipeline.format, pipeline.tables) == ("orders", "json", ("a",))
    assert pipeline.partitions == (6 if given == "orders" else 5)
    assert made.pipeline_hook.arguments()["settings"]["tables"] == ["a"]
    assert [each.slot for each in asked] == ["orders"]
    # also of one that has the usual name
    assert StreamToKafkaOperator(task_id="u", pipeline="bottledwater").pipeline_hook.pipeline().partitions == 6


@pytest.mark.parametrize("operator", ALL)
def test_an_operator_can_be_copied(operator: Any) -> None:
    made = operator(task_id="t", pipeline=ORDERS)
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again.described() == ORDERS
        again.on_kill()


@pytest.mark.parametrize("operator", ALL)
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


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """When the pipeline was asked to stop last."""
    found = SimpleNamespace(at=-math.inf)

    def refuse(pipeline: Any, at: float | None) -> None:
        if (at or 0.0) < found.at:
            raise errors.PipelineStopped("It was asked to stop.")

    monkeypatch.setattr(requests, "refuse_stopped", refuse)
    return found


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why no job could begin, as it was recorded."""
    found: list[str] = []
    monkeypatch.setattr(
        requests, "not_begun", lambda _, why, claim, retry: found.append(f"{why}{' (a retry)' * retry}")
    )
    return found


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("operator", [ReplicationPreflightOperator, CreateReplicationSlotOperator])
def test_why_no_job_can_begin_is_recorded_if_a_retry_cannot_help(
    operator: Any, noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Exception] = [errors.Outage("away"), *(errors.Refused("The slot is lost."),) * 3]

    def fails(*_: Any, **__: Any) -> None:
        raise faults.pop(0)

    monkeypatch.setattr(preflight, "run", fails)
    monkeypatch.setattr(creation, "create", fails)
    with pytest.raises(errors.Outage):
        operator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)
    assert not noted
    with pytest.raises(AirflowFailException):
        operator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)
    assert noted == ["The slot is lost."]
    # the pipeline may have been stopped since the first try
    later = {**CONTEXT, "ti": SimpleNamespace(id=made_at(), try_number=2, max_tries=0)}
    with pytest.raises(AirflowFailException):
        operator(task_id="t", pipeline=ON_OTHER).execute(later)
    assert noted[1:] == ["The slot is lost. (a retry)"]

    def away(*_: Any, **__: Any) -> None:
        raise errors.Outage("Kafka is away.")

    # the task says what is wrong, whether or not that can be recorded
    monkeypatch.setattr(requests, "not_begun", away)
    with pytest.raises(AirflowFailException, match="The slot is lost"):
        operator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)


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
        monkeypatch.setattr(orphans, "unfinished", lambda *_: [])
        monkeypatch.setattr(live, "name_of", lambda pipeline: "name")
        with pytest.raises(expected):
            operator(task_id="t", pipeline=ORDERS).execute(CONTEXT)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_connection_that_is_not_found_is_looked_up_again(operator: Any) -> None:
    """Airflow says the same where a secrets backend is away: so the task may be tried again."""
    with pytest.raises(errors.Outage, match="does not find the connection 'pg_nowhere'"):
        operator(task_id="t", pipeline=Description("orders", source=Source("pg_nowhere"))).execute(CONTEXT)


@pytest.mark.usefixtures("connections")
def test_when_to_drop_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "airflow_bottledwater.provision.drop.drop", lambda pipeline, when: asked.append(when) or "Dropped."
    )
    monkeypatch.setattr(orphans, "unfinished", lambda *_: [])
    monkeypatch.setattr(live, "name_of", lambda pipeline: "name")
    with pytest.raises(AirflowFailException, match="retired, always or never"):
        DropReplicationSlotOperator(task_id="t", pipeline=ORDERS, when="sometimes").execute(CONTEXT)
    assert DropReplicationSlotOperator(task_id="t", pipeline=ORDERS, when="always").execute(CONTEXT) == "Dropped."
    assert DropReplicationSlotOperator(task_id="t", pipeline=ORDERS).execute(CONTEXT) == "Dropped."
    assert asked == ["always", "retired"]


@pytest.mark.usefixtures("connections")
def test_a_snapshot_that_is_skipped_starts_nothing() -> None:
    assert SnapshotToKafkaOperator(task_id="t", pipeline=NO_SNAPSHOT).execute(CONTEXT) == {"skipped": True}


def test_killed_while_the_slot_is_made_the_creation_ends(monkeypatch: pytest.MonkeyPatch, connections: str) -> None:
    made = CreateReplicationSlotOperator(task_id="t", pipeline=ORDERS)

    def create(pipeline: Any, *, stopped: Any) -> None:
        assert not stopped.is_set()
        made.on_kill()
        assert stopped.is_set()
        raise errors.StopRequested("asked")

    monkeypatch.setattr("airflow_bottledwater.provision.create.create", create)
    # no user has ended it: a worker may have been shut down
    with pytest.raises(errors.Outage, match="A retry goes on"):
        made.execute(CONTEXT)


# ------------------------------------------------------------------ what Spark cannot do is said first
@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to source and broker."""
    done: list[str] = []
    findings = SimpleNamespace(tables=[], warnings=[], notes=[])
    record = SimpleNamespace(name="orders", consistent_point=0)
    monkeypatch.setattr(preflight, "run", lambda pipeline: done.append("preflight") or findings)
    monkeypatch.setattr(
        "airflow_bottledwater.provision.create.create", lambda pipeline, stopped: done.append("create") or record
    )
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    # Spark takes seconds to start; tests/unit/hooks/test_spark_programs.py tries it
    monkeypatch.setattr(spark_job, "_why_not_started", lambda *_: "")
    return done


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("extra", "executor", "problem", "advised"),
    [
        ({"deploy-mode": "cluster"}, "LocalExecutor", "no deploy-mode cluster", {"extra": {"deploy-mode": "client"}}),
        ({}, "KubernetesExecutor,LocalExecutor", "of KubernetesExecutor", {"stream": {"executor": "LocalExecutor"}}),
        ({}, "KubernetesExecutor", "of KubernetesExecutor", {"stream": {"deferrable": False}}),
        (
            {"deploy-mode": "cluster"},
            "LocalExecutor",
            "no deploy-mode cluster",
            {"pipeline": Description("orders", spark=Spark("spark_other", deploy_mode="client"))},
        ),
    ],
    ids=["cluster mode", "executor", "executor, staying", "the pipeline's own mode"],
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
    connect("spark_other", conn_type="spark", host="spark://m:7077", extra=extra)
    operators: list[Any] = [ReplicationPreflightOperator, CreateReplicationSlotOperator]
    for operator in operators:
        with pytest.raises(AirflowFailException, match=problem):
            operator(task_id="t", pipeline=ON_OTHER, stream={}).execute(CONTEXT)
        # without the tasks nothing of it is known
        operator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)
    assert checked == ["preflight", "preflight", "create"]
    # as it advises
    if "extra" in advised:
        connect("spark_other", conn_type="spark", host="spark://m:7077", extra=advised["extra"])
    for operator in operators:
        given = {name: value for name, value in advised.items() if name != "extra"}
        operator(task_id="t", **{"pipeline": ON_OTHER, "stream": {}, **given}).execute(CONTEXT)


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("master", "snapshot", "problem"),
    [
        ("spark://m:7077", {"executor": "KubernetesExecutor", "deferrable": True}, "of KubernetesExecutor"),
    ],
)
def test_what_the_snapshot_cannot_do_is_refused_before_anything_is_made(
    connect: Any, checked: list[str], master: str, snapshot: Any, problem: str
) -> None:
    """Its task may run elsewhere than the stream's."""
    connect("spark_other", conn_type="spark", host=master)
    operators: list[Any] = [ReplicationPreflightOperator, CreateReplicationSlotOperator]
    for operator in operators:
        made = operator(task_id="t", pipeline=ON_OTHER, snapshot=snapshot)
        with pytest.raises(AirflowFailException, match=problem):
            made.execute(CONTEXT)
        made.snapshot = {}
        made.execute(CONTEXT)
        # there is no such job
        made = operator(task_id="t", pipeline=NO_SNAPSHOT, snapshot=snapshot)
        made.execute(CONTEXT)
    assert "create" in checked


@pytest.mark.usefixtures("connections", "checked")
def test_preflight_names_the_provider_that_kubernetes_needs(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connect("spark_other", conn_type="spark", host="k8s://https://k:443")
    made = ReplicationPreflightOperator(task_id="t", pipeline=ON_OTHER, stream={})
    made.execute(CONTEXT)
    monkeypatch.setattr("airflow.providers.apache.spark.hooks.spark_submit.kube_client", None)
    with pytest.raises(AirflowFailException, match="apache-airflow-providers-cncf-kubernetes"):
        made.execute(CONTEXT)


@pytest.mark.usefixtures("connections", "checked")
def test_preflight_names_a_folder_that_no_job_could_write_to(
    connect: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connect("spark_other", conn_type="spark", host="local[2]")
    made = ReplicationPreflightOperator(task_id="t", pipeline=ON_OTHER, stream={})
    made.execute(CONTEXT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "file" / "airflow"))
    with pytest.raises(
        AirflowFailException, match=r"The folder \S+/airflow/bottledwater, in which each job has its files"
    ):
        made.execute(CONTEXT)


@pytest.mark.usefixtures("connections", "checked")
def test_preflight_names_the_problems_of_spark_with_all_others(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connect("spark_other", conn_type="spark", host="local[2]", extra={"spark-binary": "spark3-submit"})

    def fails(_: Any) -> None:
        raise errors.PreflightError(["wal_level is replica"])

    made = ReplicationPreflightOperator(task_id="t", pipeline=ON_OTHER, stream={})
    with pytest.raises(AirflowFailException, match=r"spark3-submit .* is not on the PATH"):
        made.execute(CONTEXT)
    monkeypatch.setattr(preflight, "run", fails)
    with pytest.raises(AirflowFailException, match=r"(?s)spark3-submit .* is not on the PATH.*wal_level"):
        made.execute(CONTEXT)
    # the stream's task runs elsewhere: what this host has does not tell
    made.snapshot = made.stream = {"executor": "LocalExecutor"}
    made.executor = "CeleryExecutor"
    with pytest.raises(AirflowFailException) as raised:
        made.execute(CONTEXT)
    assert str(raised.value) == "wal_level is replica"


@pytest.mark.usefixtures("connections", "checked")
def test_a_job_in_pods_needs_a_file_with_the_settings(connect: Any, noted: list[str]) -> None:
    connect("spark_other", conn_type="spark", host="k8s://https://k:443")
    for file in ("", "/etc/shop.yaml"):
        spark = Spark("spark_other", deploy_mode="cluster", settings_file=file)
        made = ReplicationPreflightOperator(task_id="t", pipeline=Description("orders", spark=spark), stream={})
        with contextlib.nullcontext() if file else pytest.raises(AirflowFailException, match="settings_file"):
            made.execute(CONTEXT)
    # a task whose job cannot be submitted says it with the pipeline, too
    lacking = Description("orders", spark=Spark("spark_other", deploy_mode="cluster"))
    for operator in (SnapshotToKafkaOperator, StreamToKafkaOperator):
        noted.clear()
        with pytest.raises(AirflowFailException, match="settings_file"):
            operator(task_id="t", pipeline=lacking).execute(CONTEXT)
        assert len(noted) == 1 and "settings_file" in noted[0]


# ------------------------------------------------------------------ the snapshot's job
OLD: Any = {
    "id": "old",
    "folder": "/tmp/nowhere/old",
    "host": "elsewhere",
    "application": "",
    "master": "yarn",
}
NEW: Any = {**OLD, "id": "new", "folder": "/tmp/nowhere/new"}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, connections: str, tmp_path: Path) -> SimpleNamespace:
    """Jobs that are not there: how each ended, and what was done."""
    died = Ended(Outcome(ok=False, error="killed", transient=True))
    world = SimpleNamespace(
        done=[], living=set(), earlier=died, end=Ended(Outcome(ok=True, counts={"rows": 7})), complete=False
    )

    def wait(self: Any, identity: Any) -> Ended:
        world.done.append(f"wait {identity['id']}")
        return world.end

    def stop(pipeline: Any, identity: Any, **_: Any) -> bool:
        world.done.append(f"stop {identity['id']}")
        world.living.discard(identity["id"])
        return True

    monkeypatch.setattr("airflow_bottledwater.jobs.status.snapshot_is_complete", lambda pipeline: world.complete)
    monkeypatch.setattr(live, "name_of", lambda pipeline: "name")
    monkeypatch.setattr("airflow_bottledwater.jobs.submitted.announce", lambda pipeline, job_id, *_: None)
    monkeypatch.setattr(spark_job, "prepare", lambda *_: (NEW, tmp_path / "pipeline-x.json"))
    monkeypatch.setattr(
        spark_job,
        "start",
        lambda *_, ends_with_parent, **__: world.done.append("start, ends with task" if ends_with_parent else "start"),
    )
    monkeypatch.setattr(spark_job, "send", lambda *_: world.done.append("send"))
    monkeypatch.setattr(SnapshotToKafkaOperator, "_wait", wait)
    monkeypatch.setattr(
        watch, "still_runs", lambda pipeline, known: None if known["id"] in world.living else world.earlier
    )
    monkeypatch.setattr(
        watch, "forget", lambda pipeline, identity, asked: world.done.append(f"forget {identity['id']}")
    )
    monkeypatch.setattr("airflow_bottledwater.jobs.stop.stop", stop)
    monkeypatch.setattr(AssetEvents, "snapshot", lambda self: {})
    return world


def snapshot_of(
    known: Any,
    *,
    try_number: int = 2,
    max_tries: int = 2,
    retries: int = 2,
    values: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[Any, dict[str, Any]]:
    values = {"bottledwater_job": known, "bottledwater_untold": True} if values is None else values
    store = SimpleNamespace(
        get=values.get,
        set=lambda key, value, retention: values.update({key: value}),
        delete=lambda key: values.pop(key, None),
    )
    ti = ti_of("t", try_number=try_number, max_tries=max_tries)
    operator = SnapshotToKafkaOperator(task_id="t", pipeline=ORDERS, retries=retries, **arguments)
    return operator.execute({"task_state_store": store, "ti": ti, "dag_run": run_of()}), values


def test_a_retry_of_the_snapshot_follows_a_job_that_runs(jobs: SimpleNamespace) -> None:
    jobs.living.add("old")
    assert snapshot_of(OLD)[0] == {"rows": 7}
    assert jobs.done == ["wait old", "forget old"]


def test_a_retry_of_the_snapshot_submits_behind_a_job_that_died(jobs: SimpleNamespace) -> None:
    assert snapshot_of(OLD)[1]["bottledwater_job"] == {**NEW, "ended": jobs.end.as_event()}
    assert jobs.done == ["forget old", "start", "wait new", "forget new"]


def test_a_retry_of_the_snapshot_tells_what_a_job_that_has_ended_well_has_published(
    jobs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AssetEvents, "snapshot", lambda self: jobs.done.append("tell") or {"a": 7})
    jobs.complete, jobs.earlier = True, jobs.end
    assert snapshot_of(OLD)[0] == {"rows": 7}
    assert jobs.done == ["tell", "forget old"]


@pytest.mark.parametrize("cleared", [True, False])
def test_a_snapshot_that_is_complete_tells_what_was_not_told(
    jobs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cleared: bool
) -> None:
    away = [errors.Outage("away")] * 2

    def tell(self: AssetEvents) -> dict[str, int]:
        if away:
            raise away.pop()
        jobs.done.append("tell")
        return {"a": 7}

    monkeypatch.setattr(AssetEvents, "snapshot", tell)
    first, retries = (5, 2) if cleared else (2, 3)
    # its job has published everything, and nobody has heard of that
    values = {"bottledwater_job": OLD, "bottledwater_untold": True}
    jobs.complete = True

    def again(number: int) -> Any:
        return snapshot_of(None, try_number=first + number, max_tries=first + 1, retries=retries, values=values)[0]

    for number in (0, 1):
        # while Kafka is away, not even a retry that finds no job any more succeeds
        with pytest.raises(errors.Outage, match="away"):
            again(number)
    assert again(2) == {"complete": True}
    assert jobs.done == [*(["stop old"] if cleared else []), "forget old", "tell"]


def test_a_cleared_snapshot_that_was_told_is_not_told_again(
    jobs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AssetEvents, "snapshot", lambda self: jobs.done.append("tell") or {"a": 7})
    _, values = snapshot_of(None)
    assert jobs.done == ["start", "wait new", "tell", "forget new"]
    jobs.complete = True
    jobs.done.clear()
    assert snapshot_of(None, try_number=5, max_tries=5, retries=1, values=values)[0] == {"complete": True}
    assert jobs.done == []


def test_a_snapshot_that_is_complete_starts_no_job(jobs: SimpleNamespace) -> None:
    jobs.complete = True
    assert snapshot_of(None, values={})[0] == {"complete": True}
    assert jobs.done == []


def test_a_cleared_snapshot_ends_the_earlier_job_first(jobs: SimpleNamespace) -> None:
    jobs.living.add("old")
    snapshot_of(OLD, try_number=5, max_tries=5, retries=1)
    assert jobs.done == ["stop old", "forget old", "start", "wait new", "forget new"]


def test_a_snapshot_that_was_interrupted_is_left_for_a_retry(jobs: SimpleNamespace) -> None:
    jobs.end = Ended(Outcome(ok=False, kind="Interrupted", error="SIGTERM from outside", transient=True))
    with pytest.raises(errors.JobFailed, match="SIGTERM"):
        snapshot_of(None)
    jobs.end = Ended(Outcome(ok=True, stopped=True))
    with pytest.raises(AirflowFailException, match="Clear the task"):
        snapshot_of(None)


@pytest.mark.parametrize("operator", [SnapshotToKafkaOperator, VerifyTopicsOperator])
def test_a_job_that_was_stopped_though_its_task_goes_on_is_left_for_a_retry(
    jobs: SimpleNamespace, operator: Any
) -> None:
    """A triggerer did not hear in time whether the task was ended."""
    event = {"status": "ended", "identity": OLD, **Ended(Outcome(ok=True, stopped=True), asked=True).as_event()}
    with pytest.raises(errors.JobFailed, match="still waits for it"):
        operator(task_id="t", pipeline=ORDERS).execute_complete(CONTEXT, event)


@pytest.mark.parametrize(
    ("mode", "deferrable", "defers"),
    [("client", None, False), ("cluster", None, True), ("client", True, True), ("cluster", False, False)],
)
def test_a_snapshot_in_a_cluster_occupies_no_worker(
    jobs: SimpleNamespace, connect: Any, mode: str, deferrable: bool | None, defers: bool
) -> None:
    connect("spark_default", conn_type="spark", host="yarn", extra={"deploy-mode": mode})
    sent = "send" if mode == "cluster" else "start"
    if not defers:
        assert snapshot_of(None, deferrable=deferrable)[0] == {"rows": 7}
        assert jobs.done == [sent, "wait new", "forget new"]
        return
    with pytest.raises(TaskDeferred) as raised:
        snapshot_of(None, deferrable=deferrable)
    assert jobs.done == [sent]
    event = {"status": "ended", "identity": raised.value.trigger.identity, **jobs.end.as_event()}
    assert SnapshotToKafkaOperator(task_id="t", pipeline=ORDERS).execute_complete(CONTEXT, event) == {"rows": 7}
    with pytest.raises(errors.JobFailed, match="Unexpected trigger event"):
        SnapshotToKafkaOperator(task_id="t", pipeline=ORDERS).execute_complete(CONTEXT, {"status": "timeout"})


# ------------------------------------------------------------------ the verification's job
VERIFIED: Any = {
    "sample": 1.0,
    "position": "0/1",
    "seconds": 1.0,
    "tables": [{"table": "public.a", "topic": "a", "rows": 7, "counts": {}, "differences": [], "verdict": "equal"}],
}
DIFFERENT: Any = {
    **VERIFIED,
    "tables": [
        {"table": "public.a", "topic": "a", "rows": 7, "counts": {"missing": 1}, "differences": []},
    ],
}
LEFT = Differences({"public.a": [{"kind": "missing", "key": {"id": "secret"}}]})


def verify_of(known: Any = None, pushed: dict[str, Any] | None = None, **arguments: Any) -> Any:
    values = {"bottledwater_job": known}
    store = SimpleNamespace(
        get=values.get,
        set=lambda key, value, retention: values.update({key: value}),
        delete=lambda key: values.pop(key, None),
    )
    ti = SimpleNamespace(try_number=2, max_tries=2, dag_id="d", run_id="r", task_id="t", map_index=-1)
    ti.xcom_push = lambda key, value: {} if pushed is None else pushed.update({key: value})
    return VerifyTopicsOperator(task_id="t", pipeline=ORDERS, retries=2, **arguments).execute(
        {"task_state_store": store, "ti": ti}
    )


@pytest.fixture
def verified(jobs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(VerifyTopicsOperator, "_wait", lambda *_: jobs.end)
    jobs.end = Ended(Outcome(ok=True, counts=VERIFIED))
    return jobs


def test_a_verification_returns_the_counts(verified: SimpleNamespace) -> None:
    table = {"verdict": "equal", "rows": 7, "unsettled": 0}
    assert verify_of() == {"equal": True, "rows": 7, "tables": {"public.a": table}}
    assert verified.done == ["start, ends with task", "forget new"]


def test_a_verification_that_finds_a_difference_fails_without_a_retry(
    verified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verified.end = Ended(Outcome(ok=True, counts=DIFFERENT))
    run_directory.write(tmp_path, LEFT)
    monkeypatch.setattr(identities, "folder_here", lambda identity: tmp_path)
    with pytest.raises(
        AirflowFailException,
        match=r"keys that differ: public\.a \(id = secret\)\. .*public\.a: 1 missing.*"
        r"bottledwater snapshot --tables public\.a --sweep$",
    ):
        verify_of(pushed=(pushed := {}))
    found = verify_of(fail_on_difference=False)
    # the failed task's result says the same
    assert pushed == {"return_value": found}
    assert found["tables"]["public.a"] == {"verdict": "different", "rows": 7, "unsettled": 0, "missing": 1}
    assert "secret" not in str(found)


def test_a_verification_that_settles_nothing_is_no_success_and_is_tried_again(verified: SimpleNamespace) -> None:
    unsettled = {**VERIFIED, "tables": [{"table": "public.a", "topic": "a", "rows": 7, "unsettled": 5000}]}
    verified.end = Ended(Outcome(ok=True, counts=unsettled))
    # behind a try whose process has died before it saw the job's end
    verified.earlier = verified.end
    with pytest.raises(errors.JobFailed):
        verify_of(OLD)
    assert verified.done == ["forget old", "start, ends with task", "forget new"]
    with pytest.raises(errors.JobFailed, match=r"Keys of public\.a differed") as raised:
        verify_of(pushed=(pushed := {}))
    assert not isinstance(raised.value, AirflowFailException)
    assert pushed["return_value"] == verify_of(fail_on_difference=False)
    assert pushed["return_value"]["equal"] is False


def test_a_deferred_verification_that_finds_a_difference_has_its_result_too(
    verified: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended(Outcome(ok=True, counts=DIFFERENT))
    monkeypatch.setattr(VerifyTopicsOperator, "_ended", lambda *_: (NEW, ended))
    monkeypatch.setattr(stop, "clear_away", lambda *_: None)
    pushed: dict[str, Any] = {}
    context: Any = {**CONTEXT, "ti": SimpleNamespace(xcom_push=lambda key, value: pushed.update({key: value}))}
    with pytest.raises(AirflowFailException, match=r"driver, or in client mode in differences\.json .* 1 missing"):
        VerifyTopicsOperator(task_id="t", pipeline=ORDERS).execute_complete(context, {"status": "ended"})
    assert pushed["return_value"]["equal"] is False
    with pytest.raises(AirflowFailException):
        VerifyTopicsOperator(task_id="t", pipeline=ORDERS, do_xcom_push=False).execute_complete(
            {**CONTEXT, "ti": None}, {"status": "ended"}
        )


def test_a_verification_that_dies_is_tried_again_and_one_of_a_stopped_pipeline_is_no_failure(
    verified: SimpleNamespace,
) -> None:
    verified.end = Ended(Outcome(ok=False, error="killed", transient=True))
    with pytest.raises(errors.JobFailed, match="killed"):
        verify_of()
    verified.end = Ended(Outcome(ok=True, stopped=True))
    with pytest.raises(AirflowSkipException, match=r"The pipeline was asked to stop, .* Clear the task"):
        verify_of()
    verified.end = Ended(Outcome(ok=False, kind="PipelineStopped", error="Nothing is published in its place."))
    with pytest.raises(AirflowSkipException, match="in its place"):
        verify_of()


def test_what_is_verified_reaches_the_job_as_settings() -> None:
    operator = VerifyTopicsOperator(task_id="t", pipeline=ORDERS, verify_tables="a,b", sample="0.01")
    assert {"verify_tables": "a,b", "verify_sample": "0.01"}.items() <= operator.pipeline_hook.settings.items()
    assert "verify_tables" not in VerifyTopicsOperator(task_id="t", pipeline=ORDERS).pipeline_hook.settings


# ------------------------------------------------------------------ the teardown
@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("when", ["retired", "always", "never"])
def test_the_teardown_stops_what_its_run_has_left(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Marked while no triggerer runs, a stream's job is stopped by nobody else."""
    done: list[str] = []
    ours = Owner(CONTEXT["ti"].dag_id, CONTEXT["ti"].run_id, "stream", -1, "h", "/f", "spark_default")
    jobs = {
        "a": JobRecord("stream", "bottledwater", ours, pipeline="name"),
        "b": JobRecord("stream", "bottledwater", dataclasses.replace(ours, run_id="another")),
        "c": JobRecord("stream", "another", ours),
        "d": JobRecord("stream", "bottledwater", ours, outcome=Outcome(ok=True)),
        "e": JobRecord("stream", "bottledwater"),
        "f": JobRecord("stream", "bottledwater", ours, pipeline="of another database"),
        # beside the stream or behind it, which is no reason to end it
        "g": JobRecord("verify", "bottledwater", dataclasses.replace(ours, task_id="verify"), pipeline="name"),
        "h": JobRecord("stream", "bottledwater", dataclasses.replace(ours, airflow="another"), pipeline="name"),
    }
    monkeypatch.setenv("AIRFLOW__BOTTLEDWATER__AIRFLOW_ID", "this one")
    states = {"stream": {"failed"}, "verify": {"deferred"}}
    monkeypatch.setattr(tasks, "states_now", lambda dag_id, run_id, task_id, map_index: states[task_id])
    monkeypatch.setattr(live, "name_of", lambda pipeline: "name")
    monkeypatch.setattr(control_topic, "read", lambda kafka: {job_key(k): encode(v) for k, v in jobs.items()})
    monkeypatch.setattr(
        stop, "stop", lambda pipeline, identity, **_: not done.append(f"stop {identity['id']} {identity['folder']}")
    )
    monkeypatch.setattr(watch, "forget", lambda pipeline, identity, asked: done.append(f"forget {identity['id']}"))
    monkeypatch.setattr("airflow_bottledwater.provision.drop.drop", lambda pipeline, when: done.append("drop"))
    DropReplicationSlotOperator(task_id="t", pipeline=Description(), when=when).execute(CONTEXT)
    # before the slot is dropped or kept
    assert done == ["stop a /f", "forget a", "drop"]


def test_the_task_group_is_the_pipeline() -> None:
    with DAG("d", schedule=None):
        group = BottledWaterTaskGroup(pipeline=ORDERS, stream={"timeout": 5.0}, snapshot={"retries": 3})
    assert group.stream.upstream_task_ids == {"bottledwater.snapshot"}
    assert group.drop_slot.is_teardown and group.create_slot.is_setup
    assert {
        "bottledwater.stream",
        "bottledwater.wait_caught_up",
        "bottledwater.watch_errors",
    } <= group.drop_slot.upstream_task_ids
    assert group.wait_caught_up.stream_task_id == "bottledwater.stream"
    assert group.preflight.stream == group.create_slot.stream == {"executor": None, "deferrable": True}
    assert (group.stream.timeout, group.snapshot.retries) == (5.0, 3)
    assert {task.described().name for task in group.children.values()} == {"orders"}  # type: ignore[attr-defined]
    # a stream has no end: a week, Airflow's default, is too short for whoever watches it
    assert group.watch_errors.timeout > 365 * 86400


@pytest.mark.parametrize("bounded", [True, False])
def test_what_is_behind_the_group_is_not_skipped_with_what_is_beside_the_stream(bounded: bool) -> None:
    with DAG("d", schedule=None):
        load = DropReplicationSlotOperator(task_id="load", pipeline=ORDERS)
        BottledWaterTaskGroup(pipeline=ORDERS, bounded=bounded) >> load
    assert load.upstream_task_ids == {"bottledwater.stream", "bottledwater.watch_errors"}
    # of a group in another one, Airflow asks nothing (docs/operations.md): behind the inner one, it is so here, too
    with DAG("d", schedule=None):
        behind, load = (DropReplicationSlotOperator(task_id=each, pipeline=ORDERS) for each in ("behind", "load"))
        with TaskGroup("outer") as outer:
            BottledWaterTaskGroup(pipeline=ORDERS, bounded=bounded) >> load
        outer >> behind
    assert load.upstream_task_ids == {"outer.bottledwater.stream", "outer.bottledwater.watch_errors"}
    assert "outer.bottledwater.wait_caught_up" in behind.upstream_task_ids


def test_in_the_group_nobody_waits_in_a_worker_slot() -> None:
    with DAG("d", schedule=None, default_args={"deferrable": False}):
        group = BottledWaterTaskGroup(pipeline=ORDERS)
    assert len(group.children) == 7
    assert group.wait_caught_up.deferrable and group.watch_errors.deferrable


def test_the_group_says_where_its_jobs_run_also_if_the_dag_says_it() -> None:
    with DAG("d", schedule=None, default_args={"deferrable": False, "executor": "KubernetesExecutor"}):
        group = BottledWaterTaskGroup(pipeline=ORDERS, snapshot={"executor": "LocalExecutor"})
    for task in (group.preflight, group.create_slot):
        assert task.stream == {"executor": "KubernetesExecutor", "deferrable": False}
        assert task.snapshot == {"executor": "LocalExecutor", "deferrable": False}


@pytest.mark.parametrize("operator", ALL)
def test_every_parameter_is_documented(operator: Any) -> None:
    documented = description(operator)
    for name in inspect.signature(operator.__init__).parameters:
        assert f":param {name}:" in documented or name in ("self", "kwargs"), name
    for name in operator.template_fields:
        if f":param {name}:" in documented:
            described = documented.partition(f":param {name}:")[2].partition(":param")[0]
            assert "(templated)" in described, name


# ------------------------------------------------------------------ tries and lives of a task
@pytest.mark.parametrize("now", [0, 2, 5])
@pytest.mark.parametrize("retries", [0, 2])
def test_the_first_try_of_each_life_is_known(retries: int, now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Airflow's own clearing, of which the count is derived.

    :param now: those of the file as the worker has it.
    """
    task = SimpleNamespace(retries=retries)
    found = SimpleNamespace(has_task=lambda task_id: True, get_task=lambda task_id: task)
    bag = SimpleNamespace(get_dag_for_run=lambda **_: found, get_latest_version_of_dag=lambda *_, **__: found)
    monkeypatch.setattr(dagbag, "DBDagBag", lambda **_: bag)
    ti: Any = SimpleNamespace(
        state="failed", try_number=0, max_tries=retries, dag_id="d", task_id="t", dag_version_id="v", task=task,
        dag_run=SimpleNamespace(created_dag_version_id="v", context_carrier=None),
        prepare_db_for_next_try=lambda session: None, refresh_from_task=lambda *_, **__: None,
        clear_next_method_args=lambda: None,
    )  # fmt: skip
    session: Any = SimpleNamespace(merge=lambda ti: None, flush=lambda: None)
    values: dict[str, Any] = {}
    store = SimpleNamespace(get=values.get, set=lambda key, value, retention: values.update({key: value}))
    context = {"ti": ti, "task_state_store": store}
    for tries in (1, retries + 1, 1):
        for number in range(tries):
            # the scheduler counts when it starts a try
            ti.try_number += 1
            first = is_first_try(context, now)
            if now == retries:
                assert first == (number == 0)
            else:  # a retry may be taken for one, which does no harm; before the first, nothing is noted
                assert first or number or ti.try_number == 1
            note_life(context)
        taskinstance.clear_task_instances([ti], session, dag_run_state=False)


def _asked(values: dict[str, Any], try_number: int, max_tries: int, *, made: float, run: Any) -> float | None:
    store = SimpleNamespace(get=values.get, set=lambda key, value, retention: values.update({key: value}))
    ti = SimpleNamespace(id=made_at(made), try_number=try_number, max_tries=max_tries)
    return asked_at({"task_state_store": store, "ti": ti, "dag_run": run})


def test_when_a_person_has_asked_for_a_task_is_known_over_its_tries_and_lives() -> None:
    kept: dict[str, Any] = {}
    triggered = run_of(at=TRIGGERED)
    assert _asked(kept, 1, 1, made=TRIGGERED, run=triggered) == TRIGGERED
    # a retry, whose row Airflow has made anew, goes on with what was asked for
    assert _asked(kept, 2, 1, made=TRIGGERED + 60, run=triggered) == TRIGGERED
    # cleared: its row was made anew then, however long it has waited since
    cleared = run_of(at=TRIGGERED, clear_number=1)
    assert _asked(kept, 3, 3, made=TRIGGERED + 500, run=cleared) == TRIGGERED + 500
    assert _asked(kept, 4, 3, made=TRIGGERED + 600, run=cleared) == TRIGGERED + 500
    assert _asked({}, 3, 3, made=TRIGGERED + 500, run=cleared) == TRIGGERED + 500
    # the first try may have been lost before it could note that, with a scheduler that restarts, for example
    lost: dict[str, Any] = {}
    assert _asked(lost, 2, 1, made=TRIGGERED + 60, run=triggered) == TRIGGERED
    # also that of the next life, which goes on with when it was looked at first
    assert _asked(lost, 4, 3, made=TRIGGERED + 500, run=cleared) == TRIGGERED + 500
    assert _asked(lost, 5, 3, made=TRIGGERED + 600, run=cleared) == TRIGGERED + 500
    # a task that is made later, and a run that is meant for later, were asked for when the run was triggered
    assert _asked({}, 1, 1, made=TRIGGERED + 70, run=triggered) == TRIGGERED
    assert _asked({}, 1, 1, made=TRIGGERED, run=run_of(at=TRIGGERED + 3600)) == TRIGGERED


@pytest.mark.parametrize("kind", ["scheduled", "backfill", "asset_triggered", "operator_triggered"])
def test_no_person_has_asked_for_what_a_schedule_has_begun(kind: str) -> None:
    kept: dict[str, Any] = {}
    assert _asked(kept, 1, 1, made=TRIGGERED, run=run_of(kind)) is None
    assert _asked(kept, 2, 1, made=TRIGGERED, run=run_of(kind)) is None
    # but for what was cleared, also without its run
    for clear_number in (0, 1):
        cleared = run_of(kind, clear_number=clear_number)
        assert _asked({**kept}, 3, 3, made=TRIGGERED + 9, run=cleared) == TRIGGERED + 9


@pytest.mark.usefixtures("noted", "asked")
@pytest.mark.parametrize("operator", [CreateReplicationSlotOperator, SnapshotToKafkaOperator, StreamToKafkaOperator])
def test_when_a_person_has_asked_is_noted_before_anything_can_fail(operator: Any) -> None:
    """A retry, which may begin behind a stop, takes no time of its own."""
    kept: dict[str, Any] = {}
    store = SimpleNamespace(get=kept.get, set=lambda key, value, retention: kept.update({key: value}))
    with pytest.raises(errors.Outage):
        operator(task_id="t", pipeline=Description("orders", source=Source("pg_nowhere"))).execute(
            {**CONTEXT, "task_state_store": store}
        )
    assert kept == {"bottledwater_asked": [0, TRIGGERED]}


def test_airflow_makes_a_tasks_id_of_the_time() -> None:
    """With Airflow's own functions, also when the task is cleared or tried again."""
    before = time.time()
    first = taskinstance.uuid7()
    assert first.version == 7 and abs((first.int >> 80) / 1000 - before) < 60
    assert made_at(TRIGGERED).version == 7
    assert "self.id = uuid7()" in inspect.getsource(taskinstance.TaskInstance.prepare_db_for_next_try)
    assert "prepare_db_for_next_try" in inspect.getsource(taskinstance.clear_task_instances)


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("operator", [ReplicationPreflightOperator, CreateReplicationSlotOperator])
def test_of_a_pipeline_that_was_stopped_nothing_is_made_and_nothing_is_noted(
    operator: Any, asked: SimpleNamespace, noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: Any, **__: Any) -> Any:
        # somebody stops the pipeline meanwhile
        asked.at = TRIGGERED + 1
        raise errors.Refused("The slot is lost.")

    monkeypatch.setattr(preflight, "run", make)
    monkeypatch.setattr(creation, "create", make)
    with pytest.raises(AirflowFailException, match="lost"):
        operator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)
    # as one of a retry: the pipeline stays stopped
    assert noted == ["The slot is lost. (a retry)"]
    # preflight makes nothing, and says what it has found
    error = AirflowSkipException if operator is CreateReplicationSlotOperator else AirflowFailException
    with pytest.raises(error, match="asked to stop" if error is AirflowSkipException else "lost"):
        operator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)
    assert set(noted) == {"The slot is lost. (a retry)"}


def test_a_snapshot_of_a_pipeline_that_was_stopped_begins_no_job(jobs: SimpleNamespace, asked: SimpleNamespace) -> None:
    asked.at = TRIGGERED + 1
    with pytest.raises(AirflowSkipException):
        snapshot_of(None, try_number=1, max_tries=2, values={})
    assert jobs.done == ["forget new"]
    asked.at = TRIGGERED - 1
    snapshot_of(None, try_number=1, max_tries=2, values={})
    assert "start" in jobs.done


@pytest.mark.usefixtures("connections")
def test_a_person_need_not_wait_until_it_is_known_whether_the_pipeline_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: Any) -> None:
        raise errors.Outage("Kafka is away.")

    monkeypatch.setattr(requests, "refuse_stopped", away)
    operator: Any = StreamToKafkaOperator(task_id="t", pipeline=ORDERS)
    operator.refuse_stopped(CONTEXT, operator.pipeline_hook.pipeline())
    with pytest.raises(errors.Outage):
        operator.refuse_stopped({**CONTEXT, "dag_run": run_of("scheduled")}, operator.pipeline_hook.pipeline())
    # nor what has had a job already, which would have waited for longer
    kept: dict[str, Any] = {"bottledwater_life": 0}
    store = SimpleNamespace(get=kept.get, set=lambda key, value, retention: kept.update({key: value}))
    begun = {**CONTEXT, "task_state_store": store, "dag_run": run_of("scheduled")}
    operator.refuse_stopped(begun, operator.pipeline_hook.pipeline())
    kept["bottledwater_life"] = 5  # of an earlier life
    with pytest.raises(errors.Outage):
        operator.refuse_stopped(begun, operator.pipeline_hook.pipeline())


@pytest.mark.usefixtures("connections")
def test_preflight_names_the_problems_of_spark_when_a_server_is_away(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(pipeline: Any) -> None:
        raise errors.Outage("PostgreSQL does not answer.")

    monkeypatch.setattr(preflight, "run", away)
    connect("spark_other", conn_type="spark", host="spark://m:7077", extra={"deploy-mode": "cluster"})
    with pytest.raises(AirflowFailException, match=r"no deploy-mode cluster(.|\n)*PostgreSQL does not answer"):
        ReplicationPreflightOperator(task_id="t", pipeline=ON_OTHER, stream={}).execute(CONTEXT)
    with pytest.raises(errors.Outage):
        ReplicationPreflightOperator(task_id="t", pipeline=ON_OTHER).execute(CONTEXT)


@pytest.mark.usefixtures("connections")
def test_control_says_what_it_can_do() -> None:
    with pytest.raises(AirflowFailException, match="stop or retire or drop_slot or start or snapshot"):
        PipelineControlOperator(task_id="t", pipeline=ORDERS, action="halt").execute(CONTEXT)


@pytest.mark.usefixtures("connections")
def test_control_asks_for_live_snapshots_and_settles_dead_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(live, "ask", lambda _, request: asked.append(request) or ("7/shop/orders", "id1"))
    monkeypatch.setattr(live, "publishes", lambda *_: "")
    monkeypatch.setattr(live, "name_of", lambda _: "7/shop/orders")
    monkeypatch.setattr(live, "cancel", lambda _, name, each: asked.append((name, each, "cancel")))
    monkeypatch.setattr(snapshots, "change", lambda _, name, each, **changes: asked.append((name, each, changes)))
    monkeypatch.setattr(redrive, "redrive", lambda _: asked.append("redrive") or redrive.RedriveResult())
    monkeypatch.setattr(redrive, "dismiss", lambda _, tables: asked.append(tables) or redrive.RedriveResult())
    for action in ("snapshot", "pause", "resume", "cancel", "redrive", "dismiss"):
        PipelineControlOperator(
            task_id="t", pipeline=ORDERS, action=action, tables="a, b", where="id < 9", snapshot_id="id1"
        ).execute(CONTEXT)
    assert (asked[0].tables, asked[0].where) == (("a", "b"), "id < 9")
    assert asked[1:] == [
        ("7/shop/orders", "id1", {"paused": True}), ("7/shop/orders", "id1", {"paused": False}),
        ("7/shop/orders", "id1", "cancel"), "redrive", ["a", "b"],
    ]  # fmt: skip


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("action", "user", "asked"),
    [
        ("pause_table", "alice", {"paused": True, "by": "alice", "why": "a migration"}),
        ("resume_table", None, {"paused": False, "by": "DAG control", "why": ""}),
    ],
)
def test_control_asks_about_single_tables(
    monkeypatch: pytest.MonkeyPatch, action: str, user: str | None, asked: dict[str, Any]
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(pausing, "ask", lambda _, *args, **more: found.append((*args, more)) or ("name", "id1"))
    monkeypatch.setattr(pausing, "outcome", lambda _, *args, timeout: found.append((args, timeout)) or "It is done.")
    with DAG("control", schedule=None):
        task = PipelineControlOperator(
            task_id="t", pipeline=ORDERS, action=action, tables="a, b", reason="a migration", timeout="5"
        )
    task.execute({**CONTEXT, "dag_run": SimpleNamespace(triggering_user_name=user)})
    assert found == [(["a", "b"], asked), (("name", "id1"), 5.0)]


@pytest.mark.usefixtures("connections")
def test_only_without_a_choice_all_dead_letters_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that comes out empty is none."""
    given_up: list[Any] = []
    monkeypatch.setattr(redrive, "dismiss", lambda _, tables: given_up.append(tables) or redrive.RedriveResult())

    def dismiss(tables: Any) -> None:
        PipelineControlOperator(task_id="t", pipeline=ORDERS, action="dismiss", tables=tables).execute(CONTEXT)

    for empty in ("", " , ", [""], [" "]):
        with pytest.raises(AirflowFailException, match="leave it out where all tables are meant"):
            dismiss(empty)
    assert given_up == []
    dismiss(None)
    dismiss([])
    assert given_up == [[], []]


@pytest.mark.parametrize("action", ["snapshot", "resume_table", "accept_new_keys"])
def test_no_table_is_not_all_of_them(action: str) -> None:
    pipeline: Any = None  # nothing is asked of its servers
    with pytest.raises(errors.SettingError, match="at least one table"):
        consequences.of_action(pipeline, action, [], sweep=True)
    with pytest.raises(errors.SettingError, match="at least one table"):
        accept.accept(pipeline, [])


def test_what_no_job_could_read_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's template may be rendered to a number."""
    written: list[Any] = []
    cluster = SimpleNamespace(pipeline=lambda _: "1/d/orders")
    monkeypatch.setattr(pausing, "session", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(live, "session", lambda *_, **__: written.append("asked the source"))
    monkeypatch.setattr(live, "streamed", lambda *_: (cluster, None))
    monkeypatch.setattr(pausing, "_meant", lambda *_: [1])
    monkeypatch.setattr(control_topic, "write", lambda _, records: written.append(records))
    pipeline: Any = SimpleNamespace(slot="orders", postgres="", kafka={})
    number: Any = 4711
    with pytest.raises(errors.Refused, match=r"`\$.why`.*pprint"):
        pausing.ask(pipeline, ["a"], paused=True, why=number)
    with pytest.raises(errors.Refused, match=r"`\$.where`"):
        live.ask(pipeline, SnapshotRequest(("a",), number))
    assert written == []
    pausing.ask(pipeline, ["a"], paused=True, why="4711")
    assert len(written) == 1


def test_each_task_of_the_group_says_what_it_is_for() -> None:
    with DAG("documented", schedule=None):
        group = BottledWaterTaskGroup(pipeline=ORDERS, stream={"doc_md": "My own."})
    docs = {name: task.doc_md for name, task in group.children.items()}
    assert docs.pop("bottledwater.stream") == "My own."
    assert len(docs) == 6 and all(text and text.endswith(".") for text in docs.values())


@pytest.mark.parametrize(
    ("error", "raised"), [(errors.Refused("No.", "Do."), AirflowFailException), (errors.Outage("Away."), errors.Outage)]
)
def test_an_error_is_said_once(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised) as found, failing():
        try:
            raise OSError("connection refused")
        except OSError as cause:
            raise error from cause
    assert str(found.value) == str(error)
    assert "connection refused" not in "".join(traceback.format_exception(found.value))


def test_the_end_of_a_job_is_reported_to_airflows_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("airflow.sdk.observability.stats.incr", lambda name, tags: told.append((name, tags)))
    monkeypatch.setattr("airflow.sdk.observability.stats.gauge", lambda name, value, tags: told.append((name, value)))
    snapshot = SnapshotToKafkaOperator(task_id="t", pipeline=ORDERS)
    snapshot._finish(Outcome(ok=True, counts={"rows": 7, "complete": True, "position": "x"}))
    with pytest.raises(errors.JobFailed):
        snapshot._finish(Outcome(ok=False, error="killed", transient=True))
    tags = {"slot": "orders", "job": "snapshot"}
    assert told == [("bottledwater.job.ended", tags), ("bottledwater.job.rows", 7), ("bottledwater.job.failed", tags)]
