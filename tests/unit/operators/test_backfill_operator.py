"""What becomes of a backfill's task when its live snapshot has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator
from airflow_bottledwater.state import snapshots

REPORT = {
    "state": "finished", "tables": ["public.orders"], "rows": 1200, "newer": 3, "swept": 2, "dead_letters": 0, "boundary": "0/10",
    "error": "",
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
    operator = BackfillToKafkaOperator(task_id="t", tables="orders", sweep=sweep)
    event = {"status": "ended", "report": {**REPORT, **report}}
    found = operator.execute_complete({"task_state_store": store}, event)  # type: ignore[typeddict-item]
    assert values == {}
    return found


def test_the_result_and_the_log_say_what_was_published(forgotten: list[tuple[str, str]], told: list[str]) -> None:
    assert conclude() == {
        "tables": ["public.orders"], "rows": 1200, "left_out": 3, "removed_keys": 2, "dead_letters": 0, "boundary": "0/10",
    }  # fmt: skip
    (line,) = told
    assert line.startswith("1,200 rows of public.orders are published again; 3 are left out")
    assert forgotten == [("pipeline", "id")]


def test_the_log_has_keys_that_were_removed_and_rows_that_could_not_be_published(
    forgotten: list[tuple[str, str]], told: list[str]
) -> None:
    conclude(sweep=True, dead_letters=1)
    assert told[1:] == [
        "2 keys that the tables do not have are removed.",
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
