"""The whole path with TLS, passwords and the least rights: nothing more is needed, what is missing is named, nothing
leaks.

Every test also searches the log, the output, all errors and all topics for the passwords.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from psycopg.conninfo import make_conninfo

from airflow_bottledwater import processes
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, PreflightError, Refused
from airflow_bottledwater.jobs import control, status
from airflow_bottledwater.kafka import topic_reader
from airflow_bottledwater.kafka.publisher import Publisher, Records
from airflow_bottledwater.pipeline.description import Description, Kafka, Source
from airflow_bottledwater.policy import transient
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.drop import drop
from tests.support.pipeline import logged
from tests.support.security import (
    KAFKA_PASSWORD,
    POSTGRES_PASSWORD,
    REGISTRY_PASSWORD,
    REGISTRY_USER,
    Right,
    Secured,
    Servers,
    documented_rights,
    secrets_in,
)
from tests.support.waiting import until

RIGHTS = documented_rights()
NEEDED = [right for right in RIGHTS if right.only_for in ("", "create_topics")]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The three servers."""
    made = Servers(tmp_path_factory.mktemp("secured"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def silent(servers: Servers, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nobody logs, prints or publishes a password."""
    caplog.set_level(logging.DEBUG)
    yield
    out, err = capfd.readouterr()
    for seen in (logged(caplog), out, err, *everything(servers)):
        assert not secrets_in(seen)


def everything(servers: Servers) -> list[bytes]:
    """Keys, values and headers of all records of all topics, committed or not."""
    topics = {n: t for n, t in servers.admin.list_topics(timeout=10).topics.items() if not n.startswith("__")}
    consumer = Consumer(
        {
            "bootstrap.servers": servers.kafka.bootstrap,
            "group.id": uuid.uuid4().hex,
            "enable.partition.eof": True,
            "isolation.level": "read_uncommitted",
        }
    )
    left = {(n, p) for n, t in topics.items() for p in t.partitions}
    consumer.assign([TopicPartition(n, p, 0) for n, p in left])
    found = []
    while left:
        for message in consumer.consume(5000, 0.1):
            if message.error() is None:
                found.append(repr((message.key(), message.value(), message.headers())).encode())
            elif message.error().code() == KafkaError._PARTITION_EOF:
                left.discard((message.topic(), message.partition()))
    consumer.close()
    return found


def refused(pipeline: Any) -> BottledWaterError:
    """Why preflight does not let it begin; the error with all its causes is without a password."""
    with pytest.raises(BottledWaterError) as raised:
        preflight.run(pipeline)
    assert not secrets_in("".join(traceback.format_exception(raised.value)))
    return raised.value


@pytest.mark.parametrize("made_by", ["the pipeline", "administrators"])
def test_the_documented_rights_are_enough(servers: Servers, made_by: str) -> None:
    own = made_by == "the pipeline"
    flow = Secured(servers, NEEDED if own else [], tables="sales.a", create_topics=own, create_publication=own)
    if own:
        flow.let_publish()
    else:
        flow.publish()
        flow.make_topics()
        flow.grant(*flow.narrow_rights())
    flow.create()
    assert flow.snapshot().rows == 100
    flow.execute("UPDATE sales.a SET t = 'y' WHERE id < 10", "DELETE FROM sales.a WHERE id = 10")
    assert flow.stream()["published"] == 10
    assert status.report(flow.pipeline).complete
    assert flow.differences() == []
    assert "Dropped slot" in drop(flow.pipeline, when="always")
    # over TLS, with a password: not as the superuser of the test
    if servers.tls:
        with pytest.raises(Refused, match="no encryption"):
            preflight.run(flow.pipeline.with_(postgres=make_conninfo(flow.pipeline.postgres, sslmode="disable")))


@pytest.fixture(scope="module")
def incomplete(servers: Servers) -> Secured:
    """A pipeline that is never begun, since always one of its rights is missing."""
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False)
    flow.publish()
    return flow


@pytest.mark.parametrize("right", NEEDED, ids=str)
def test_each_right_is_needed_and_preflight_says_that_it_is_missing(incomplete: Secured, right: Right) -> None:
    before = set(incomplete.servers.admin.list_topics(timeout=10).topics)
    incomplete.revoke(right)
    error = refused(incomplete.pipeline)
    incomplete.grant(right)
    assert isinstance(error, PreflightError)
    named = {"Topic": "topic", "Transactional id": "transactional id"}[right.resource]
    assert f"{named} '{right.prefix.replace('shop', incomplete.pipeline.topic_prefix)}" in str(error)
    # with Write goes the right to see a topic
    assert f"Kafka denies {right.operation}" in str(error) or right.operation == "Write"
    assert "operations.html#acls-in-kafka" in str(error) or named != "topic"
    assert set(incomplete.servers.admin.list_topics(timeout=10).topics) == before


def test_a_right_that_is_taken_away_ends_the_stream_for_good_and_is_named(servers: Servers) -> None:
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False, skip_snapshot=True)
    flow.publish()
    flow.create()
    write = next(right for right in NEEDED if right.prefix == "shop." and right.operation == "Write")
    with flow.streaming() as errors:
        flow.execute("UPDATE sales.a SET t = 'y' WHERE id = 1")
        until(lambda: status.report(flow.pipeline).counters["published"] == 1, "the first change", failed=errors)
        # only Write: the topic can still be seen
        flow.grant(Right("Topic", "shop.", "Describe"))
        flow.revoke(write)
        begun = time.monotonic()
        flow.execute("UPDATE sales.a SET t = 'z' WHERE id = 1")
        until(lambda: errors, "the stream fails")
    # it is no outage that would be waited out
    assert time.monotonic() - begun < flow.pipeline.outage_timeout
    assert isinstance(errors[0], Refused)
    assert not transient(errors[0])
    assert "Kafka denies Write" in str(errors[0])
    assert f"{flow.pipeline.topic_prefix}.sales.a" in str(errors[0])
    job = flow.job
    assert job is not None
    assert (job.state, job.error, job.permanent) == ("failed", str(errors[0]), True)


def test_a_right_on_the_state_that_is_taken_away_is_named_also_while_records_are_made(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False, skip_snapshot=True)
    flow.publish()
    flow.create()
    begin = Publisher.begin

    def slowly(publisher: Publisher, first: Records) -> None:
        begin(publisher, first)
        time.sleep(0.5)  # the coordinator has refused the first record's partition

    monkeypatch.setattr(Publisher, "begin", slowly)
    with flow.streaming() as errors:
        flow.execute("UPDATE sales.a SET t = 'y' WHERE id = 1")
        until(lambda: status.report(flow.pipeline).counters["published"] == 1, "the first change", failed=errors)
        flow.grant(Right("Topic", "_bottledwater", "Describe"))
        flow.revoke(next(r for r in NEEDED if r.prefix == "_bottledwater" and r.operation == "Write"))
        flow.execute("UPDATE sales.a SET t = 'z' WHERE id = 1")
        until(lambda: errors, "the stream fails")
    assert isinstance(errors[0], Refused)
    assert "Kafka denies Write" in str(errors[0])


def test_who_is_not_trusted_or_does_not_trust_is_told_why_before_anything_is_changed(servers: Servers) -> None:
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False)
    flow.publish()
    good, stranger = flow.pipeline, str(servers.stranger.certificate)
    kafka = [
        ({"sasl.password": "other"}, "invalid credentials"),
        ({"ssl.ca.location": stranger}, "certificate verify failed"),
        ({"bootstrap.servers": servers.bootstrap.replace("127.0.0.1", "localhost")}, "certificate verify failed"),
    ]
    for change, why in kafka:
        assert why in str(refused(good.with_(kafka={**good.kafka, **change})))
    registry = {**good.registry, "basic.auth.user.info": f"{REGISTRY_USER}:other"}
    error = refused(good.with_(registry=registry))
    assert isinstance(error, CredentialsRefused)
    assert "denies access" in str(error)
    postgres = [({"password": "other"}, "password authentication failed")]
    if servers.tls:
        postgres += [
            ({"sslrootcert": stranger}, "certificate verify failed"),
            ({"host": "localhost"}, "does not match host name"),
        ]
    for parts, why in postgres:
        error = refused(good.with_(postgres=make_conninfo(good.postgres, **parts)))
        assert isinstance(error, CredentialsRefused)
        assert why in str(error)
    assert preflight.run(good).tables


def test_a_stream_goes_on_when_the_password_in_its_file_was_rotated(servers: Servers, tmp_path: Path) -> None:
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False, skip_snapshot=True)
    flow.publish()
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    passwords.write_text(f"*:*:*:{flow.user}:{POSTGRES_PASSWORD}\n")
    flow.change(postgres=flow.role(passfile=str(passwords)))
    flow.create()
    with flow.streaming() as errors:
        flow.execute("UPDATE sales.a SET t = 'y' WHERE id = 1")
        until(lambda: status.report(flow.pipeline).counters["published"] == 1, "the first change", failed=errors)
        flow.execute(
            f"ALTER ROLE {flow.user} PASSWORD '{POSTGRES_PASSWORD}2'",
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE active AND database = current_database()",
            "UPDATE sales.a SET t = 'z' WHERE id = 1",
        )
        time.sleep(1.0)
        passwords.write_text(f"*:*:*:{flow.user}:{POSTGRES_PASSWORD}2\n")
        until(lambda: status.report(flow.pipeline).counters["published"] == 2, "the second change", failed=errors)
    assert not errors


def test_a_stream_whose_password_in_kafka_was_rotated_says_so_and_goes_on_with_the_new_one(servers: Servers) -> None:
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False, skip_snapshot=True, on_error="log")
    flow.publish()
    flow.create()
    with flow.streaming() as errors:
        flow.execute("UPDATE sales.a SET t = 'y' WHERE id = 1")
        until(lambda: status.report(flow.pipeline).counters["published"] == 1, "the first change", failed=errors)
        flow.kafka_password(f"{KAFKA_PASSWORD}2")
        # connections that are open live on
        servers.kafka.kill()
        servers.kafka.start()
        flow.execute("UPDATE sales.a SET t = 'z' WHERE id = 1")
        until(lambda: errors, "the stream fails")
    (error,) = errors
    assert isinstance(error, Outage) and "credentials" in str(error), error
    flow.change(kafka={**flow.pipeline.kafka, "sasl.password": f"{KAFKA_PASSWORD}2"})
    flow.stream()
    assert status.report(flow.pipeline).counters["published"] == 2


@pytest.mark.parametrize("exchanged", ["the broker's", "the client's"])
def test_a_stream_whose_certificates_were_exchanged_goes_on_with_the_new_ones(
    servers: Servers, tmp_path: Path, exchanged: str
) -> None:
    """librdkafka reads the files when a client is made: the stream has to end, whatever its on_error is."""
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False, skip_snapshot=True, on_error="log")
    authorities, own = tmp_path / "authorities.pem", tmp_path / "own.pem"
    authorities.write_bytes(servers.authority.certificate.read_bytes())
    own.write_text("".join(servers.authority.issue("client")))
    files = {"ssl.ca.location": authorities, "ssl.key.location": own, "ssl.certificate.location": own}
    flow.change(kafka={**flow.pipeline.kafka, **{name: str(file) for name, file in files.items()}})
    if exchanged == "the client's":
        servers.kafka.settings["listener.name.clients.ssl.client.auth"] = "required"
        servers.kafka.restart()
    flow.publish()
    flow.create()
    with flow.streaming() as errors:
        flow.execute("UPDATE sales.a SET t = 'y' WHERE id = 1")
        until(lambda: status.report(flow.pipeline).counters["published"] == 1, "the first change", failed=errors)
        if exchanged == "the client's":
            servers.trusted.write_bytes(servers.stranger.certificate.read_bytes())
        else:
            servers.shown.write_text("".join(servers.stranger.issue("kafka")))
        servers.kafka.kill()
        flow.execute("UPDATE sales.a SET t = 'z' WHERE id = 1")
        try:
            servers.kafka.start()
            until(lambda: errors, "the stream fails")
            (error,) = errors
            assert isinstance(error, Outage) and "certificate" in str(error), error
            authorities.write_bytes(b"".join(a.certificate.read_bytes() for a in (servers.authority, servers.stranger)))
            if exchanged == "the client's":
                own.write_text("".join(servers.stranger.issue("client")))
            flow.stream()
            assert status.report(flow.pipeline).counters["published"] == 2
        finally:
            servers.kafka.stop()
            servers.kafka.settings.pop("listener.name.clients.ssl.client.auth", None)
            servers.certify(servers.authority)
            servers.kafka.start()


def test_a_job_that_may_not_read_requests_any_more_says_so(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_UNHEARD", 5.0)
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False, skip_snapshot=True)
    flow.publish()
    flow.create()
    everybody = flow.pipeline.with_(kafka={"bootstrap.servers": servers.kafka.bootstrap})

    def told() -> list[str]:
        job = status.report(everybody).job
        return [str(each) for each in job.problems if each.kind == "requests-unheard"] if job else []

    with flow.streaming() as errors:
        flow.execute("UPDATE sales.a SET t = 'y' WHERE id = 1")
        until(lambda: status.report(everybody).counters["published"] == 1, "the first change", failed=errors)
        read = next(r for r in NEEDED if r.prefix == "_bottledwater" and r.operation == "Read")
        flow.revoke(read)
        until(told, "the job says that it is deaf", failed=errors)
        assert "Make sure that the role may read it" in told()[0]
        flow.grant(read)
        until(lambda: not told(), "the job hears again", failed=errors)
    assert not errors


def test_a_reader_of_a_topic_that_is_refused_does_not_wait_for_a_transaction(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Backoff):
        def wait(self, what: str | BaseException) -> None:
            if isinstance(what, BaseException):
                raise what
            super().wait(what)

    monkeypatch.setattr(topic_reader, "_SILENCE", 1.0)
    flow = Secured(servers, NEEDED, tables="sales.a", create_publication=False)
    with pytest.raises(CredentialsRefused, match=r"authentication failed|invalid credentials"):
        list(topic_reader.blocks({**flow.pipeline.kafka, "sasl.password": "other"}, "any", [1], Impatient(60.0)))


def test_the_command_and_its_jobs_show_no_secret(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # topics with a limit of their own
    flow = Secured(servers, [*NEEDED, *(r for r in RIGHTS if r.operation == "DescribeConfigs")], tables="sales.a")
    flow.publish()
    own, scratch = tmp_path / "own", tmp_path / "scratch"
    for folder in (own, scratch):
        folder.mkdir()
    (own / "passwords").touch(mode=0o600)
    (own / "passwords").write_text(f"*:*:*:{flow.user}:{POSTGRES_PASSWORD}\n")
    described = Description(
        flow.pipeline.slot,
        source=Source(dsn=flow.role(passfile=str(own / "passwords")), tables=("sales.a",), create_publication=False),
        kafka=Kafka(
            topic_prefix=flow.pipeline.topic_prefix,
            replication_factor=1,
            properties=dict(flow.pipeline.kafka),
            registry_properties={
                "url": servers.registry.url,
                "basic.auth.user.info": f"{REGISTRY_USER}:{REGISTRY_PASSWORD}",
            },
            topic_config={"max.message.bytes": "2000"},
        ),
        on_error="log",
    )
    (own / "shop.yaml").write_bytes(msgspec.yaml.encode(described.as_dict(secrets=True)))
    # a record that becomes a dead letter
    flow.execute("INSERT INTO sales.a SELECT 1000, string_agg(md5(g::text), '') FROM generate_series(1, 200) g")
    monkeypatch.setenv("TMPDIR", str(scratch))
    command = [str(Path(sys.executable).parent / "bottledwater"), "--config", str(own / "shop.yaml")]
    command += ["--master", "local[2]", "--bounded"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    start = processes.started(process.pid)
    shown: set[bytes] = set()
    modes: set[int] = set()
    try:
        while process.poll() is None:
            for pid in processes.family(process.pid):
                with contextlib.suppress(OSError):
                    shown.add(Path(f"/proc/{pid}/cmdline").read_bytes())
            with contextlib.suppress(OSError):
                modes |= {
                    p.stat().st_mode & 0o777 for file in scratch.glob("*/pipeline-*") for p in (file, file.parent)
                }
            time.sleep(0.2)
        output = process.communicate(timeout=60)[0]
    finally:
        if start is not None:
            processes.kill_family(process.pid, start)
    assert process.returncode == 0, output.decode()
    # the look was at the right things
    assert any(b"spark-submit" in each or b"SparkSubmit" in each for each in shown)
    assert any(b"pyspark" in each for each in shown)
    # folder and file are this user's only
    assert modes == {0o700, 0o600}
    for seen in (*shown, output):
        assert not secrets_in(seen)
    left = [file for file in scratch.rglob("*") if file.is_file()]
    assert [file for file in left if file.name.startswith("pipeline-") or secrets_in(file.read_bytes())] == []
    report = status.report(flow.pipeline)
    assert report.complete
    assert not secrets_in(str(report))
    letters = [record for record in everything(servers) if b"sales.a" in record and b'"truncated"' in record]
    assert len(letters) == 1
