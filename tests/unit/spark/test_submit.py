"""The command line of a job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.spark import submit


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spark-submit on the PATH, which is looked for behind the scripts of this Python."""
    found = tmp_path / "spark-of-our-own"
    found.write_text("")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return found


def test_a_local_job_reads_its_settings_where_they_are(binary: Path, tmp_path: Path) -> None:
    made = submit.command("stream", tmp_path / "settings.json", master="local[2]", bounded=True, binary=binary.name)
    assert made[:5] == [str(binary), "--master", "local[2]", "--name", "bottledwater-stream"]
    assert made[-4:] == [str(submit.job_file("stream")), "--pipeline", str(tmp_path / "settings.json"), "--bounded"]
    assert "--files" not in made
    assert "spark.driver.bindAddress=127.0.0.1" in made


def test_a_cluster_is_sent_the_settings_and_no_loopback_address(binary: Path, tmp_path: Path) -> None:
    made = submit.command("snapshot", tmp_path / "s.json", master="spark://h:7077", conf={"a": "b"}, binary=binary.name)
    assert made[made.index("--files") + 1] == str(tmp_path / "s.json")
    given = [made[i + 1] for i, word in enumerate(made) if word == "--conf"]
    assert given[0].startswith("spark.executorEnv.GLIBC_TUNABLES=glibc.malloc.tcache_count=60000:")
    assert given[1:] == ["a=b"]


@pytest.mark.parametrize("name", ["spark.driver.memory", "spark.executorEnv.GLIBC_TUNABLES"])
def test_the_users_properties_come_last(name: str) -> None:
    assert submit.conf_for("local", {name: "mine"})[name] == "mine"


def test_a_program_that_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no-such-submit is not on the PATH.*spark\]"):
        submit.command("stream", tmp_path, master="local", binary="no-such-submit")


@pytest.mark.parametrize("name", ["snapshot", "stream", "pipeline"])
def test_every_job_has_its_file(name: str) -> None:
    assert f"from airflow_bottledwater.spark.{name} import main" in submit.job_file(name).read_text()


def test_a_job_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match=r"nothing\.py is not installed"):
        submit.job_file("nothing")


def test_driver_and_workers_are_this_python() -> None:
    made = submit.environment({"PATH": "/bin"})
    assert (made["PYSPARK_PYTHON"], made["PYSPARK_DRIVER_PYTHON"]) == (sys.executable, sys.executable)
    assert made["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert submit.environment({"PYSPARK_PYTHON": "/other/python"})["PYSPARK_PYTHON"] == "/other/python"
