"""The codec of the records in a run directory: what is written, and what is malformed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.run_directory import Driver, Exit, RunRecord, StopAsked, Supervisor
from airflow_bottledwater.model.outcome import Outcome

RECORDS: list[tuple[str, RunRecord]] = [
    ("supervisor.json", Supervisor(17, 4711, "h")),
    ("supervisor.json", Supervisor(17, None, "h")),
    ("driver.json", Driver(18)),
    ("stop.json", StopAsked(1700000000.5)),
    ("exit.json", Exit(-9, 1700000000.5)),
    ("outcome.json", Outcome(ok=True, stopped=True, counts={"position": "0/5", "published": 7})),
    ("outcome.json", Outcome(ok=False, kind="Outage", error="Kafka is away.", transient=True)),
]


@pytest.mark.parametrize(("name", "record"), RECORDS)
def test_what_is_written_is_read_again(tmp_path: Path, name: str, record: RunRecord) -> None:
    run_directory.write(tmp_path, record)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert run_directory.read(tmp_path, type(record)) == record


@pytest.mark.parametrize("record", [Supervisor(17, 4711, "h"), Driver(18), Exit(0, 1.0)])
def test_a_field_that_is_not_known_is_left_out(tmp_path: Path, record: Any) -> None:
    run_directory.write(tmp_path, record)
    path = tmp_path / record.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "added": [1]}))
    assert run_directory.read(tmp_path, type(record)) == record


def test_what_is_missing_has_its_default(tmp_path: Path) -> None:
    (tmp_path / "supervisor.json").write_text('{"pid": 17, "started": 4711}')
    (tmp_path / "exit.json").write_text('{"code": 75}')
    (tmp_path / "outcome.json").write_text('{"ok": false, "error": "gone"}')
    assert run_directory.read(tmp_path, Supervisor) == Supervisor(17, 4711)
    assert run_directory.read(tmp_path, Exit) == Exit(75)
    assert run_directory.read(tmp_path, Outcome) == Outcome(ok=False, error="gone", transient=False)


@pytest.mark.parametrize("kind", [Supervisor, Driver, Exit, Outcome])
@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "17",
        "{}",
        '{"pid": "x", "started": 1}',
        '{"code": null}',
        '{"ok": "yes"}',
        '{"ok": 1}',
        b"\xff",
    ],
)
def test_what_is_malformed_is_as_if_it_were_not_there(
    tmp_path: Path, kind: type[RunRecord], text: str | bytes | None
) -> None:
    if text is not None:
        (tmp_path / kind.FILE).write_bytes(text.encode() if isinstance(text, str) else text)
    assert run_directory.read(tmp_path, kind) is None


def test_a_supervisor_goes_on_whose_packages_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_directory.write(tmp_path, Driver(17))
    assert run_directory.read(tmp_path, Driver) == Driver(17)
    monkeypatch.setitem(sys.modules, "airflow_bottledwater.decoding", None)
    assert run_directory.read(tmp_path, Driver) is None


def test_a_request_to_stop_is_one_whatever_it_says(tmp_path: Path) -> None:
    assert not run_directory.present(tmp_path, StopAsked)
    (tmp_path / "stop.json").touch()
    assert run_directory.present(tmp_path, StopAsked)


def test_what_a_job_gives_to_who_waits_for_it() -> None:
    assert Outcome(ok=True, counts={"rows": 7}).result == {"rows": 7}
    assert Outcome(ok=True, stopped=True, counts={"rows": 7}).result == {"rows": 7, "stopped": True}
