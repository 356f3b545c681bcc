"""What all operators and sensors share: templates, copies, and which errors a retry is left for."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater import errors
from airflow_bottledwater.flow import preflight, setup
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, failing
from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator, DropReplicationSlotOperator
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor
from airflow_bottledwater.task_group import BottledWaterTaskGroup

OPERATORS = [
    ReplicationPreflightOperator, CreateReplicationSlotOperator, DropReplicationSlotOperator, SnapshotToKafkaOperator,
    StreamToKafkaOperator, StreamErrorSensor,
]  # fmt: skip


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
        (CreateReplicationSlotOperator, setup, "create"),
        (DropReplicationSlotOperator, setup, "drop"),
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
            operator(task_id="t").execute({})


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_missing_connection_fails_at_once(operator: Any) -> None:
    context = {"ti": SimpleNamespace(start_date=None, try_number=1, max_tries=0), "task_state_store": None}
    with pytest.raises(AirflowFailException, match="no connection 'pg_nowhere'"):
        operator(task_id="t", postgres_conn_id="pg_nowhere").execute(context)


@pytest.mark.usefixtures("connections")
def test_when_to_drop_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(setup, "drop", lambda pipeline, when: asked.append(when) or "Dropped.")
    with pytest.raises(AirflowFailException, match="retired, always or never"):
        DropReplicationSlotOperator(task_id="t", when="sometimes").execute({})
    assert DropReplicationSlotOperator(task_id="t", when="always").execute({}) == "Dropped."
    assert DropReplicationSlotOperator(task_id="t").execute({}) == "Dropped."
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

    monkeypatch.setattr(setup, "create", create)
    with pytest.raises(AirflowFailException):
        made.execute({})


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
    assert (group.stream.timeout, group.snapshot.retries, group.slot_lag.slot) == (5.0, 3, "orders")
    # a stream has no end: a week, Airflow's default, is too short for whoever watches it
    assert group.error_state.timeout > 365 * 86400


def test_every_parameter_is_documented() -> None:
    for operator in OPERATORS:
        own = [p for p in inspect.signature(operator.__init__).parameters if p not in ("self", "kwargs", "args")]
        for name in own:
            assert f":param {name}:" in (operator.__doc__ or "") or name in ("deferrable",), (operator, name)
