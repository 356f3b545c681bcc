"""What Airflow's OpenLineage provider gets of a task: tables, topics, columns with their masks, counts and verdicts."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from airflow.providers.openlineage.extractors.manager import ExtractorManager
from airflow.sdk import TaskInstanceState
from openlineage.client.serde import Serde
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.errors import SlotError
from airflow_bottledwater.lineage.job import PARENT, is_told
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator
from airflow_bottledwater.operators.lineage import parent_of_job
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.operators.verify import VerifyTopicsOperator
from airflow_bottledwater.state.verification import TableResult, Verification
from tests.support.topics import Flow, MakeFlow, airflow_connections
from tests.support.waiting import until

OPTIONS = {"people": {"mask": {"email": "hash"}, "rename": {"n": "number"}, "exclude": "secret"}}


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    """OpenLineage's client sets some in this process, which the next test would find."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name.startswith("OPENLINEAGE"):
            del os.environ[name]


@pytest.fixture
def flow(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> Flow:
    made = make_flow(table_options=OPTIONS, hash_key="a key of thirty-two bytes or more")
    made.create()
    made.snapshot()
    airflow_connections(monkeypatch, made)
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", '{"type": "console"}')
    return made


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE people (id int PRIMARY KEY, n numeric(9,2), email text, secret text)",
        "COMMENT ON COLUMN people.email IS 'where they read'",
        "INSERT INTO people SELECT i, i, i || '@x', 'hidden' FROM generate_series(1, 5) i",
        "CREATE TABLE orders (id int PRIMARY KEY)",
    )


def described(flow: Flow) -> dict[str, Any]:
    return {"name": flow.pipeline.slot, "saved": True}


def told(operator: Any, *, complete: bool = False) -> dict[str, Any]:
    """What the provider gets when a task begins; or at its end, in a process that it has forked off the task's."""
    if complete:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as forked:
            return forked.submit(extracted, operator, TaskInstanceState.SUCCESS).result(60)
    return extracted(operator, TaskInstanceState.RUNNING)


def extracted(operator: Any, state: TaskInstanceState) -> dict[str, Any]:
    run, ti = SimpleNamespace(run_id="r"), SimpleNamespace()
    found = ExtractorManager().extract_metadata(run, operator, state, ti)  # type: ignore[arg-type]
    both = {"inputs": found.inputs, "outputs": found.outputs}
    plain = {kind: [Serde.to_dict(each) for each in datasets] for kind, datasets in both.items()}
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]


def test_tables_go_to_topics_column_by_column(flow: Flow) -> None:
    operator = SnapshotToKafkaOperator(task_id="snapshot", pipeline=described(flow))
    found = told(operator)
    of = conninfo_to_dict(flow.dsn)
    source = {"namespace": f"postgres://{of['host']}:{of['port']}", "name": f"{of['dbname']}.public.people"}
    _, people = found["inputs"]
    assert {name: people[name] for name in source} == source
    fields = [(each["name"], each["type"], each.get("description")) for each in people["facets"]["schema"]["fields"]]
    assert fields == [("id", "integer", None), ("n", "numeric(9,2)", None), ("email", "text", "where they read")]
    _, topic = found["outputs"]
    assert topic["name"] == flow.topic("people")
    assert topic["namespace"] == f"kafka://{flow.kafka.bootstrap}"
    assert [each["name"] for each in topic["facets"]["schema"]["fields"]] == ["id", "number", "email"]
    made = topic["facets"]["columnLineage"]["fields"]
    (number,), (email,) = made["number"]["inputFields"], made["email"]["inputFields"]
    assert {name: number[name] for name in (*source, "field")} == {**source, "field": "n"}
    assert not number["transformations"][0].get("masking") and email["transformations"][0]["masking"]
    assert "secret" not in json.dumps(found) and "hidden" not in json.dumps(found)
    assert not topic.get("outputFacets")


def test_the_end_of_a_snapshot_has_the_rows_of_each_topic(flow: Flow) -> None:
    operator = SnapshotToKafkaOperator(task_id="snapshot", pipeline=described(flow))
    operator.published = AssetEvents({}, [], flow.pipeline).snapshot()
    operator.keep_lineage()
    orders, people = told(operator, complete=True)["outputs"]
    assert people["outputFacets"]["outputStatistics"]["rowCount"] == 5
    assert orders["outputFacets"]["outputStatistics"]["rowCount"] == 0


def test_a_backfill_names_the_tables_that_it_reads(flow: Flow) -> None:
    operator = BackfillToKafkaOperator(task_id="b", pipeline=described(flow), tables="peop*")
    assert [each["name"] for each in told(operator)["outputs"]] == [flow.topic("people")]
    assert len(told(StreamToKafkaOperator(task_id="s", pipeline=described(flow)))["outputs"]) == 2


@pytest.mark.parametrize("verdict", ["equal", "different", "unsettled"])
def test_a_verification_is_an_assertion_of_each_topic(flow: Flow, verdict: str) -> None:
    operator = VerifyTopicsOperator(task_id="v", pipeline=described(flow))
    people = TableResult("public.people", flow.topic("people"), rows=5)
    people.counts, people.unsettled = {"missing": 1} if verdict == "different" else {}, int(verdict == "unsettled")
    operator.verified = Verification(1.0, "0/1", 1.0, [people])
    operator.keep_lineage()
    found = told(operator, complete=True)
    assert not found["outputs"]
    facets = {each["name"]: each.get("inputFacets") or {} for each in found["inputs"]}
    (told_of,) = facets[flow.topic("people")]["dataQualityAssertions"]["assertions"]
    assert told_of["assertion"] == "topic_equals_table" and told_of["success"] is (verdict == "equal")
    assert told_of["actual"] == verdict
    assert not facets[flow.topic("orders")]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """OpenLineage's client is configured by its own variables; returns the events that jobs have sent since."""
    file = tmp_path / "events"
    transport = {"type": "file", "log_file_path": str(file), "append": True}
    for name, value in transport.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name.upper()}", str(value))
    monkeypatch.setenv(PARENT, "airflow/shop.stream/01941f29-7c00-7087-8906-40e512c257bd")
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_jobs_tell_what_they_publish_while_they_run(
    make_flow: MakeFlow, events: Callable[[], list[dict[str, Any]]]
) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    begun, *_, ended = events()
    assert (begun["eventType"], ended["eventType"]) == ("START", "COMPLETE")
    assert ended["job"]["name"] == f"{flow.pipeline.slot}.snapshot"
    rows = {each["name"]: each["outputFacets"]["outputStatistics"]["rowCount"] for each in ended["outputs"]}
    assert rows == {flow.topic("people"): 5, flow.topic("orders"): 0}

    def latest() -> dict[str, Any]:
        return events()[-1]

    with flow.streaming():
        until(lambda: latest()["eventType"] == "RUNNING" and len(latest()["inputs"]) == 2, "its tables are told")
        flow.execute("CREATE TABLE more (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
        until(lambda: len(latest()["inputs"]) == 3, "a new table is told")
    told = latest()
    assert told["eventType"] == "COMPLETE" and told["run"]["facets"]["parent"]["job"]["name"] == "shop.stream"
    assert told["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    rows = {each["name"]: each["outputFacets"]["outputStatistics"]["rowCount"] for each in told["outputs"]}
    assert rows[flow.topic("orders")] == 2
    assert len({each["run"]["runId"] for each in events()}) == 2


def test_a_job_that_fails_says_why(make_flow: MakeFlow, events: Callable[[], list[dict[str, Any]]]) -> None:
    flow = make_flow()
    flow.create()
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    with pytest.raises(SlotError):
        flow.snapshot()
    assert events()[-1]["eventType"] == "FAIL"
    assert flow.pipeline.slot in events()[-1]["run"]["facets"]["errorMessage"]["message"]


@pytest.mark.long
def test_a_job_goes_on_if_nobody_takes_what_it_tells(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:1")
    flow = make_flow()
    flow.create()
    assert flow.snapshot().rows == 5
    until(lambda: "OpenLineage is not told of the job" in caplog.text, "it is said")
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    assert not is_told()


def test_a_job_gets_the_run_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(logical_date=datetime(2026, 1, 1, tzinfo=UTC))
    ti = SimpleNamespace(dag_id="shop", task_id="stream", try_number=1, map_index=-1, task=None)
    ti.get_template_context = lambda: {"dag_run": run}
    assert parent_of_job(ti) == {}
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", '{"type": "console"}')
    namespace, name, run_id = parent_of_job(ti)[PARENT].split("/")
    assert (namespace, name) == ("default", "shop.stream") and UUID(run_id)


@pytest.mark.long
def test_without_a_place_to_tell_it_nothing_is_read(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator = SnapshotToKafkaOperator(task_id="snapshot", pipeline=described(flow))
    flow.change(kafka={"bootstrap.servers": "127.0.0.1:1"}, outage_timeout=1)
    airflow_connections(monkeypatch, flow)
    operator.keep_lineage()
    assert "OpenLineage is not told the tables and topics of the task: Kafka" in caplog.text
    caplog.clear()
    monkeypatch.delenv("AIRFLOW__OPENLINEAGE__TRANSPORT")
    operator.keep_lineage()
    assert "the tables and topics of the task" not in caplog.text
    assert operator.get_openlineage_facets_on_complete(None) is None
