"""The archive of Spark's classes, made by a spark-submit and a Java that only look like them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from airflow_bottledwater.spark import archive, submit

_SUBMIT = """\
#!/bin/sh
echo "$@" >> {log}
for word in "$@"; do case $word in *-XX:ArchiveClassesAtExit=*)
  path=${{word##*-XX:ArchiveClassesAtExit=}}; echo classes > "${{path%\\"}}";;
esac; done
"""


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """The environment of a host with a Java and a Spark."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("java", "spark-submit"):
        (programs / name).write_text(_SUBMIT.format(log=tmp_path / "log"))
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of this user"))


def _made(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache of this user").rglob("*.jsa"))


def test_an_archive_is_made_once_and_used_from_then_on(host: dict[str, str], tmp_path: Path) -> None:
    assert archive.options(host) == ""
    archive.make("-Xms24m", host)
    (made,) = _made(tmp_path)
    assert made.read_text() == "classes\n"
    assert f'"-XX:SharedArchiveFile={made}"' in archive.options(host)
    archive.make("-Xms24m", host)
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "spark.driver.extraJavaOptions=-Xms24m " in line
    assert list(made.parent.iterdir()) == [made]  # nothing else is left


@pytest.mark.parametrize("program", ["java", "spark-submit"])
def test_another_java_or_spark_needs_another_archive(host: dict[str, str], tmp_path: Path, program: str) -> None:
    archive.make("", host)
    with (tmp_path / "bin" / program).open("a") as file:
        file.write("# another version\n")
    assert archive.options(host) == ""
    archive.make("", host)
    assert archive.options(host)
    assert len(_made(tmp_path)) == 2


def test_an_archive_that_is_not_complete_is_not_used_and_made_again(host: dict[str, str], tmp_path: Path) -> None:
    archive.make("", host)
    (made,) = _made(tmp_path)
    os.truncate(made, 3)
    assert archive.options(host) == ""
    archive.make("", host)
    assert made.read_text() == "classes\n"
    assert archive.options(host)


@pytest.mark.parametrize("program", ["java", "spark-submit"])
def test_without_java_or_spark_there_is_none(host: dict[str, str], tmp_path: Path, program: str) -> None:
    (tmp_path / "bin" / program).unlink()
    host = {**host, "PATH": str(tmp_path / "bin")}
    archive.make("", host)
    assert archive.options(host) == ""
    assert not (tmp_path / "log").exists()


def test_a_job_that_fails_is_only_told(host: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bin" / "spark-submit").write_text("#!/bin/sh\nexit 3\n")
    with caplog.at_level(logging.WARNING):
        archive.make("", host)
    assert "jobs start without" in caplog.text
    assert archive.options(host) == ""


def test_only_jobs_on_one_machine_use_it(host: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.make("", host)
    monkeypatch.setattr(submit, "environment", lambda: host)
    name = "spark.driver.extraJavaOptions"
    assert submit.conf_for("local[2]")[name].endswith(archive.options(host))
    assert submit.conf_for("local[2]", {name: "-Xmx1g"})[name] == "-Xmx1g"
    assert name not in submit.conf_for("yarn")
