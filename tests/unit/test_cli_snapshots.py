"""The subcommand that shows and changes live snapshots."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from airflow_bottledwater.cli import cli
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.provision import live
from airflow_bottledwater.state.control_records import SnapshotReport, SnapshotRequest

FOUND = {
    "aa": (
        SnapshotRequest(("orders",), "id < 7"),
        SnapshotReport(
            "reading", tables=["public.orders"], rows=1200, bytes=50, total_bytes=200, rows_per_second=80.0,
            seconds_left=33.0,
        ),
    ),
    "bb": (SnapshotRequest(("items",), paused=True), SnapshotReport("paused", rows=4, bytes=50)),
    "cc": (SnapshotRequest(("later",)), None),
}  # fmt: skip


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked for."""
    found: list[Any] = []
    monkeypatch.setattr(live, "name_of", lambda pipeline: "pipeline")
    monkeypatch.setattr(live, "cancel", lambda pipeline, name, each: found.append((name, each, "cancel")))
    monkeypatch.setattr(
        snapshots, "change", lambda pipeline, name, each, **changes: found.append((name, each, changes))
    )
    monkeypatch.setattr(snapshots, "reports", lambda pipeline, name: FOUND)
    return found


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["snapshots", "-d", "host=db", "-s", "shop", *arguments])


@pytest.mark.parametrize(
    ("option", "change", "word"),
    [
        ("--pause", {"paused": True}, "wait"),
        ("--resume", {"paused": False}, "go on"),
        ("--cancel", "cancel", "end"),
    ],
)
def test_one_is_changed(changed: list[Any], option: str, change: Any, word: str) -> None:
    result = run(option, "aa")
    assert result.exit_code == 0 and f"Live snapshot aa is asked to {word}." in result.stderr
    assert changed == [("pipeline", "aa", change)]


def test_several_changes_at_once_are_refused(changed: list[Any]) -> None:
    result = run("--pause", "aa", "--resume", "bb")
    assert result.exit_code != 0 and "Give one of --pause, --resume and --cancel." in result.output
    assert changed == []


def test_the_table_has_progress_pace_and_remaining_time_where_they_are_known(changed: list[Any]) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    lines = {line.split()[1]: line for line in result.output.splitlines() if line[2:4] in FOUND}
    cells = {each: [cell.strip() for cell in line.strip("│").split("│")] for each, line in lines.items()}
    assert cells["aa"][1:] == ["reading", "public.orders", "id < 7", "1,200", "0", "0", "25 %", "80", "33 s", ""]
    assert cells["bb"][1:] == ["paused", "items", "", "4", "0", "0", "", "", "", ""]
    assert cells["cc"][1:] == ["asked for", "later", "", "0", "0", "0", "", "", "", ""]


def test_for_programs_there_are_request_and_report(changed: list[Any]) -> None:
    shown = json.loads(run("--json").stdout)
    assert shown["aa"]["request"]["where"] == "id < 7" and shown["aa"]["report"]["seconds_left"] == 33.0
    assert shown["bb"]["request"]["paused"] is True and shown["cc"]["report"] is None


@pytest.mark.parametrize("tables", ["", ",", " , "])
@pytest.mark.parametrize("option", ["--sweep", "--by-key"])
def test_no_table_does_not_mean_all(tables: str, option: str) -> None:
    result = CliRunner().invoke(cli, ["snapshot", "-d", "host=nowhere.invalid", "--tables", tables, option])
    assert result.exit_code == 1 and "'*.*' means all" in str(result.exception)


def test_an_id_is_shown_whole_where_there_is_little_room(changed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "reports", lambda pipeline, name: {"0123456789ab": FOUND["aa"]})
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(cli, ["snapshots", "-d", "host=db", "-s", "shop"])
    assert "0123456789ab" in shown.output
