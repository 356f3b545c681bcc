"""What a job measures, and what Prometheus reads of it, on real servers."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from prometheus_client.parser import text_string_to_metric_families

from airflow_bottledwater.cli.commands import cli
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.metrics import sampler
from airflow_bottledwater.metrics.history import History
from airflow_bottledwater.metrics.sample import METRICS_TOPIC, Sample
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until


@pytest.fixture
def measured(make_flow: MakeFlow) -> Flow:
    # three intervals are what a sample is shown for, and a command needs a moment until it has read it
    flow = make_flow(metrics_interval=1.0, skip_snapshot=True, heartbeat_interval=0.2)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, t text)", "CREATE TABLE b (id int PRIMARY KEY)")
    flow.create()
    return flow


def last(history: History, flow: Flow) -> Sample | None:
    history.read(0.2)
    return history.latest.get(flow.name)


def test_a_stream_says_what_it_publishes_and_what_it_costs(measured: Flow) -> None:
    with closing(History(measured.pipeline.kafka)) as history, measured.streaming():
        until(lambda: last(history, measured), "a sample")
        began = time.monotonic()
        measured.execute(
            "INSERT INTO a SELECT i, 'x' FROM generate_series(1, 10) i",
            "UPDATE a SET t = 'y' WHERE id <= 4",
            "DELETE FROM a WHERE id = 1",
            "INSERT INTO b VALUES (1)",
        )
        until(lambda: (s := last(history, measured)) and s.value("rows") == 16, "all rows are counted")
        sample = until(lambda: (s := last(history, measured)) and s.value("lag_seconds") == 0 and s, "it has caught up")
        until(lambda: (s := status.report(measured.pipeline).job) and s.lag == 0 == s.delay, "its status says so, too")
    seconds = time.monotonic() - began
    assert [sample.value("rows", "public.a", each) for each in ("insert", "update", "delete")] == [10, 4, 1]
    assert sample.value("rows", "public.b", "insert") == 1
    assert sample.value("transactions") == 4
    delays = sample.distributions["delay_seconds"]
    assert sum(delays.counts) == 4 and 0 < delays.sum < 4 * seconds
    assert sample.distributions["commit_duration_seconds"].sum > 0 and sample.value("published_bytes")
    assert abs(sample.value("clock_difference_seconds") or 9) < 1  # one host
    assert sample.value("slot_active") == 1 and sample.value("slot_wal_status", "reserved") == 1
    assert (sample.value("slot_wal_kept_bytes") or 0) >= 0 and sample.value("slot_spilled_transactions") == 0
    assert (sample.value("memory_bytes") or 0) > 10_000_000 and (sample.value("cpu_seconds") or 0) > 0
    assert sample.value("claims") == 2 and sample.value("dead_letters") == 0
    assert sample.value("tables_not_followed") == 0


def test_prometheus_reads_all_pipelines_of_a_kafka(measured: Flow) -> None:
    with closing(History(measured.pipeline.kafka)) as history, measured.streaming():
        until(lambda: last(history, measured), "a sample")  # before it, the clocks are not compared
        measured.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 10) i")
        until(lambda: (s := last(history, measured)) and s.value("rows") == 10, "all rows are counted")
        broker = measured.pipeline.kafka["bootstrap.servers"]
        printed = CliRunner().invoke(cli, ["metrics", "--once", "-b", broker], catch_exceptions=False)
    found = [
        sample
        for family in text_string_to_metric_families(printed.stdout)
        for sample in family.samples
        if sample.labels.get("slot") == measured.pipeline.slot
    ]

    def value(name: str, **labels: str) -> float:
        return sum(each.value for each in found if each.name == name and labels.items() <= each.labels.items())

    assert value("bottledwater_rows_total", table="public.a", operation="insert") == 10
    assert value("bottledwater_delay_seconds_bucket", le="+Inf") == value("bottledwater_delay_seconds_count") == 1
    assert value("bottledwater_state", state="streaming") == 1 and value("bottledwater_state") == 1
    assert value("bottledwater_wanted") == 1 and value("bottledwater_last_report_age_seconds") < 10


def test_old_samples_are_deleted(measured: Flow) -> None:
    with closing(History(measured.pipeline.kafka)) as history, measured.streaming():
        until(lambda: last(history, measured), "a sample")
    admin = AdminClient({"bootstrap.servers": measured.pipeline.kafka["bootstrap.servers"]})
    resource = ConfigResource(ResourceType.TOPIC, METRICS_TOPIC)
    config = admin.describe_configs([resource])[resource].result(60)
    assert config["cleanup.policy"].value == "delete"
    assert config["retention.ms"].value == str(7 * 86_400_000)


def test_a_topic_that_is_deleted_is_made_again(measured: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = "samples_that_are_deleted"
    monkeypatch.setattr(sampler, "METRICS_TOPIC", topic)
    monkeypatch.setattr(sampler, "_AGAIN", 1.0)
    topics, admin = Topics(measured.pipeline.kafka), AdminClient(measured.pipeline.kafka)

    def written() -> bool:
        return topic in topics.describe([topic]) and topics.ends(topic, 1) != [0]

    with measured.streaming():
        until(written, "a sample")
        admin.delete_topics([topic])[topic].result(60)
        until(written, "a sample in the new topic")


def test_no_job_waits_for_its_metrics(measured: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the topic cannot be made, nor where PostgreSQL does not answer what is asked."""

    def hangs(*_: object) -> None:
        time.sleep(60)

    monkeypatch.setattr(sampler.Topics, "make", hangs)
    began = time.monotonic()
    measured.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 10) i")
    measured.stream()
    assert len(measured.read("a")) == 10
    assert time.monotonic() - began < 20
