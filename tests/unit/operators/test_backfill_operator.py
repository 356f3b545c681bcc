"""What becomes of a backfill's task when its live snapshot has ended."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pendulum
import pytest
from airflow.sdk import CronTriggerTimetable
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_bottledwater.dag import Pipeline
from airflow_bottledwater.errors import Outage, SettingError
from airflow_bottledwater.hooks import backfill
from airflow_bottledwater.hooks.backfill import BackfillWatch
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import live
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.triggers.backfill import BackfillTrigger

REPORT = {
    "state": "finished", "tables": ["public.orders"], "rows": 1200, "superseded": 3, "tombstones": 2, "dead_letters": 0,
    "boundary": "0/10", "error": "",
}  # fmt: skip
ASKED = {"name": "pipeline", "request_id": "id"}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The live snapshots whose records were removed."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(snapshots, "forget", lambda pipeline, name, request_id: found.append((name, request_id)))
    monkeypatch.setattr(BackfillToKafkaOperator, "pipeline_hook", SimpleNamespace(pipeline=lambda: None))
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the task's log."""
    lines: list[str] = []

    def write(text: str, *arguments: Any) -> None:
        lines.append(text % arguments)

    monkeypatch.setattr(BackfillToKafkaOperator, "log", SimpleNamespace(info=write, warning=write))
    return lines


def conclude(*, sweep: bool = False, **report: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"bottledwater_backfill": ASKED}
    store = SimpleNamespace(get=values.get, delete=values.pop)
    operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="orders", sweep=sweep)
    event = {"status": "ended", "report": {**REPORT, **report}}
    found = operator.execute_complete({"task_state_store": store}, event)  # type: ignore[typeddict-item]
    assert values == {}
    return found


def test_the_result_and_the_log_say_what_was_published(forgotten: list[tuple[str, str]], told: list[str]) -> None:
    assert conclude() == {
        "tables": ["public.orders"], "rows": 1200, "superseded": 3, "tombstones": 2, "dead_letters": 0,
        "boundary": "0/10",
    }  # fmt: skip
    (line,) = told
    assert line.startswith("1,200 rows of public.orders are published again; 3 are superseded")
    assert forgotten == [("pipeline", "id")]


def test_the_log_has_keys_that_were_removed_and_rows_that_could_not_be_published(
    forgotten: list[tuple[str, str]], told: list[str]
) -> None:
    conclude(sweep=True, dead_letters=1)
    assert told[1:] == [
        "2 tombstones are published, for keys that the tables do not have.",
        "1 rows could not be published, and are dead letters.",
    ]


@pytest.mark.parametrize(
    ("report", "match"),
    [({"state": "cancelled"}, "cancelled"), ({"state": "failed", "error": "no such table"}, "no such table")],
)
def test_a_live_snapshot_that_did_not_finish_fails_the_task_without_a_retry(
    forgotten: list[tuple[str, str]], report: dict[str, Any], match: str
) -> None:
    with pytest.raises(AirflowFailException, match=match):
        conclude(**report)


def test_what_could_not_be_told_to_the_assets_is_left_for_a_retry(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[tuple[str, str]]
) -> None:
    def away(self: AssetEvents, report: Any) -> None:
        raise Outage("away")

    with monkeypatch.context() as patch, pytest.raises(Outage, match="away"):
        patch.setattr(AssetEvents, "backfill", away)
        conclude()
    assert not forgotten
    conclude()
    assert forgotten


# ---------------------------------------------------------------------- asking
class Store(dict[str, Any]):
    """A task's state."""

    def set(self, name: str, value: Any, retention: Any = None) -> None:
        self[name] = value


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, SnapshotRequest, str]]:
    """What was asked for: how, what, and under which id."""
    found: list[tuple[str, SnapshotRequest, str]] = []
    monkeypatch.setattr(live, "check", lambda pipeline, request: "pipeline")
    monkeypatch.setattr(live, "name_of", lambda pipeline: "pipeline")
    monkeypatch.setattr(live, "publishes", lambda pipeline, name: "")
    monkeypatch.setattr(snapshots, "reports", lambda pipeline, name: {each[2]: (each[1], None) for each in found})
    monkeypatch.setattr(
        snapshots, "ask", lambda pipeline, name, each, request: found.append(("read again", request, each))
    )
    return found


def ask(store: Store, *, try_number: int = 1, **options: Any) -> dict[str, str]:
    operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="orders", retries=3, **options)
    context = {"task_state_store": store, "ti": SimpleNamespace(try_number=try_number, max_tries=3)}
    return operator._ask(context, Settings.of(postgres="host=db", tables="orders"))  # type: ignore[arg-type]


def test_a_retry_follows_what_was_asked_for(asked_for: list[Any]) -> None:
    store = Store()
    first = ask(store)
    assert ask(store, try_number=2) == first
    assert [how for how, _, _ in asked_for] == ["read again"]


def test_a_retry_asks_if_the_try_before_it_died_before_it_could(asked_for: list[Any]) -> None:
    store = Store()
    first = ask(store)
    asked_for.clear()
    assert ask(store, try_number=2) == first
    assert [each for _, _, each in asked_for] == [first["request_id"]]


def test_a_retry_asks_anew_if_the_earlier_one_was_cancelled_with_its_try(
    asked_for: list[Any], forgotten: list[tuple[str, str]]
) -> None:
    """A worker was shut down: no user has ended the task."""
    store = Store()
    first = ask(store)
    how, request, each = asked_for[0]
    asked_for[0] = (how, replace(request, cancelled=True), each)
    second = ask(store, try_number=2)
    assert second != first and len(asked_for) == 2 and forgotten == [("pipeline", first["request_id"])]


def test_ended_with_its_worker_the_task_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="orders", deferrable=False)

    def fetch() -> dict[str, Any]:
        operator.on_kill()
        return {**REPORT, "state": "cancelled"}

    monkeypatch.setattr(BackfillToKafkaOperator, "pipeline_hook", SimpleNamespace(pipeline=lambda: None))
    monkeypatch.setattr(BackfillToKafkaOperator, "_ask", lambda *_: ASKED)
    monkeypatch.setattr(backfill, "cancel", lambda *_, **__: None)
    monkeypatch.setattr(
        "airflow_bottledwater.operators.backfill.BackfillWatch",
        lambda *_, **__: SimpleNamespace(fetch=fetch, close=lambda: None),
    )
    with pytest.raises(Outage, match="A retry asks for the rows again"):
        operator.execute({})  # type: ignore[typeddict-item]


def test_no_rows_are_asked_for_of_an_empty_data_interval(
    monkeypatch: pytest.MonkeyPatch, asked_for: list[Any], forgotten: list[tuple[str, str]]
) -> None:
    """A plain cron expression gives its runs intervals that end where they begin: each would publish nothing, and be
    green."""
    at, between = (
        pendulum.datetime(2026, 3, 1),
        "d >= '{{{{ data_interval_start{} }}}}' AND d < '{{{{ data_interval_end{} }}}}'",
    )
    daily = CronTriggerTimetable("@daily", timezone="UTC")
    made = Pipeline("shop").backfill_dag(by="d", schedule=daily)
    wheres = [*(between.format(each, each) for each in (" | ds", "", ".year")), made.get_task("backfill").where]
    monkeypatch.setattr(BackfillToKafkaOperator, "_wait", lambda *_: REPORT)
    monkeypatch.setattr(BackfillToKafkaOperator, "_conclude", lambda *_: {})

    def execute(where: str, end: Any, at: Any = at) -> None:
        operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="orders", where=where, deferrable=False)
        context: Any = {
            "task_state_store": Store(), "ti": SimpleNamespace(try_number=1, max_tries=0),
            "dag": made, **({} if at is None else {"data_interval_start": at, "data_interval_end": end}),
        }  # fmt: skip
        operator.render_template_fields(context)
        operator.execute(context)

    for where in wheres:
        with pytest.raises(
            AirflowFailException, match=r"data interval of this run is empty.*CronDataIntervalTimetable"
        ):
            execute(where, at)
    with pytest.raises(AirflowFailException, match=r"has no data interval.*Trigger the DAG with a logical date"):
        execute(wheres[-1], None, None)
    assert not asked_for
    execute(wheres[0], at.add(days=1))
    # of another interval, or of none
    for where in (between.format(".subtract(days=1) | ds", " | ds"), "d >= '{{ data_interval_start | ds }}'", "d > 5"):
        execute(where, at)
    assert len(asked_for) == 4


def test_a_retry_whose_template_names_no_table_any_more_does_not_mean_all(asked_for: list[Any]) -> None:
    store = Store(bottledwater_backfill=dict(ASKED))
    operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="", retries=3)
    context = {"task_state_store": store, "ti": SimpleNamespace(try_number=2, max_tries=3)}
    with pytest.raises(SettingError, match="at least one table"):
        operator._ask(context, Settings.of(postgres="host=db"))  # type: ignore[arg-type]
    assert not asked_for and store == {"bottledwater_backfill": ASKED}


@pytest.mark.parametrize(("try_number", "cancelled"), [(1, []), (2, [ASKED])])
def test_when_the_trigger_fails_the_last_try_cancels_the_live_snapshot(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[Any], try_number: int, cancelled: list[Any]
) -> None:
    done: list[dict[str, str]] = []
    monkeypatch.setattr(backfill, "cancel", lambda pipeline, **asked: done.append(asked))
    store = SimpleNamespace(get={"bottledwater_backfill": ASKED}.get)
    context: Any = {"task_state_store": store, "ti": SimpleNamespace(try_number=try_number, max_tries=1)}
    operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="orders", timeout=5, retries=1)
    with pytest.raises(Exception, match="Trigger"):
        operator.resume_execution("__fail__", {"error": "Trigger failure"}, context)
    assert done == cancelled


def test_what_the_triggerer_cannot_see_the_task_looks_at(
    connections: str, monkeypatch: pytest.MonkeyPatch, forgotten: list[Any]
) -> None:
    trigger = BackfillTrigger(**ASKED, hook=PipelineHook.of_state("postgres_default", "kafka_default", "s").arguments())
    event = {"status": "unseen", "message": "Nobody watches it.", "trigger": list(trigger.serialize())}
    seen = [None, REPORT]
    monkeypatch.setattr(BackfillWatch, "fetch", lambda self: seen.pop(0))
    values: dict[str, Any] = {"bottledwater_backfill": ASKED}
    context: Any = {"task_state_store": SimpleNamespace(get=values.get, delete=values.pop)}
    operator = BackfillToKafkaOperator(task_id="t", pipeline="shop", tables="orders")
    with pytest.raises(TaskDeferred) as raised:
        operator.resume_execution("execute_complete", {"event": event}, context)
    again: Any = raised.value.trigger
    assert again.serialize() == trigger.serialize() and not forgotten
    assert operator.resume_execution("execute_complete", {"event": event}, context)["rows"] == 1200
