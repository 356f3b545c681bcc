"""The archive of Spark's classes, made by a spark-submit and a Java that only look like them."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from airflow_bottledwater.spark import archive, submit

_SUBMIT = """\
#!/bin/sh
echo "$@" >> {log}
for word in "$@"; do case $word in *-XX:ArchiveClassesAtExit=*)
  path=${{word##*-XX:ArchiveClassesAtExit=}}; echo classes > "${{path%%\\"*}}";;
esac; done
"""


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """The environment of a host with a Java and a Spark."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    for name in ("java", "spark-submit"):
        (programs / name).write_text(_SUBMIT.format(log=tmp_path / "log"))
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "SPARK_HOME": str(tmp_path / "spark")}


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


@pytest.mark.parametrize("part", ["bin/java", "spark/jars", "spark/conf"])
def test_another_java_or_spark_needs_another_archive(host: dict[str, str], tmp_path: Path, part: str) -> None:
    archive.make("", host)
    assert archive.options(host)
    (tmp_path / "spark" / "conf").mkdir()
    if part != "spark/conf":
        (tmp_path / "spark" / "conf").rmdir()
        os.utime(tmp_path / part, (1, 1))
    assert archive.options(host) == ""
    archive.make("", host)
    assert archive.options(host)
    assert len(_made(tmp_path)) == 2


def test_an_archive_is_found_in_an_image(host: dict[str, str], tmp_path: Path) -> None:
    """The layers of an image keep the times of files in whole seconds."""
    for part in ("bin/java", "spark/jars"):
        os.utime(tmp_path / part, ns=(0, 7_999_999_999))
    archive.make("", host)
    for part in ("bin/java", "spark/jars"):
        os.utime(tmp_path / part, (7, 7))
    assert archive.options(host)


def test_an_archive_that_is_not_complete_is_not_used_and_made_again(host: dict[str, str], tmp_path: Path) -> None:
    archive.make("", host)
    (made,) = _made(tmp_path)
    os.truncate(made, 3)
    assert archive.options(host) == ""
    archive.make("", host)
    assert made.read_text() == "classes\n"
    assert archive.options(host)


@pytest.mark.parametrize("part", ["bin/java", "bin/spark-submit", "spark/jars"])
def test_without_java_or_spark_there_is_none(
    host: dict[str, str], tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / part).rename(tmp_path / "elsewhere")
    host = {**host, "PATH": str(tmp_path / "bin")}
    with caplog.at_level(logging.INFO):
        archive.make("", host)
    assert "was not found" in caplog.text
    assert archive.options(host) == ""
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("lines", "why"), [("echo no room\nexit 3", "no room"), ("echo no archive", "no archive")])
def test_a_job_that_fails_is_only_told(
    host: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: str, why: str
) -> None:
    (tmp_path / "bin" / "spark-submit").write_text(f"#!/bin/sh\n{lines}\n")
    with caplog.at_level(logging.WARNING):
        archive.make("", host)
    assert "jobs start without" in caplog.text and why in caplog.text
    assert archive.options(host) == ""


def test_a_full_disk_is_only_told(
    host: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive.tempfile, "TemporaryDirectory", full)
    archive.make("", host)
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("name", ["a:b", 'a"b', "a\\b"])
def test_a_folder_whose_name_options_cannot_have_is_not_used(
    host: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    archive.make("", host)
    assert archive.options(host) == ""


def test_only_jobs_on_one_machine_use_it(host: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.make("", host)
    monkeypatch.setattr(submit, "environment", lambda: host)
    name = "spark.driver.extraJavaOptions"
    assert archive.options(host)
    assert submit.conf_for("local[2]")[name].endswith(archive.options(host))
    assert submit.conf_for("local[2]", {name: "-Xmx1g"})[name] == "-Xmx1g"
    assert name not in submit.conf_for("yarn")
