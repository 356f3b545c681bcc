"""The subcommands that pause tables, and go on with them."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from airflow_bottledwater.cli import cli, tables
from airflow_bottledwater.provision import pausing


@pytest.mark.parametrize(
    ("command", "options", "named", "said"),
    [
        ("pause-table", ("--reason", "a migration"), {"paused": True, "by": "alice", "why": "a migration"}, "to pause"),
        ("resume-table", (), {"paused": False, "by": "alice", "why": ""}, "to go on with"),
    ],
)
def test_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, command: str, options: tuple[str, ...], named: dict[str, Any], said: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(tables.getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(tables, "pipeline_of", lambda values, later: values["slot"])
    monkeypatch.setattr(pausing, "ask", lambda _, *args, **more: asked.append((*args, more)) or ("pipeline", "aa"))
    monkeypatch.setattr(pausing, "outcome", lambda _, *args, timeout: f"{args} {timeout}")
    line = [command, "-d", "host=db", "-s", "shop", "--tables", "orders, items", "--timeout", "5", *options]
    result = CliRunner().invoke(cli, line)
    assert result.exit_code == 0, result.stderr
    assert asked == [(["orders", "items"], named)]
    assert result.stderr == f"Asked {said} the tables. ('pipeline', 'aa') 5.0\n"


def test_whoever_has_no_name_asks_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(tables.getpass, "getuser", nobody)
    assert tables._user() == ""
