"""What the page in Airflow shows of a pipeline on real servers."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_bottledwater.plugin.detail import detail
from airflow_bottledwater.plugin.letters import newest
from airflow_bottledwater.plugin.overview import rows
from airflow_bottledwater.plugin.past import past
from airflow_bottledwater.plugin.watch import KafkaWatch
from airflow_bottledwater.provision import redrive
from tests.support.topics import Flow, MakeFlow, alter_topic
from tests.support.waiting import until


@pytest.fixture
def shown(make_flow: MakeFlow) -> Flow:
    flow = make_flow(metrics_interval=0.3, skip_snapshot=True, heartbeat_interval=0.2)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, t text)")
    flow.create()
    return flow


def test_a_running_pipeline_has_its_state_its_tables_and_its_history(shown: Flow) -> None:
    watch = KafkaWatch.of("kafka_default", dict(shown.pipeline.kafka))
    plots = past(shown.pipeline.kafka, shown.name, 900)
    with shown.streaming():
        until(lambda: any(each["lag_bytes"] is not None for each in mine(watch, shown)), "a sample")
        shown.execute("INSERT INTO a SELECT i, 'x' FROM generate_series(1, 50) i", "DELETE FROM a WHERE id = 1")

        def delayed() -> list[dict[str, Any]]:
            shown.execute("UPDATE a SET t = 'y' WHERE id = 2")  # only the last eight samples are kept
            return [each for each in mine(watch, shown) if each["delay"]]

        (row,) = until(delayed, "the delay is measured")
        assert row["state"] == "streaming" and row["wanted"] and not row["wrong"] and row["task"] is None
        assert row["wal_kept"] >= 0 and row["memory"] > 0 and row["snapshot"] is None

        def counted() -> bool:
            found = detail(watch, shown.name, watch.look())["tables"]
            counts = [(each.get("rows") or {}) | {"update": 0} for each in found]
            return counts == [{"insert": 50, "delete": 1, "update": 0}] and "changed" in found[0]

        until(counted, "the table's rows are counted")
        found = detail(watch, shown.name, watch.look())
        assert found["tables"][0]["topic"] == shown.topic("a") and found["tables"][0]["complete"]
        assert found["publications"][0].startswith(shown.pipeline.publication_name)
        assert found["settings"]["skip_snapshot"] is True and found["unknown"] == ""
        seen = until(
            lambda: (s := plots.look())["complete"] and any(s["series"]["deletes"]) and s, "the history is read"
        )
    # how many a second these 50 rows were depends on how many samples their ten seconds have
    assert sum(each or 0 for each in seen["series"]["inserts"]) > 1 and len(seen["at"]) == 91
    assert any(seen["series"]["delay_p95"]) and all(len(each) == 91 for each in seen["series"].values())


def test_the_newest_dead_letters_have_their_rows_and_reasons(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, t text)")
    flow.create()
    flow.execute("INSERT INTO a SELECT i, repeat('x', 30000) FROM generate_series(0, 59) i")
    flow.stream()
    kafka, prefix = flow.pipeline.kafka, flow.pipeline.topic_prefix
    found = newest(kafka, flow.name, prefix, keys=True)
    assert not found["complete"] and [each["key"] for each in found["letters"]] == [
        {"id": str(59 - i)} for i in range(50)
    ]
    first = found["letters"][0]
    assert (first["table"], first["op"], first["by"]) == ("public.a", "c", "stream")
    assert "20,000" in first["reason"] and first["position"] and time.time() - 600 < first["at"] < time.time() + 60
    assert {each["key"] is None for each in newest(kafka, flow.name, prefix, keys=False)["letters"]} == {True}
    assert newest(kafka, "another", prefix, keys=True) == {"letters": [], "complete": True}
    # what a retention has taken is not looked for
    topic, admin = flow.topic("_bottledwater_dead_letters"), AdminClient(kafka)
    alter_topic(flow, "_bottledwater_dead_letters", cleanup_policy="compact,delete")
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, 2)]).values()
    deleted.result()
    assert newest(kafka, flow.name, prefix, keys=True) == found
    # those that are settled are not open any more
    assert redrive.dismiss(flow.pipeline, ["a"]).dismissed == 58
    assert newest(kafka, flow.name, prefix, keys=True) == {"letters": [], "complete": True}


def mine(watch: KafkaWatch, flow: Flow) -> list[dict]:  # type: ignore[type-arg]
    return [each for each in rows("kafka_default", watch.look()) if each["name"] == flow.name]
