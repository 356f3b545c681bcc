"""What the executors of a cluster try before the work begins, and what is said of what they lack."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.spark import executors, parcels
from airflow_bottledwater.spark.job import SettingsFile

PIPELINE = Settings.of(
    postgres="host=127.0.0.1 port=1 dbname=shop",
    kafka={"bootstrap.servers": "127.0.0.1:1"},
    registry={"url": "http://127.0.0.1:1"},
    executor_timeout=5.0,
)
HERE = socket.gethostname()


class Cluster:
    """Spark's context for a cluster whose executors are this process. It starts a task that raises again, as Spark
    does."""

    master = "spark://h:7077"

    def __init__(self, fail: Exception | None = None) -> None:
        self.attempts, self.cancelled, self._fail = 0, False, fail

    def parallelize(self, given: Iterable[Any], count: int) -> Cluster:
        self._parcels = given
        return self

    def map(self, work: Callable[[Any], Any]) -> Cluster:
        self._work = work
        return self

    def collect(self) -> list[Any]:
        if self._fail is not None:
            raise self._fail
        while True:
            self.attempts += 1
            try:
                return [self._work(each) for each in self._parcels]
            except Exception:
                if self.attempts == 4:
                    raise

    def getConf(self) -> dict[str, str]:
        return {"spark.driver.host": "10.0.0.1"}

    def cancelAllJobs(self) -> None:
        self.cancelled = True


@pytest.fixture
def file(tmp_path: Path) -> SettingsFile:
    return SettingsFile(str(PIPELINE.write(tmp_path)))


def check(cluster: Any, file: SettingsFile) -> None:
    executors.check(cluster, PIPELINE, file)


def answer(_: Settings) -> dict[str, Callable[[], None]]:
    """All servers answer."""
    return {"PostgreSQL": lambda: None, "Kafka": lambda: None}


def test_executors_that_have_everything_pass(file: SettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_servers", answer)
    cluster = Cluster()
    check(cluster, file)
    assert cluster.attempts == 1


def test_on_one_host_nothing_is_tried(file: SettingsFile) -> None:
    cluster = Cluster()
    cluster.master = "local[2]"
    check(cluster, file)
    assert cluster.attempts == 0


def test_another_build_of_the_package_is_refused(file: SettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_servers", answer)
    monkeypatch.setattr(parcels, "packed", lambda _: ("2.0", b""))
    monkeypatch.setattr(parcels, "_BUILD", "1.9")
    with pytest.raises(Refused, match=rf"{HERE} has airflow-provider-bottledwater 1\.9, and the driver has 2\.0"):
        check(Cluster(), file)


def test_another_version_of_python_is_refused(file: SettingsFile) -> None:
    raised = RuntimeError(
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11."
    )
    with pytest.raises(Refused, match="different versions of Python"):
        check(Cluster(raised), file)


def _away() -> None:
    raise Outage("The broker is away.", "Wait.")


def test_what_cannot_be_reached_is_said_at_once_and_spark_does_not_try_again(
    file: SettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_servers", lambda _: {"PostgreSQL": lambda: None, "Kafka": _away})
    cluster = Cluster()
    with pytest.raises(Outage, match=rf"From the executor on host {HERE}: The broker is away\. Wait\."):
        check(cluster, file)
    assert cluster.attempts == 1


def test_what_the_first_task_lacks_is_said_before_others_wait_for_the_same(
    file: SettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer cores than tasks they would wait one after the other."""
    monkeypatch.setattr(executors, "_servers", lambda _: {"Kafka": _away})
    cluster: Any = Cluster()
    with pytest.raises(Outage, match="The broker is away"):
        executors.check(cluster, PIPELINE, file, count=8)
    assert cluster.attempts == 1
    monkeypatch.setattr(executors, "_servers", answer)
    executors.check(cluster, PIPELINE, file, count=8)
    assert cluster.attempts == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_an_executor_of_another_user_finds_the_file_that_spark_has_sent(tmp_path: Path) -> None:
    """The folder of the original may be on this host, and closed to that user."""
    closed, work = tmp_path / "closed", tmp_path / "work"
    for folder in (closed, work):
        folder.mkdir()
    original = PIPELINE.write(closed)
    shutil.copy(original, work)
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_uid == os.getuid() and "pytest" in str(path):
            path.chmod(0o755)
    closed.chmod(0o700)
    for path in (work, work / original.name):
        os.chown(path, 65534, 65534)
    # all is imported first, since the other user may not read this Python
    code = (
        f"import os; from airflow_bottledwater.spark.job import SettingsFile; file = SettingsFile({str(original)!r})\n"
        f"file.load(); os.chdir({str(work)!r}); os.setgid(65534); os.setuid(65534); print(file.load().slot)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == PIPELINE.slot, done.stderr


def test_a_refusal_keeps_its_class(file: SettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise CredentialsRefused("The password is wrong.")

    monkeypatch.setattr(executors, "_servers", lambda _: {"Kafka": refuse})
    with pytest.raises(CredentialsRefused, match=r"From the executor .*: The password is wrong"):
        check(Cluster(), file)


def test_a_server_that_swallows_packets_does_not_use_up_the_time(
    file: SettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(executors, "_servers", lambda _: {"Kafka at k:9092": ended.wait, "PostgreSQL": lambda: None})
    monkeypatch.setattr(executors, "_REACH", 0.2)
    with pytest.raises(Outage, match=rf"{HERE}: Kafka at k:9092: no answer within"):
        check(Cluster(), file)
    ended.set()


def test_the_default_time_for_executors_leaves_room_for_their_start() -> None:
    assert SETTINGS["executor_timeout"].default - executors._REACH > 30


@pytest.mark.parametrize(
    ("number", "what"), [(0, "PostgreSQL at 127"), (1, "Kafka at 127"), (2, "The schema registry at http://127")]
)
def test_each_server_of_the_pipeline_is_tried(number: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_bottledwater.kafka import topics

    monkeypatch.setattr(topics, "_TIMEOUT", 0.1)
    name, ask = list(executors._servers(PIPELINE).items())[number]
    assert name.startswith(what)
    with pytest.raises(Outage):
        ask()


def test_without_avro_there_is_no_registry_to_try() -> None:
    assert len(executors._servers(PIPELINE.with_(format="json"))) == 2


def test_executors_that_never_begin(file: SettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = PIPELINE.with_(executor_timeout=0.3)
    ended = threading.Event()
    cluster = Cluster()
    monkeypatch.setattr(cluster, "collect", ended.wait)
    began = time.monotonic()
    with pytest.raises(Outage, match=r"No executor of spark://h:7077 .*10\.0\.0\.1"):
        executors.check(cluster, pipeline, file)  # type: ignore[arg-type]
    ended.set()
    assert cluster.cancelled and time.monotonic() - began < 30


# ------------------------------------------------------------------ while the work lasts
class Stages:
    """Spark's context, and what it says of its stages: how many of each one's tasks run."""

    def __init__(self, master: str = "spark://h:7077") -> None:
        self.master, self.running = master, list[int]()

    def statusTracker(self) -> Stages:
        return self

    def getActiveStageIds(self) -> list[int]:
        return list(range(len(self.running) + 1))

    def getStageInfo(self, stage: int) -> Any:
        # one that Spark does not know any more
        return SimpleNamespace(numActiveTasks=self.running[stage]) if stage < len(self.running) else None


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass."""
    clock = [100.0]
    monkeypatch.setattr(executors.time, "monotonic", lambda: clock[0])

    def pass_by(many: float) -> None:
        clock[0] += many

    return pass_by


def watched(stages: Stages, seconds: Callable[[float], None], many: int, presence: executors.Presence) -> None:
    for _ in range(many):
        seconds(1.0)
        presence.check()


def test_tasks_that_no_executor_runs_end_the_job_with_a_transient_error(seconds: Callable[[float], None]) -> None:
    stages: Any = Stages()
    presence = executors.Presence(stages, PIPELINE)
    stages.running = [0, 0]
    watched(stages, seconds, 4, presence)
    with pytest.raises(Outage, match="for 5 s: all were lost, and the cluster gives no others"):
        watched(stages, seconds, 1, presence)


@pytest.mark.parametrize("running", [[1], [0, 1], []], ids=["one runs", "one of two runs", "there is nothing to run"])
def test_work_that_goes_on_begins_the_time_anew(seconds: Callable[[float], None], running: list[int]) -> None:
    stages: Any = Stages()
    presence = executors.Presence(stages, PIPELINE)
    stages.running = [0]
    watched(stages, seconds, 4, presence)
    stages.running = running
    watched(stages, seconds, 30, presence)
    stages.running = [0]
    watched(stages, seconds, 4, presence)


def test_a_driver_that_stood_still_does_not_take_that_for_a_loss(seconds: Callable[[float], None]) -> None:
    stages: Any = Stages()
    presence = executors.Presence(stages, PIPELINE)
    seconds(600.0)
    stages.running = [0]
    presence.check()


def test_on_one_host_no_executor_is_lost(seconds: Callable[[float], None]) -> None:
    stages: Any = Stages("local[2]")
    presence = executors.Presence(stages, PIPELINE)
    stages.running = [0]
    watched(stages, seconds, 30, presence)
