"""Airflow's connections as a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.errors import BottledWaterError, Refused, SettingError
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.hooks.schema_registry import SchemaRegistryHook

Connect = Callable[..., None]

PASSWORD = "hunter2"


def hook(**settings: Any) -> PipelineHook:
    return PipelineHook("postgres_default", "kafka_default", "schema_registry_default", settings)


def test_connections_become_a_pipeline(connections: str) -> None:
    pipeline = hook(slot="orders").pipeline()
    assert conninfo_to_dict(pipeline.postgres) == {
        "host": "db",
        "port": "5433",
        "dbname": "shop",
        "user": "cdc",
        "password": connections,
    }
    assert pipeline.kafka == {"bootstrap.servers": "k:9092", "sasl.password": connections}
    assert pipeline.registry == {"url": "http://r", "basic.auth.user.info": f"me:{connections}"}
    assert pipeline.slot == "orders"
    assert connections not in repr(pipeline)


@pytest.mark.usefixtures("connections")
def test_a_trigger_gets_the_same_pipeline() -> None:
    assert asyncio.run(hook().apipeline()) == hook().pipeline()
    assert asyncio.run(hook().apostgres()) == hook().postgres() == hook().pipeline().postgres


@pytest.mark.usefixtures("connections")
def test_of_extras_only_those_of_libpq_are_taken(connect: Connect) -> None:
    extra = {
        "sslmode": "verify-full",
        "sslrootcert": "/ca.pem",
        "connect_timeout": 7,
        "cursor": "dictcursor",
        "iam": True,
        "sslkey": None,
    }
    connect("postgres_default", conn_type="postgres", host="db", extra=extra)
    assert conninfo_to_dict(hook().postgres()) == {
        "host": "db", "sslmode": "verify-full", "sslrootcert": "/ca.pem", "connect_timeout": "7",
    }  # fmt: skip


@pytest.mark.usefixtures("connections")
def test_kafka_properties_are_texts_without_those_of_consumers(connect: Connect) -> None:
    extra = {
        "bootstrap.servers": "a:1,b:2", "group.id": "other", "auto.offset.reset": "latest", "enable.auto.commit": True,
        "enable.idempotence": True, "socket.timeout.ms": 10000, "ssl.ca.location": None,
    }  # fmt: skip
    connect("kafka_default", conn_type="kafka", extra=extra)
    assert hook().pipeline().kafka == {
        "bootstrap.servers": "a:1,b:2",
        "enable.idempotence": "true",
        "socket.timeout.ms": "10000",
    }


@pytest.mark.usefixtures("connections")
def test_registry_properties_are_texts(connect: Connect) -> None:
    connect(
        "schema_registry_default",
        conn_type="schema_registry",
        host="http://r",
        extra={"timeout": 3, "ssl.ca.location": None},
    )
    assert hook().pipeline().registry == {"url": "http://r", "timeout": "3"}


@pytest.mark.usefixtures("connections")
def test_json_does_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT")
    assert hook(output_format="json").pipeline().registry == {}
    with pytest.raises(SettingError, match="registry"):
        PipelineHook("postgres_default", "kafka_default", None, {}).pipeline()


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("missing", ["postgres_default", "kafka_default", "schema_registry_default"])
def test_a_connection_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delenv(f"AIRFLOW_CONN_{missing.upper()}")
    with pytest.raises(Refused, match=f"no connection '{missing}'"):
        hook().pipeline()
    with pytest.raises(Refused, match=f"no connection '{missing}'"):
        asyncio.run(hook().apipeline())


def test_a_spark_connection_that_is_missing_is_named() -> None:
    """The Spark provider would submit to YARN without a word."""
    with pytest.raises(Refused, match="no Spark connection 'spark_nowhere'"):
        spark_job.connection_of("spark_nowhere")


@pytest.mark.usefixtures("connections")
def test_settings_are_checked_and_loosely_typed() -> None:
    pipeline = hook(
        tables="orders, public.items", allow_unkeyed="True", skip_snapshot="false", partitions="3", topic_prefix=None
    ).pipeline()
    assert pipeline.tables == ("orders", "public.items")
    assert (pipeline.allow_unkeyed, pipeline.skip_snapshot, pipeline.partitions, pipeline.topic_prefix) == (
        True,
        False,
        3,
        "",
    )
    with pytest.raises(SettingError, match="tabels"):
        hook(tabels=["a"]).pipeline()
    with pytest.raises(SettingError, match="on_error"):
        hook(on_error="ignore").pipeline()


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("name", ["postgres", "kafka", "registry"])
def test_secrets_cannot_come_by_settings(name: str) -> None:
    with pytest.raises(SettingError) as raised:
        hook(**{name: {"password": PASSWORD}}).pipeline()
    assert PASSWORD not in str(raised.value)


def test_the_registrys_connection_can_be_tried(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connect("schema_registry_default", conn_type="schema_registry", host="http://127.0.0.1:9")
    ok, message = SchemaRegistryHook().test_connection()
    assert not ok and "127.0.0.1:9" in message
    monkeypatch.setattr("airflow_bottledwater.kafka.registry.Registry.ping", lambda self: None)
    assert SchemaRegistryHook().test_connection() == (True, "The registry answers.")


@pytest.mark.parametrize(
    "executor", ["CeleryExecutor", "KubernetesExecutor", "LocalKubernetesExecutor", "CeleryExecutor,LocalExecutor"]
)
def test_a_detached_job_needs_one_host(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    with pytest.raises(Refused, match=executor.partition(",")[0]):
        spark_job.refuse_foreign_hosts("The stream")
    spark_job.refuse_foreign_hosts("The stream", "LocalExecutor")
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor,CeleryExecutor")
    spark_job.refuse_foreign_hosts("The stream")
    with pytest.raises(BottledWaterError, match="CeleryExecutor"):
        spark_job.refuse_foreign_hosts("The stream", "CeleryExecutor")


def test_a_job_gets_nothing_of_airflows_secrets() -> None:
    given = {
        "AIRFLOW_CONN_POSTGRES_DEFAULT": PASSWORD, "AIRFLOW__CORE__FERNET_KEY": "f", "AIRFLOW_VAR_X": "v", "_AIRFLOW_X": "x",
        "__AIRFLOW_SUPERVISOR": "s", "HOME": "/h", "PATH": "/bin",
    }  # fmt: skip
    kept = spark_job.environment(given)
    assert set(kept) == {"HOME", "PATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP"}
    assert kept["PATH"].endswith(":/bin")


def test_a_job_of_another_host_is_not_judged() -> None:
    with pytest.raises(Refused, match="elsewhere"):
        spark_job.running({"folder": "/nowhere", "host": "elsewhere"})


def test_a_jobs_log_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {"folder": str(tmp_path), "host": ""}
    lines: list[str] = []
    follower = spark_job.LogFollower(identity, lines.append)
    follower.follow()
    log = tmp_path / "job.log"
    log.write_text("one\ntwo\nthr")
    follower.follow()
    assert lines == ["one", "two"]
    with log.open("a") as file:
        file.write("ee\nfour\n")
    follower.follow()
    follower.follow()
    assert lines == ["one", "two", "three", "four"]
    # another triggerer does not repeat everything
    lines.clear()
    follower = spark_job.LogFollower(identity, lines.append, past=5)
    follower.follow()
    assert lines == ["four"]
    # and a line without an end does not stop it
    monkeypatch.setattr(spark_job, "_MOST", 10)
    with log.open("a") as file:
        file.write("x" * 25 + "\nfive\n")
    lines.clear()
    for _ in range(5):
        follower.follow()
    assert "".join(lines) == "x" * 25 + "five"
