"""What a job finds where it runs, and how its errors come back through Spark."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from airflow_bottledwater.errors import ApplicationEnded, Outage, RecordError, Refused, StopRequested, TakenOver
from airflow_bottledwater.jobs import requests, submit, submitted
from airflow_bottledwater.jobs.submitted import LogTail
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.spark import copies, job, tasks

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json")


def test_the_settings_are_found_where_a_cluster_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In cluster mode the driver starts in a folder with the files of ``--files``, and has no Spark context yet."""
    here = tmp_path / "container"
    here.mkdir()
    monkeypatch.chdir(here)
    sent = PIPELINE.write(here)
    assert job.SettingsFile(f"/of/the/host/that/submitted/{sent.name}").load() == PIPELINE
    sent.unlink()
    with pytest.raises(Refused, match="--files"):
        job.SettingsFile(f"/of/the/host/that/submitted/{sent.name}").load()
    there = PIPELINE.write(tmp_path)
    assert job.SettingsFile(str(there)).load() == PIPELINE
    # from Kubernetes' secret come the connections, the rest is in the arguments
    assert job.SettingsFile(str(there), {"slot": "orders"}).load() == PIPELINE.with_(slot="orders")


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is a worker of an executor; returns the folder with the files that Spark has sent to it."""
    from pyspark import SparkFiles

    monkeypatch.setattr(SparkFiles, "_is_running_on_worker", True)
    monkeypatch.setattr(SparkFiles, "_root_directory", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shared", [False, True])
def test_the_settings_are_found_through_spark_and_nobody_else_may_read_them(
    executor: Path, tmp_path_factory: pytest.TempPathFactory, shared: bool
) -> None:
    """Also where the host that submitted the job shares its disk, so that the file itself is found."""
    original = PIPELINE.write(tmp_path_factory.mktemp("submitted"))
    sent = Path(shutil.copyfile(original, executor / original.name))
    sent.chmod(0o644)
    if not shared:
        original.unlink()
    assert job.SettingsFile(str(original)).load() == PIPELINE
    assert sent.stat().st_mode & 0o777 == 0o600


class Standalone:
    """Spark's context, whose executors are this process."""

    defaultParallelism = 3

    def __init__(self, master: str) -> None:
        self.master = master

    def parallelize(self, numbers: range, count: int) -> Standalone:
        self._count = count
        return self

    def foreachPartition(self, work: Callable[[Any], None]) -> None:
        for number in range(self._count):
            work([number])


def test_the_copies_are_removed_at_the_end(executor: Path) -> None:
    sent = PIPELINE.write(executor)
    (executor / "stderr").touch()
    copies.remove(Standalone("yarn"))  # type: ignore[arg-type]
    assert sent.exists()
    copies.remove(Standalone("spark://h:7077"))  # type: ignore[arg-type]
    assert [path.name for path in executor.iterdir()] == ["stderr"]


def test_executors_that_do_not_answer_do_not_hold_the_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = threading.Event(), threading.Event()
    context = Standalone("spark://h:7077")
    monkeypatch.setattr(context, "foreachPartition", lambda work: asked.set() or ended.wait())
    monkeypatch.setattr(copies, "_REMOVAL", 0.2)
    copies.remove(context)  # type: ignore[arg-type]
    ended.set()
    assert asked.is_set()


@pytest.mark.parametrize(
    ("value", "refused"), [("true", True), ("TRUE", True), (" True", True), ("false", False), ("", False)]
)
def test_speculative_execution_is_refused(value: str, refused: bool) -> None:
    if refused:
        with pytest.raises(Refused, match="speculation"):
            submit.conf_for("local[2]", {"spark.speculation": value})
    else:
        assert submit.conf_for("yarn", {"spark.speculation": value})["spark.speculation"] == value


def test_the_row_of_an_error_is_in_the_jobs_own_log_only(caplog: pytest.LogCaptureFixture) -> None:
    tail = LogTail()
    logging.getLogger().addHandler(tail)
    try:
        outcome = job._failed(RecordError("It is too large.", row="the row with email = SECRET"))
    finally:
        logging.getLogger().removeHandler(tail)
    assert "It is the row with email = SECRET." in caplog.text
    assert "too large" in outcome.error and "too large" in str(tail.lines)
    assert "SECRET" not in outcome.error + str(tail.lines)


def test_a_driver_does_without_compiled_code() -> None:
    """It decides and watches; what encodes takes a hundred megabytes."""
    code = (
        "import sys; from airflow_bottledwater.spark import pipeline, snapshot, stream\n"
        "import airflow_bottledwater.stream.start, airflow_bottledwater.snapshot.driver\n"
        "print([m for m in ('numba', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text",
    [
        "Job 3 cancelled because SparkContext was shut down",
        "Job aborted due to stage failure: Master removed our application: FAILED",
    ],
)
def test_an_application_that_was_ended_from_outside_may_be_submitted_again(text: str) -> None:
    found = job.translate(RuntimeError(text))
    assert isinstance(found, ApplicationEnded) and transient(found)


class Py4JJavaError(Exception):
    """Named as py4j's."""


_CALL = "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.\n: "


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("java.lang.IllegalArgumentException: requirement failed: Can only call getServletHandlers on a running "
         "MetricsSystem\n\tat scala.Predef$.require", True),
        ("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.\nThis stopped ...", True),
        ("io.fabric8.kubernetes.client.KubernetesClientException: Operation: [get] failed.\n"
         "Caused by: java.net.ConnectException: Connection refused", True),
        ("java.net.ConnectException: Call From worker to rm:8032 failed on connection exception", True),
        ("java.lang.IllegalArgumentException: Executor memory 1 must be at least 471859200.\n\tat org.apache", False),
    ],
)  # fmt: skip
def test_a_job_whose_cluster_is_away_when_it_begins_may_be_submitted_again(
    monkeypatch: pytest.MonkeyPatch, text: str, again: bool
) -> None:
    def refuse(conf: Any) -> Any:
        raise Py4JJavaError(_CALL + text)

    monkeypatch.setattr(pyspark.SparkContext, "getOrCreate", refuse)
    conf = SimpleNamespace(setAll=lambda _: conf, get=lambda *_: "spark://master:7077")
    monkeypatch.setattr(pyspark, "SparkConf", lambda: SimpleNamespace(setAppName=lambda _: conf))
    with pytest.raises(ApplicationEnded if again else Py4JJavaError) as raised, job.context("x"):
        pass
    assert transient(job.translate(raised.value)) or not again
    if again:
        assert f"at spark://master:7077: {text.splitlines()[0]}" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("java.io.IOException: No space left on device\n\tat java.base/java.io", True),
        ('java.io.IOException: Cannot run program "python3": error=12, Cannot allocate memory', True),
        ("org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n  File ...", False),
    ],
)
def test_what_an_executors_host_lacks_is_no_fault_of_the_work(text: str, again: bool) -> None:
    found = job.translate(Py4JJavaError("An error occurred while calling o1.collect.\n: " + text))
    assert transient(found) is again and (not again or text.splitlines()[0] in str(found))


def test_a_job_that_waits_for_its_cluster_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark's context begins when YARN's queue has room for it."""
    ended = threading.Event()

    def wait(conf: Any) -> Any:
        ended.wait(0.3)
        raise OSError("the test has seen enough")

    monkeypatch.setattr(pyspark.SparkContext, "getOrCreate", wait)
    monkeypatch.setattr(
        pyspark, "SparkConf", lambda: SimpleNamespace(setAppName=lambda _: SimpleNamespace(setAll=list))
    )
    monkeypatch.setattr(job, "_TELL", 0.05)
    with pytest.raises(OSError, match="enough"), job.context("x"):
        pass
    told = [record for record in caplog.records if "waits for the cluster" in record.getMessage()]
    assert len(told) > 1
    time.sleep(0.2)
    assert len([record for record in caplog.records if "waits for the cluster" in record.getMessage()]) <= len(told) + 1


def test_a_context_that_has_ended_does_not_hide_why() -> None:
    def fail(text: str) -> Any:
        raise RuntimeError(text)

    ended: Any = SimpleNamespace(
        master="yarn",
        parallelize=lambda *_: fail("Job 3 cancelled because SparkContext was shut down"),
        cancelAllJobs=lambda: fail("Cannot call methods on a stopped SparkContext"),
    )
    with pytest.raises(ApplicationEnded):
        tasks.run_each(ended, PIPELINE, lambda task: task, [1], "lane")


def test_an_error_that_is_not_ours_is_told_with_its_class() -> None:
    assert job._failed(KeyError("x")).error == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("kind", "error", "noted"),
    [
        ("stream", Refused("The state is another cluster's."), ["The state is another cluster's."]),
        ("verify", Refused("The state is another cluster's."), []),
        ("stream", Outage("Kafka is away."), []),
        ("stream", TakenOver("Another job has the slot."), []),
        ("stream", StopRequested("It was asked to stop."), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_job_that_fails_for_good_before_it_reports_is_told_with_its_pipeline(
    kind: str, error: Exception, noted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def note(pipeline: Settings, why: str, *, claim: str) -> None:
        assert (pipeline, claim) == (PIPELINE, "c")
        found.append(why)
        raise Outage("Whether that is written or not, the job has ended.")

    reporter = SimpleNamespace(start=lambda: None, finish=lambda _: True, last_claim="c")
    monkeypatch.setattr(submitted, "JobReporter", lambda *_: reporter)
    monkeypatch.setattr(requests, "not_begun", note)
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])

    def work(*_: Any) -> dict[str, Any]:
        raise error

    job._run(kind, work, job.SettingsFile(str(PIPELINE.write(tmp_path))), "", False)
    assert found == noted
