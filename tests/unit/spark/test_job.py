"""What a job finds where it runs, and how its errors come back through Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job, submit

PIPELINE = Pipeline.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, output_format="json")


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


def test_the_settings_are_found_through_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkFiles

    sent = PIPELINE.write(tmp_path)
    monkeypatch.setattr(SparkFiles, "_is_running_on_worker", True)
    monkeypatch.setattr(SparkFiles, "_root_directory", str(tmp_path))
    assert job.SettingsFile(f"/elsewhere/{sent.name}").load() == PIPELINE


@pytest.mark.parametrize(
    ("value", "refused"), [("true", True), ("TRUE", True), (" True", True), ("false", False), ("", False)]
)
def test_speculative_execution_is_refused(value: str, refused: bool) -> None:
    if refused:
        with pytest.raises(Refused, match="speculation"):
            submit.conf_for("local[2]", {"spark.speculation": value})
    else:
        assert submit.conf_for("yarn", {"spark.speculation": value})["spark.speculation"] == value


def test_a_driver_does_without_compiled_code() -> None:
    """It decides and watches; what encodes takes a hundred megabytes."""
    code = (
        "import sys; from airflow_bottledwater.spark import pipeline, snapshot, stream, continuous\n"
        "import airflow_bottledwater.stream.start, airflow_bottledwater.snapshot.driver\n"
        "print([m for m in ('numba', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
