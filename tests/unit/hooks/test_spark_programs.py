"""Preflight tries what submits jobs: a connection that the provider does not take, a program that does not start, and
packages that jobs on this host lack, are refused with what to do, before a slot is made."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.hooks import spark_job, spark_target
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.description import Description, Spark


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes a spark3-submit that comes first on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(script: str) -> None:
        made = tmp_path / "spark3-submit"
        made.write_text(f"#!/bin/sh\n{script}\n")
        made.chmod(0o755)

    return make


def _refuse() -> None:
    spark_job.refuse_missing_programs(spark_target.find("s"))


@pytest.mark.parametrize(
    "extra", [{"spark-binary": sys.executable}, {"spark-home": "/opt/spark"}, {"rest-port": "none"}]
)
def test_a_connection_that_the_provider_does_not_take_is_refused_for_good(connect: Any, extra: dict[str, str]) -> None:
    connect("s", conn_type="spark", host="local[2]", extra=extra)
    with pytest.raises(Refused, match=r"does not accept connection 's': .*\. Correct the connection"):
        _refuse()
    operator = StreamToKafkaOperator(task_id="t", pipeline=Description("orders", spark=Spark("s")))
    with pytest.raises(Refused, match=r"does not accept connection 's': "):
        operator._get_hook()


def test_no_file_is_made_of_a_connections_keytab(connect: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spark_job, "_why_not_started", lambda *_: "")
    connect("s", conn_type="spark", host="local[2]", extra={"keytab": "AAAA", "principal": "cdc"})
    _refuse()
    assert list(tmp_path.iterdir()) == []


def test_spark_without_java_is_refused(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real spark-submit: images of Airflow have no Java."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    connect("s", conn_type="spark", host="local[2]")
    with pytest.raises(Refused, match=r"does not start on this worker: .*/nowhere/bin/java.* needs Java 17 or later"):
        _refuse()


def test_spark_that_starts_is_taken(connect: Any) -> None:
    connect("s", conn_type="spark", host="local[2]")
    _refuse()


def test_what_a_program_says_that_fails_is_shown(connect: Any, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "a secret")
    connect("s", conn_type="spark", host="yarn", extra={"spark-binary": "spark3-submit"})
    program('test "$1" = --version && test -z "$AIRFLOW__CORE__FERNET_KEY"')
    _refuse()
    program("echo LinkageError: >&2; echo class file version 61.0; exit 1")
    with pytest.raises(
        Refused, match=r"worker: LinkageError: class file version 61\.0\. Spark needs .*spark3-submit --ver"
    ):
        _refuse()
    program("exit 3")
    with pytest.raises(Refused, match=r"worker: exit code 3\. "):
        _refuse()


def test_the_packages_of_workers_on_this_host_are_looked_for(
    connect: Any, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Spark of the host has its own PySpark, and no Numba."""
    program("exit 0")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "numba" else find(name, *more))
    connect("s", conn_type="spark", host="local[2]", extra={"spark-binary": "spark3-submit"})
    with pytest.raises(Refused, match=r"numba is not installed\. Install the spark extra"):
        _refuse()
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    _refuse()
    monkeypatch.delenv("PYSPARK_PYTHON")
    connect("s", conn_type="spark", host="yarn", extra={"spark-binary": "spark3-submit"})
    _refuse()
