"""Airflow's connections as a pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.errors import Outage, Refused, SettingError
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.hooks.schema_registry import SchemaRegistryHook
from airflow_bottledwater.hooks.source import SourceHook
from airflow_bottledwater.hooks.spark_target import SparkTarget
from airflow_bottledwater.jobs import following, submit, supervise
from airflow_bottledwater.kafka import clients
from airflow_bottledwater.pipeline.settings import Settings

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
def test_the_key_of_hashes_is_the_password_of_a_connection(connect: Connect) -> None:
    connect("hashes", conn_type="generic", password="0123456789abc key")
    made = hook(hash_key_conn_id="hashes")
    assert made.pipeline().hash_key == "0123456789abc key" and asyncio.run(made.apipeline()).hash_key == ""
    assert "0123456789abc key" not in repr((made.pipeline(), made.arguments(), made.pipeline().chosen()))
    # which a triggerer need not have
    assert asyncio.run(hook(hash_key_conn_id="nowhere").apipeline()).hash_key == ""
    with pytest.raises(Outage, match="'nowhere'"):
        hook(hash_key_conn_id="nowhere").pipeline()
    with pytest.raises(SettingError, match="an Airflow connection, by its id"):
        hook(hash_key="0123456789abc key").pipeline()
    connect("hashes", conn_type="generic", password="short")
    with pytest.raises(SettingError, match="not shown"):
        hook(hash_key_conn_id="hashes").pipeline()


@pytest.mark.usefixtures("connections")
def test_a_host_without_the_file_of_the_key_can_watch(tmp_path: Path) -> None:
    made = hook(hash_key_file=str(tmp_path / "key"))
    assert made.pipeline().hash_key == asyncio.run(made.apipeline()).hash_key == ""
    with pytest.raises(SettingError, match="hash_key_file"):
        made.pipeline().with_hash_key()
    (tmp_path / "key").write_text("0123456789abc key")
    assert made.pipeline().hash_key == "0123456789abc key"
    assert asyncio.run(made.apipeline()).hash_key == ""


@pytest.mark.usefixtures("connections")
def test_a_trigger_gets_the_same_pipeline() -> None:
    assert asyncio.run(hook().apipeline()) == hook().pipeline()
    assert asyncio.run(SourceHook().adsn()) == SourceHook().dsn() == hook().pipeline().postgres


@pytest.mark.usefixtures("connections")
def test_of_extras_only_those_of_libpq_are_taken(connect: Connect) -> None:
    extra = {
        "sslmode": "verify-full",
        "sslrootcert": "/ca.pem",
        "connect_timeout": 7,
        "cursor": "dictcursor",
        "iam": False,
        "sslkey": None,
    }
    connect("postgres_default", conn_type="postgres", host="db", extra=extra)
    assert conninfo_to_dict(SourceHook().dsn()) == {
        "host": "db", "sslmode": "verify-full", "sslrootcert": "/ca.pem", "connect_timeout": "7",
    }  # fmt: skip


@pytest.mark.usefixtures("connections")
def test_everything_that_libpq_knows_is_passed_on(connect: Connect) -> None:
    extra = {
        "options": "-c statement_timeout=0", "keepalives": True, "keepalives_idle": 5, "tcp_user_timeout": 9000,
        "sslcrldir": "/crl",
        "sslcertmode": "disable", "gssdelegation": 0, "application_name": "cdc", "requirepeer": "postgres",
        # ours in every session
        "replication": "true", "client_encoding": "latin1",
        # of the connection itself, which wins
        "host": "other", "port": 1,
    }  # fmt: skip
    connect("postgres_default", conn_type="postgres", host="db", port=5433, extra=extra)
    assert conninfo_to_dict(SourceHook().dsn()) == {
        "host": "db", "port": "5433", "options": "-c statement_timeout=0", "keepalives": "1", "keepalives_idle": "5",
        "tcp_user_timeout": "9000", "sslcrldir": "/crl", "sslcertmode": "disable", "gssdelegation": "0",
        "application_name": "cdc", "requirepeer": "postgres",
    }  # fmt: skip


@pytest.mark.usefixtures("connections")
def test_every_secret_of_a_postgres_connection_is_masked(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    masked: list[str] = []
    for module in ("source", "pipeline"):
        monkeypatch.setattr(f"airflow_bottledwater.hooks.{module}.mask_secret", masked.append)
    extra = {"sslpassword": "of the key", "sslkey": "/key.pem"}
    connect("postgres_default", conn_type="postgres", host="db", password="of the role", extra=extra)
    SourceHook().dsn()
    assert sorted(masked) == ["of the key", "of the role"]
    hook().pipeline()
    assert {"of the key", "of the role"} <= set(masked[2:])


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
@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "https://r/base"}, "https://r/base"),
        ({"host": "http://r:8081"}, "http://r:8081"),
        ({"host": "r", "port": 8081}, "http://r:8081"),
        ({"host": "r", "port": 8081, "schema": "https"}, "https://r:8081"),
        ({"host": "r/base", "schema": "https"}, "https://r/base"),
        ({"host": "https://r/base", "port": 8085, "schema": "http"}, "https://r:8085/base"),
        ({"host": "http://r:8081", "port": 9}, "http://r:8081"),
        ({"host": "[::1]", "port": 8081}, "http://[::1]:8081"),
    ],
)
def test_a_registry_may_be_given_by_scheme_host_and_port(connect: Connect, fields: dict[str, Any], url: str) -> None:
    connect("schema_registry_default", conn_type="schema_registry", **fields)
    assert hook().pipeline().registry == {"url": url}


@pytest.mark.usefixtures("connections")
def test_json_does_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT")
    assert hook(format="json").pipeline().registry == {}
    with pytest.raises(SettingError, match="registry"):
        PipelineHook("postgres_default", "kafka_default", None, {}).pipeline()


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize("missing", ["postgres_default", "kafka_default", "schema_registry_default"])
def test_a_connection_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delenv(f"AIRFLOW_CONN_{missing.upper()}")
    with pytest.raises(Outage, match=f"does not find the connection '{missing}'"):
        hook().pipeline()
    with pytest.raises(Outage, match=f"does not find the connection '{missing}'"):
        asyncio.run(hook().apipeline())


@pytest.mark.usefixtures("connections")
def test_all_connections_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("kafka_default", "schema_registry_default"):
        monkeypatch.delenv(f"AIRFLOW_CONN_{missing.upper()}")
    for look in (hook().pipeline, lambda: asyncio.run(hook().apipeline())):
        with pytest.raises(Outage, match=r"'kafka_default'.*'schema_registry_default'") as raised:
            look()
        text = str(raised.value)
        assert text.count("create it under Admin > Connections") == 1 and "postgres_default" not in text


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


def test_a_job_gets_nothing_of_airflows_secrets() -> None:
    given = {
        "AIRFLOW_CONN_POSTGRES_DEFAULT": PASSWORD, "AIRFLOW__CORE__FERNET_KEY": "f", "AIRFLOW_VAR_X": "v",
        "_AIRFLOW_X": "x", "__AIRFLOW_SUPERVISOR": "s", "HOME": "/h", "PATH": "/bin",
    }  # fmt: skip
    kept = submit.environment(given)
    ours = {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP", "GLIBC_TUNABLES"}
    assert set(kept) == {"HOME", "PATH", *ours}
    assert kept["PATH"].endswith(":/bin")


IDENTITY: Any = {"id": "j", "folder": "/nowhere", "host": "", "application": "", "master": "yarn"}


def test_only_where_the_executors_are_here_the_driver_is_told_to_use_loopback() -> None:
    """Executors on other hosts could not reach it."""
    for master, local in (("local[2]", True), ("spark://m:7077", False), ("yarn", False), ("k8s://https://k", False)):
        for made in (submit.environment({"PATH": "/bin"}, master=master), submit.environment({}, master=master)):
            assert ("SPARK_LOCAL_IP" in made) == local
        assert ("spark.driver.bindAddress" in submit.conf_for(master)) == local


@pytest.mark.parametrize(("host", "loopback"), [("local[2]", True), ("spark://m:7077", False)])
def test_a_job_is_started_as_the_spark_provider_would(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, host: str, loopback: bool
) -> None:
    """With the provider that is installed: what is read of its private parts is there."""
    connect("spark_default", conn_type="spark", host=host, extra={"deploy-mode": "client", "queue": "cdc"})
    started: list[Any] = []
    monkeypatch.setattr(
        supervise,
        "start",
        lambda folder, command, environment, ends_with_parent: started.append((command, environment)),
    )
    provider = SparkSubmitHook(
        conf={"spark.ui.enabled": "false"}, conn_id="spark_default", name="n", num_executors=3, driver_memory="1g",
        application_args=["--pipeline", "x.json"], env_vars={"TZ": "UTC", "N": 5}, files="x.json",
    )  # fmt: skip
    spark_job.start(provider, IDENTITY, "job.py", variables={}, ends_with_parent=False)
    ((command, environment),) = started
    assert command == [
        "spark-submit", "--master", host, "--conf", "spark.ui.enabled=false", "--files", "x.json", "--num-executors",
        "3",
        "--driver-memory", "1g", "--name", "n", "--queue", "cdc", "--deploy-mode", "client", "job.py", "--pipeline",
        "x.json",
    ]  # fmt: skip
    assert (environment["TZ"], environment["N"]) == ("UTC", "5")
    assert ("SPARK_LOCAL_IP" in environment) == loopback


@pytest.mark.parametrize(("host", "refused"), [("yarn", True), ("k8s://https://k", True), ("spark://m:7077", False)])
def test_a_variable_with_a_secret_does_not_become_an_argument(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, host: str, *, refused: bool
) -> None:
    connect("spark_default", conn_type="spark", host=host, extra={"deploy-mode": "client"})
    started: list[Any] = []
    monkeypatch.setattr(supervise, "start", lambda folder, command, environment, **_: started.append(command))
    provider = SparkSubmitHook(conn_id="spark_default", env_vars={"DB_PASSWORD": "hidden"})
    with pytest.raises(Refused, match="DB_PASSWORD has a secret") if refused else contextlib.nullcontext() as raised:
        spark_job.start(provider, IDENTITY, "job.py", variables={}, ends_with_parent=False)
    assert "hidden" not in str(started) + str(raised)
    assert bool(started) is not refused


def test_a_new_job_removes_what_killed_ones_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    pipeline = Settings.of(
        postgres="host=db password=x", kafka={"bootstrap.servers": "k"}, format="json", slot="orders"
    )
    old = tmp_path / "bottledwater" / "stream-orders-1"
    old.mkdir(parents=True)
    (old / "pipeline-x.json").write_text("secret")
    (old / "supervisor.json").write_text(json.dumps({"pid": 1, "started": 1, "host": socket.gethostname()}))
    identity, settings = spark_job.prepare(pipeline, "stream", SparkTarget("spark_default", False, "local[2]"))
    assert settings.stat().st_mode & 0o77 == 0 and Path(identity["folder"]).stat().st_mode & 0o77 == 0
    assert old.exists() and not (old / "pipeline-x.json").exists()


@pytest.mark.parametrize(
    ("namespace", "pod", "application"),
    [(None, None, r"default:bottledwater-stream-my-orders-\w{8}"), ("cdc", "mine", "cdc:mine")],
)
def test_on_kubernetes_a_job_is_known_by_namespace_and_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str | None, pod: str | None, application: str
) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    pipeline = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json", slot="my_orders")
    place = SparkTarget("s", True, "k8s://https://k:443", namespace, pod)
    identity, _ = spark_job.prepare(pipeline, "stream", place)
    assert re.fullmatch(application, identity["application"])
    command = submit.cancel(place.master, identity["application"], os.environ)
    assert command is not None and command[1:] == ["--master", place.master, "--kill", identity["application"]]


def followed(folder: Path, **arguments: Any) -> tuple[following.FileFollower, list[str]]:
    lines: list[str] = []
    return following.FileFollower(folder, lambda level, line: lines.append(line), **arguments), lines


def test_a_jobs_log_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, lines = followed(tmp_path)
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
    follower, lines = followed(tmp_path, past=5)
    follower.follow()
    assert lines == ["four"]
    # and a line without an end does not stop it
    monkeypatch.setattr(following, "_LOG_BYTES", 10)
    with log.open("a") as file:
        file.write("x" * 25 + "\nfive\n")
    lines.clear()
    for _ in range(5):
        follower.follow()
    assert "".join(lines) == "x" * 25 + "five"


def test_a_jobs_lines_keep_their_level_and_lose_their_time(tmp_path: Path) -> None:
    """Airflow adds a time of its own."""
    (tmp_path / "job.log").write_text(
        "WARNING: Using incubator modules: jdk.incubator.vector\n"
        "before anything\n"
        'Setting default log level to "WARN".\n'
        "26/01/02 03:04:05 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform...\n"
        "2026-01-02 03:04:05,678 INFO Published 5 records\n"
        "2026-01-02 03:04:05,679 ERROR It failed:\n"
        "Traceback (most recent call last):\n"
        "26/01/02 03:04:05 WARN Utils: Your hostname resolves to a loopback address\n"
        "2026-01-02 03:04:05,680 WARNING Waiting: 2026-01-02 03:04:05,680 INFO is said inside\n"
        "2026-01-02 03:04:05,681 NOTICE is no level\n"
    )
    found: list[tuple[str, str]] = []
    following.FileFollower(tmp_path, lambda level, line: found.append((logging.getLevelName(level), line))).follow()
    assert found == [
        ("INFO", "before anything"),
        ("INFO", "Published 5 records"),
        ("ERROR", "It failed:"),
        ("ERROR", "Traceback (most recent call last):"),
        ("WARNING", "Utils: Your hostname resolves to a loopback address"),
        ("WARNING", "Waiting: 2026-01-02 03:04:05,680 INFO is said inside"),
        ("WARNING", "2026-01-02 03:04:05,681 NOTICE is no level"),
    ]


@pytest.mark.usefixtures("connections")
def test_what_only_this_airflow_can_call_is_refused_by_its_name(connect: Any) -> None:
    connect("k", conn_type="kafka", extra={"bootstrap.servers": "k:1", "oauth_cb": "my.module.token"})
    connect("pg", conn_type="postgres", host="db", extra={"iam": True})
    with pytest.raises(Refused, match="'k' has an oauth_cb") as raised:
        PipelineHook("postgres_default", "k", None, {"format": "json"}).pipeline()
    # as it advises
    advised = re.findall(r"[a-z][a-z.]+\.[a-z.]*[a-z]|client\.\w+", raised.value.remedy)
    values = {
        "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/",
        "sasl.oauthbearer.client.id": "me", "sasl.oauthbearer.client.secret": "s3cret",
    }  # fmt: skip
    assert set(advised) == set(values)
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    clients.made(AdminClient, clients.client_config({"bootstrap.servers": "127.0.0.1:1", **login, **values}))
    with pytest.raises(Refused, match="'pg' has iam"):
        PipelineHook("pg", "kafka_default", None, {"format": "json"}).pipeline()
