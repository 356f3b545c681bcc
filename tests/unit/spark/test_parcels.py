"""What a driver gives to a worker that has another build of the package."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import OtherBuild
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import executors, parcels, stream, tasks
from airflow_bottledwater.spark.error_codec import Failure, received
from airflow_bottledwater.spark.job import SettingsFile

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"})
_MODULE = """
from dataclasses import dataclass
@dataclass(frozen=True, slots=True)
class Plan:
    filenode: int
{more}    rows: int = 0
    upto: int = 0
"""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the package, and how another build has it."""
    module: Any = types.ModuleType("bottledwater_plans")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def become(more: str) -> None:
        exec(compile(_MODULE.format(more=more), module.__name__, "exec"), module.__dict__)

    module.become = become
    become("")
    return module


def test_a_worker_of_another_build_unpacks_nothing(plans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next build has one field more, in front of those that the driver has given."""
    plan = plans.Plan(7, 100, 5000)
    parcel = parcels.packed(lambda: {"rows": plan.rows})
    assert received(parcels.carry_out(parcel)) == {"rows": 100}
    plans.become("    key: int = 0\n")
    monkeypatch.setattr(parcels, "_BUILD", "0.1.0 (sources of the next build)")
    found = parcels.carry_out(parcel)
    # Spark does not try it again: the job is started again, with the driver of the next build
    assert isinstance(found, Failure)
    with pytest.raises(OtherBuild, match="sources of the next build"):
        received(found)


def test_a_build_is_known_by_what_its_sources_are(tmp_path: Path) -> None:
    """There are many builds of one version."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "a.py"
    file.write_text("x = 1\n")
    before = parcels._build(tmp_path)
    file.write_text("y = 1\n")
    changed = parcels._build(tmp_path)
    file.rename(tmp_path / "a.py")
    assert len({before, changed, parcels._build(tmp_path)}) == 3
    (tmp_path / "a.py").unlink()
    assert "(no sources found)" in parcels._build(tmp_path)


def test_a_build_is_that_of_the_files_that_a_process_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be exchanged before the first task is packed."""
    loaded = parcels._build(Path(parcels.__file__).parents[1])
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"the next build")
    assert parcels.packed(dict)[0] == loaded


class Spark:
    """Spark's context, which carries nothing out."""

    def __init__(self, master: str, result: Any = None) -> None:
        self.master, self.given, self.result = master, list[Any](), result or {}

    def parallelize(self, given: list[Any], _: int) -> Any:
        self.given += given
        done = SimpleNamespace(collect=lambda: [self.result])
        return SimpleNamespace(map=lambda work: done)

    def statusTracker(self) -> Any:
        return SimpleNamespace(getActiveStageIds=list)


def test_all_that_tasks_are_given_is_in_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = Spark("spark://h:7077")
    file = SettingsFile("/nowhere/pipeline.json")
    executors.check(context, PIPELINE, file)
    tasks.run_each(context, PIPELINE, lambda task: {}, [SettingsFile("a")], "lane")
    monkeypatch.setattr("airflow_bottledwater.state.claim.read_state", lambda *_: SimpleNamespace(position="0/0"))
    start: Any = SimpleNamespace(position="0/0", state_topic="")
    with pytest.raises(AttributeError):  # the state has no counters
        stream.run_task(context, PIPELINE, file, start, False, threading.Event())
    assert [[type(each) for each in given] for given in context.given] == [[str, bytes]] * 3


def test_a_stream_whose_worker_has_another_build_has_a_last_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker writes none: it has not unpacked the stream's start."""
    refused = parcels.carry_out(("0.1.0 (sources of the driver)", b""))
    told: list[Any] = []
    monkeypatch.setattr(stream, "_report_death", lambda *given: told.append(given[2]))
    context: Any = Spark("local[2]", refused)
    start: Any = SimpleNamespace(position="0/0", state_topic="")
    with pytest.raises(OtherBuild, match=r"the driver has 0\.1\.0"):
        stream.run_task(context, PIPELINE, SettingsFile("/nowhere/p.json"), start, False, threading.Event())
    assert [type(each) for each in told] == [OtherBuild]
