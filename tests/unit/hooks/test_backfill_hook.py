"""Live snapshots that wait and go on, at the word of a DAG."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.hooks.backfill import BackfillHook, BackfillWatch
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import live
from airflow_bottledwater.state.control_records import (
    SnapshotReport,
    SnapshotRequest,
    encode,
    reading_key,
    snapshot_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic

FOUND = {
    "running": (SnapshotRequest(("a",)), SnapshotReport("reading")),
    "asked": (SnapshotRequest(("b",)), None),
    "waiting": (SnapshotRequest(("c",), paused=True), SnapshotReport("paused")),
    "ended": (None, SnapshotReport("finished")),
}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    found: list[tuple[str, str, bool]] = []

    def change(pipeline: Settings, name: str, request_id: str, *, paused: bool) -> None:
        if FOUND[request_id][0] is None:
            raise StateError("It has ended.", "")
        found.append((name, request_id, paused))

    monkeypatch.setattr(BackfillHook, "pipeline", lambda self: Settings.of(postgres="host=db", **self.settings))
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


# ------------------------------------------------------------------ watching one
class Shared:
    """Records of the shared topic; a look with ``now`` first lets happen what ``meanwhile`` says."""

    def __init__(self, records: dict[str, Any], meanwhile: list[Any]) -> None:
        self.records, self.meanwhile = records, meanwhile

    def get(self, key: str, *, now: bool = False) -> tuple[Any, float]:
        found = self.records.get(key), 0.0
        if now and self.meanwhile:
            self.meanwhile.pop(0)(self.records)
        return found

    def close(self) -> None:
        pass


def watching(monkeypatch: pytest.MonkeyPatch, records: dict[str, Any], *meanwhile: Any) -> BackfillWatch:
    shared = Shared(records, list(meanwhile))
    monkeypatch.setattr(ControlTopic, "of", lambda kafka: shared)
    return BackfillWatch(Settings.of(postgres="host=db"), "name", "id", lambda line: None)


REQUEST, READING = snapshot_key("name", "id"), reading_key("name", "id")


@pytest.mark.parametrize("reported", [{}, {READING: encode(SnapshotReport("reading"))}])
def test_one_that_was_removed_with_its_pipeline_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, reported: dict[str, Any]
) -> None:
    assert watching(monkeypatch, {REQUEST: encode(SnapshotRequest(("a",))), **reported}).fetch() is None
    found = watching(monkeypatch, dict(reported)).fetch()
    assert found is not None and found["state"] == "cancelled" and "slot was dropped" in found["error"]


def test_one_that_ends_in_this_moment_was_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(records: dict[str, Any]) -> None:
        records[READING] = encode(SnapshotReport("finished", rows=7))
        del records[REQUEST]

    records = {REQUEST: encode(SnapshotRequest(("a",))), READING: encode(SnapshotReport("reading"))}
    found = watching(monkeypatch, records, ends).fetch()
    assert found is not None and (found["state"], found["rows"]) == ("finished", 7)
