"""The trigger of a backfill: what it sees, and what becomes of the live snapshot when a user ends the task."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Outage
from airflow_bottledwater.hooks import backfill, tasks
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.triggers import pipeline as pipelines
from airflow_bottledwater.triggers import watching
from airflow_bottledwater.triggers.backfill import BackfillTrigger

ARGUMENTS: dict[str, Any] = {
    "name": "pipeline",
    "request_id": "id",
    "hook": {
        "postgres_conn_id": "pg",
        "kafka_conn_id": "k",
        "schema_registry_conn_id": None,
        "settings": {"slot": "shop"},
    },
    "poll_interval": 0.01,
    "deadline": None,
}


class Watch:
    """A watch that sees what it is told to."""

    def __init__(self, *seen: Any) -> None:
        self.seen, self.closed = list(seen), False

    def fetch(self) -> Any:
        found = self.seen.pop(0) if self.seen else None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


def events(monkeypatch: pytest.MonkeyPatch, watch: Watch, **arguments: Any) -> list[Any]:
    monkeypatch.setattr(watching, "SETTLED", 0.0)

    async def begin(_: BackfillTrigger) -> Watch:
        return watch

    monkeypatch.setattr(BackfillTrigger, "_begin", begin)

    async def collect() -> list[Any]:
        return [event.payload async for event in BackfillTrigger(**{**ARGUMENTS, **arguments}).run()]

    found = asyncio.run(asyncio.wait_for(collect(), 60))
    assert watch.closed
    return found


def test_it_is_stored_as_plain_values() -> None:
    path, arguments = BackfillTrigger(**ARGUMENTS).serialize()
    assert path == "airflow_bottledwater.triggers.backfill.BackfillTrigger" and arguments == ARGUMENTS


def test_it_fires_at_the_end_and_an_outage_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"state": "finished", "rows": 7}
    watch = Watch(None, Outage("Kafka does not answer."), None, report)
    assert events(monkeypatch, watch) == [{"status": "ended", "report": report}]


def test_with_other_credentials_it_looks_the_connection_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"state": "finished", "rows": 7}
    watches = [Watch(CredentialsRefused("refused")), Watch(report)]
    begun = list(watches)

    async def begin(_: BackfillTrigger) -> Watch:
        return begun.pop(0)

    monkeypatch.setattr(watching, "SETTLED", 0.0)
    monkeypatch.setattr(BackfillTrigger, "_begin", begin)

    async def collect() -> list[Any]:
        return [event.payload async for event in BackfillTrigger(**ARGUMENTS).run()]

    assert asyncio.run(asyncio.wait_for(collect(), 60)) == [{"status": "ended", "report": report}]
    assert [watch.closed for watch in watches] == [True, True]


def test_it_fires_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert events(monkeypatch, Watch(), deadline=time.time() + 0.05) == [{"status": "timeout"}]


@pytest.mark.parametrize(
    ("states", "cancelled"),
    [
        ({"deferred"}, False),
        ({"queued"}, False),
        ({"failed"}, True),
        ({"success"}, True),
        ({"None"}, True),
        (set(), False),
    ],
    ids=[
        "given to another triggerer",
        "resumed",
        "marked as failed",
        "marked as success",
        "cleared",
        "its row was removed",
    ],
)
def test_only_a_user_who_ends_the_task_cancels_the_live_snapshot(
    monkeypatch: pytest.MonkeyPatch, states: set[str], cancelled: bool
) -> None:
    found: list[Any] = []

    async def answer(*_: Any) -> set[str]:
        return states

    async def pipeline(_: Any) -> str:
        return "the pipeline"

    monkeypatch.setattr(tasks, "states", answer)
    monkeypatch.setattr(PipelineHook, "apipeline", pipeline)
    monkeypatch.setattr(backfill, "cancel", lambda *arguments: found.append(arguments))
    trigger = BackfillTrigger(**ARGUMENTS)
    trigger.task_instance = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1)  # type: ignore[assignment]
    asyncio.run(trigger.on_kill())
    assert found == ([("the pipeline", "pipeline", "id")] if cancelled else [])


def test_a_kafka_that_does_not_answer_fails_nothing_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def pipeline(hook: Any) -> None:
        asked.append(hook)
        raise Outage("Kafka does not answer.")

    async def failed(*_: Any) -> set[str]:
        return {"failed"}

    monkeypatch.setattr(tasks, "states", failed)
    monkeypatch.setattr(PipelineHook, "apipeline", pipeline)
    trigger = BackfillTrigger(**ARGUMENTS)
    trigger.task_instance = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1)  # type: ignore[assignment]
    asyncio.run(trigger.on_kill())
    assert len(asked) == 1


def test_the_connections_are_looked_up_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch may have begun months ago, with another password."""
    answers: list[Any] = ["old", "new", Outage("Airflow does not answer."), asyncio.sleep]
    found: list[Any] = []

    async def pipeline(_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, str):
            await answer(60)
        return answer

    async def failed(*_: Any) -> set[str]:
        return {"failed"}

    monkeypatch.setattr(tasks, "states", failed)
    monkeypatch.setattr(PipelineHook, "apipeline", pipeline)
    monkeypatch.setattr(pipelines, "_LOOK_UP_SECONDS", 0.05)
    monkeypatch.setattr(backfill, "cancel", lambda pipeline, *_: found.append(pipeline))
    trigger = BackfillTrigger(**ARGUMENTS)
    trigger.task_instance = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1)  # type: ignore[assignment]

    async def life() -> None:
        await trigger.pipeline()
        for _ in range(3):
            await trigger.on_kill()

    asyncio.run(life())
    assert found == ["new", "new", "new"]
