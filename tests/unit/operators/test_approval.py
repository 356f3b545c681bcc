"""Operators that ask first."""

from __future__ import annotations

import datetime
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.exceptions import HITLRejectException
from airflow.providers.standard.operators import hitl
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskAwaitingInput

from airflow_bottledwater import Pipeline
from airflow_bottledwater.operators.approval import (
    DropReplicationSlotApprovalOperator,
    PipelineControlApprovalOperator,
)
from airflow_bottledwater.provision import consequences

DAGS = Path(__file__).parents[3] / "dags"
CONTEXT: Any = {"ti": SimpleNamespace(id="1"), "task_instance": SimpleNamespace(id="1")}


class Drop(DropReplicationSlotApprovalOperator):
    says, done = "Slot 'shop' is dropped.", 0

    def consequences(self) -> str:
        return self.says

    def carry_out(self, context: Any) -> str:
        self.done += 1
        return "done"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **detail: found.append(detail))
    return found


def answer(option: str) -> dict[str, Any]:
    return {
        "chosen_options": [option],
        "params_input": {},
        "responded_at": datetime.datetime.now(datetime.UTC),
        "responded_by_user": {"id": "1", "name": "ann"},
    }


def test_it_asks_in_numbers_and_does_it_only_if_that_is_approved(asked: list[dict[str, Any]]) -> None:
    drop = Drop(task_id="drop", pipeline=Pipeline("shop"))
    with pytest.raises(TaskAwaitingInput):
        drop.execute(CONTEXT)
    ((detail),) = asked
    assert (detail["body"], detail["options"], drop.done) == (Drop.says, ["Approve", "Reject"], 0)
    with pytest.raises(AirflowSkipException, match="Rejected by ann"):
        drop.execute_complete(CONTEXT, answer("Reject"))
    assert drop.done == 0
    assert (drop.execute_complete(CONTEXT, answer("Approve")), drop.done) == ("done", 1)


def test_nobody_is_asked_where_nothing_is_taken_away(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drop, "says", "")
    drop = Drop(task_id="drop", pipeline=Pipeline("shop"))
    assert (drop.execute(CONTEXT), drop.done, asked) == ("done", 1, [])


@pytest.mark.parametrize("approve", [False, "False", "false"])
def test_nobody_is_asked_where_the_form_says_so(asked: list[dict[str, Any]], approve: bool | str) -> None:
    drop = Drop(task_id="drop", pipeline=Pipeline("shop"), approve=approve)
    assert (drop.execute(CONTEXT), drop.done, asked) == ("done", 1, [])
    asking = Drop(task_id="drop", pipeline=Pipeline("shop"), approve="True")
    with pytest.raises(TaskAwaitingInput):
        asking.execute(CONTEXT)


def test_the_forms_of_the_ready_dags_have_it() -> None:
    for name, task_id in (("bottledwater", "drop_slot"), ("bottledwater_control", "control")):
        dag = runpy.run_path(str(DAGS / f"{name}.py"))["dag"]
        assert (
            dag.get_task(task_id).approve == "{{ params.approve }}"
            and "approve" in dag.get_task(task_id).template_fields
        )
        assert dag.params.get_param("approve").value is False


def test_nobody_is_asked_about_what_cannot_be_done(asked: list[dict[str, Any]]) -> None:
    drop = DropReplicationSlotApprovalOperator(task_id="drop", pipeline=Pipeline("shop"), when="at once")
    with pytest.raises(AirflowFailException, match="retired, always or never"):
        drop.execute(CONTEXT)
    assert not asked


def test_a_rejection_may_fail_the_task() -> None:
    drop = Drop(task_id="drop", pipeline=Pipeline("shop"), fail_on_reject=True)
    with pytest.raises(HITLRejectException):
        drop.execute_complete(CONTEXT, answer("Reject"))


def test_the_dags_ask_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Pipeline.of({"name": "shop", "schedules": {"approve": True}})
    dags = {dag.dag_id: dag for dag in asking.dags()}
    drop, control = dags["shop"].get_task("drop_slot"), dags["shop_control"].get_task("control")
    assert isinstance(drop, DropReplicationSlotApprovalOperator) and drop.is_teardown and drop.when == "retired"
    assert isinstance(control, PipelineControlApprovalOperator) and control.sweep == "{{ params.sweep }}"
    seen: list[Any] = []
    monkeypatch.setattr(consequences, "of_action", lambda _, *about, **more: seen.append((about, more)) or "much")
    monkeypatch.setattr(PipelineControlApprovalOperator, "pipeline_hook", SimpleNamespace(pipeline=lambda: None))
    control.action, control.tables, control.sweep = "snapshot", "a, b", "True"
    assert control.consequences() == "much" and seen == [(("snapshot", "a, b"), {"sweep": True})]
    plain = {dag.dag_id: dag for dag in Pipeline("shop").dags()}
    assert not isinstance(plain["shop"].get_task("drop_slot"), DropReplicationSlotApprovalOperator)
