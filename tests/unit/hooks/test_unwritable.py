"""A job that can never start is refused with the reason, and not submitted again and again: its folder cannot be
written, or its user has no name."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_bottledwater import cache
from airflow_bottledwater.cli import jobs
from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.spark_target import SparkTarget
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient

#: one that no user database has, and one that may write little
NOBODY_KNOWN, NOBODY = 54321, 65534
PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json", slot="orders")


def as_user(uid: int, work: Callable[[], object]) -> str:
    """What work raises, or returns, for this user; a process that is not root's goes on as its own user."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        said = ""
        try:
            if os.getuid() == 0:
                os.setgid(uid)
                os.setuid(uid)
            said = f"{work()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}, transient: {transient(error)}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def closed() -> Iterator[str]:
    """A folder that only root may write."""
    # not below pytest's own, which other users cannot even enter
    with tempfile.TemporaryDirectory(prefix="closed-") as made:
        Path(made).chmod(0o555)
        yield made
        Path(made).chmod(0o755)


HERE = SparkTarget("spark_default", False, "local[2]")


def prepared() -> object:
    return spark_job.prepare(PIPELINE, "stream", HERE)


@pytest.mark.parametrize("work", [prepared, lambda: spark_job.refuse_missing_programs(HERE)])
def test_a_folder_that_cannot_be_written_is_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, closed: str, work: Callable[[], object]
) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", f"{closed}/airflow")
    said = as_user(NOBODY, work)
    assert f"Refused: The folder {closed}/airflow/bottledwater, in which each job has its files" in said
    assert f"({closed} is in the way)" in said and "set AIRFLOW_HOME to a folder that can be" in said
    assert said.endswith("transient: False")


def test_a_file_where_the_folder_should_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "airflow").write_text("")
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    with pytest.raises(Refused, match=r"airflow is in the way"):
        prepared()


def test_the_command_refuses_a_temporary_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    def work() -> None:
        with jobs.job_folder():
            pass

    monkeypatch.setattr(tempfile, "tempdir", closed)
    said = as_user(NOBODY, work)
    assert f"Refused: The files of the job cannot be made in {closed}: Permission denied." in said
    assert "TMPDIR" in said and said.endswith("transient: False")
    # and where none is found at all
    monkeypatch.setenv("TMPDIR", closed)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [closed])
    said = as_user(NOBODY, work)
    assert said.startswith("Refused: There is no folder for the files of a job: No usable temporary directory")


def test_a_temporary_folder_that_is_full_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(Outage, match=re.escape(f"There is no room in {tmp_path}")), jobs.job_folder():
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that does not exist")
def test_a_user_without_a_name_and_home_is_refused_and_needs_no_home_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "AIRFLOW_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert f"The user id {NOBODY_KNOWN} of this process has no entry in /etc/passwd" in as_user(NOBODY_KNOWN, prepared)
    # what a program keeps for the next one, which it looks for when it is imported
    kept = as_user(NOBODY_KNOWN, lambda: cache.folder("tests", "nobody"))
    assert kept == f"{tempfile.gettempdir()}/bottledwater-{NOBODY_KNOWN}-nobody"
    Path(kept).rmdir()
