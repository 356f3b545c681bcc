"""Live snapshots that wait and go on, at the word of a DAG."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.hooks.backfill import BackfillHook
from airflow_bottledwater.provision import live
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import snapshots
from airflow_bottledwater.state.control_records import SnapshotReport, SnapshotRequest

FOUND = {
    "running": (SnapshotRequest(("a",)), SnapshotReport("reading")),
    "asked": (SnapshotRequest(("b",)), None),
    "waiting": (SnapshotRequest(("c",), paused=True), SnapshotReport("paused")),
    "ended": (None, SnapshotReport("finished")),
}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    found: list[tuple[str, str, bool]] = []

    def change(pipeline: Pipeline, name: str, request_id: str, *, paused: bool) -> None:
        if FOUND[request_id][0] is None:
            raise StateError("It has ended.", "")
        found.append((name, request_id, paused))

    monkeypatch.setattr(BackfillHook, "pipeline", lambda self: Pipeline.of(postgres="host=db", **self.settings))
    monkeypatch.setattr(live, "name_of", lambda pipeline: f"pipeline {pipeline.slot}")
    monkeypatch.setattr(snapshots, "reports", lambda pipeline, name: FOUND)
    monkeypatch.setattr(snapshots, "change", change)
    return found


def test_all_that_are_open_wait_and_go_on(changed: list[Any]) -> None:
    hook = BackfillHook("shop")
    assert hook.pause() == ["running", "asked"]
    assert hook.resume() == ["waiting"]
    assert changed == [
        ("pipeline shop", "running", True),
        ("pipeline shop", "asked", True),
        ("pipeline shop", "waiting", False),
    ]


def test_one_waits_and_goes_on(changed: list[Any]) -> None:
    assert BackfillHook("shop").pause("asked") == ["asked"]
    assert BackfillHook("shop").resume("asked") == ["asked"]
    assert [(each, paused) for _, each, paused in changed] == [("asked", True), ("asked", False)]


def test_one_that_has_ended_is_an_error_if_it_was_named_and_none_if_it_ends_in_between(
    changed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StateError):
        BackfillHook("shop").pause("ended")
    open_still = {"ended": (SnapshotRequest(("d",)), None), "asked": FOUND["asked"]}
    monkeypatch.setattr(snapshots, "reports", lambda pipeline, name: open_still)
    assert BackfillHook("shop").pause() == ["asked"]
