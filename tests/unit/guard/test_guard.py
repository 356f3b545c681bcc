"""The guard's thread lives as long as the job, whatever goes wrong."""

from __future__ import annotations

import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.guard import guard
from airflow_bottledwater.guard.guard import SourceGuard
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.pressure import Pressure
from airflow_bottledwater.state.control_records import StatusRecord
from airflow_bottledwater.state.problems import Problems
from tests.support.waiting import until


@pytest.mark.parametrize("snapshot", [False, True])
def test_what_goes_wrong_does_not_end_the_guard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, snapshot: bool
) -> None:
    monkeypatch.setattr(guard, "_READING", 0.001)
    asked, mended = list[object](), threading.Event()

    def fails(*_: object) -> Any:
        asked.append(None)
        if not mended.is_set():
            raise ZeroDivisionError
        return ()

    source = SimpleNamespace(ask=fails if snapshot else lambda _: None)
    made = SourceGuard(
        Settings.of(postgres="host=db"), cast(Any, None), cast(Any, None), cast(Any, source), snapshot=snapshot
    )
    monkeypatch.setattr(made, "weigh", lambda *_: None)
    with closing(made):
        made.watch([], fails)
        until(lambda: len(asked) > 2, "it goes on")
        mended.set()
        until(lambda: not made._told, "it works again")
    assert caplog.text.count("The guard does not work for now") == 1


def test_what_rests_goes_on_when_nothing_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_READING", 0.001)
    monkeypatch.setattr(guard, "_FORGOTTEN", 0.2)
    controller = SimpleNamespace(status=StatusRecord("streaming", cast(Any, None)), problems=Problems())
    pressure = Pressure(2 << 20, 2 << 20, None, 0, 0)
    answers: list[Any] = [(pressure, {}, None)]
    source = SimpleNamespace(ask=lambda _: answers[0])
    pipeline = Settings.of(postgres="host=db", guard_wal_bytes=1 << 20)
    made = SourceGuard(pipeline, cast(Any, controller), Meter(), cast(Any, source))
    with closing(made):
        made.watch([], lambda: (1,))
        until(lambda: made.rest and controller.problems.all(), "it rests")
        answers[0] = None
        until(lambda: not made.rest and not controller.problems.all(), "it goes on")
        assert controller.status.pressure == {}
        answers[0] = (pressure, {}, None)
        until(lambda: made.rest, "it rests again")


def test_what_is_advised_helps_the_snapshot_that_runs() -> None:
    """One that has begun keeps its lanes."""
    told: list[Problem] = []
    controller = SimpleNamespace(
        status=SimpleNamespace(pressure={}), problems=SimpleNamespace(tell=lambda _, problems: told.extend(problems))
    )
    pipeline = Settings.of(postgres="host=db", guard_wal_bytes=1 << 20)
    made = SourceGuard(pipeline, cast(Any, controller), cast(Any, None), cast(Any, None), snapshot=True)
    made.weigh(Pressure(2 << 20, 0, None, 0, 0), {}, None)
    (problem,) = told
    assert problem.remedy.startswith("Give the server more disk")
