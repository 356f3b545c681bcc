"""What is left of a job is ended where it can be reached, and otherwise the reader is told how."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.jobs import identity, leftovers, run_directory
from airflow_bottledwater.jobs.run_directory import Submission

YARN, POD = "application_1700000000000_0007", "cdc:bottledwater-stream-shop-1234"


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Spark's commands are programs that note their arguments here, and fail if there is a file ``fail``."""
    noted = tmp_path / "calls"
    for name in ("spark-submit", "spark-class"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {noted}\n[ ! -e {tmp_path}/fail ] || {{ echo "No route to host" >&2; exit '
            f"1; }}\n"
        )
        program.chmod(0o755)
    return noted


@pytest.mark.parametrize(
    ("master", "application", "called"),
    [
        ("yarn", YARN, f"spark-class org.apache.hadoop.yarn.client.cli.ApplicationCLI application -kill {YARN}"),
        ("k8s://https://k:443", POD, f"spark-submit --master k8s://https://k:443 --kill {POD}"),
    ],
)
def test_an_application_is_cancelled_by_the_means_of_its_cluster(
    calls: Path, master: str, application: str, called: str
) -> None:
    assert leftovers.cancel(master, application, {"PATH": f"{calls.parent}:/bin"})
    assert calls.read_text().strip() == called


@pytest.mark.parametrize(
    ("application", "by_hand"),
    [
        (YARN, f"yarn application -kill {YARN}"),
        (POD, "kubectl delete pod bottledwater-stream-shop-1234 --namespace cdc"),
        ("pod-of-a-driver", "kubectl delete pod pod-of-a-driver --namespace default"),
    ],
)
@pytest.mark.parametrize("master", ["yarn", "k8s://https://k:443", ""])
def test_what_cannot_be_cancelled_is_said_with_the_command_that_does(
    calls: Path, caplog: pytest.LogCaptureFixture, master: str, application: str, by_hand: str
) -> None:
    (calls.parent / "fail").touch()
    for path, problem in ((f"{calls.parent}:/bin", "No route to host"), ("/nowhere", "not installed")):
        with caplog.at_level(logging.WARNING):
            assert not leftovers.cancel(master, application, {"PATH": path})
        assert by_hand in caplog.text
        assert (problem if master else "not known") in caplog.text
        caplog.clear()


@pytest.mark.parametrize("application", ["default:*", "--conf", "default:pod; rm -rf ~", "-kill", ""])
def test_what_is_not_the_name_of_an_application_is_not_cancelled(calls: Path, application: str) -> None:
    for master in ("yarn", "k8s://https://k:443"):
        assert not leftovers.cancel(master, application, {"PATH": f"{calls.parent}:/bin"})
    assert not calls.exists()


def test_the_folder_of_another_user_is_not_one_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is, a topic says into which others may write."""
    ours: Any = {"id": "j", "host": socket.gethostname(), "folder": str(tmp_path), "application": "", "master": ""}
    assert identity.folder_here(ours) is None  # any folder of this user
    run_directory.write(tmp_path, Submission("j", "stream"))
    assert identity.folder_here(ours) == tmp_path
    assert identity.folder_here({**ours, "id": "another"}) is None
    (of_command := tmp_path / "bottledwater-run-1").mkdir()
    assert identity.folder_here({**ours, "folder": str(of_command)}) == of_command
    assert identity.folder_here({**ours, "host": "elsewhere"}) is None
    assert identity.folder_here({**ours, "folder": f"{tmp_path}/gone"}) is None
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert identity.folder_here(ours) is None
