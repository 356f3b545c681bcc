"""What the page's app answers, and to whom: with Airflow's own users and database, and a Kafka that is stood in for."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from airflow.sdk.execution_time.task_runner import _serialize_rendered_fields
from airflow.serialization.serialized_objects import DagSerialization
from fastapi.testclient import TestClient
from sqlalchemy import delete, event, insert

from airflow_bottledwater.dag import Pipeline
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.metrics.registry import SECONDS
from airflow_bottledwater.metrics.sample import Distribution, Labelled, Sample
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.argument import as_values
from airflow_bottledwater.pipeline.description import Description, Kafka, Source, Spark
from airflow_bottledwater.plugin import PREFIX, BottledWaterPlugin, app, detail, kafkas, rights, watch
from airflow_bottledwater.plugin.app import make
from airflow_bottledwater.plugin.watch import KafkaLook, KafkaWatch
from airflow_bottledwater.state.control_records import (
    SnapshotRequest,
    StatusRecord,
    VerifiedRecord,
    encode,
    snapshots_prefix,
    verified_key,
)
from airflow_bottledwater.tables.plan import NOT_FOLLOWED
from tests.support import page
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NAME, PREFLIGHT = "7/shop/orders", "ReplicationPreflightOperator"
Client = Callable[[str], TestClient]
Pressed = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def airflow() -> None:
    """An Airflow with two DAGs and the users of its simple auth manager."""
    from airflow import settings
    from airflow.api_fastapi.app import create_auth_manager
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session

    import_all_models()
    if settings.engine is None:
        settings.configure_orm()
    Base.metadata.create_all(settings.engine)
    create_auth_manager().init()
    with create_session() as session:
        session.merge(DagBundleModel(name="dags"))
        session.flush()
        session.merge(DagModel(dag_id="orders", bundle_name="dags", is_stale=False, is_paused=False, fileloc="x"))


@pytest.fixture
def client(airflow: None) -> Client:
    """Makes a client of a user with a role; without one, of nobody."""

    def make_client(role: str) -> TestClient:
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

        found = TestClient(make())
        if role:
            user = SimpleAuthManagerUser(username=role, role=role)
            found.headers["Authorization"] = f"Bearer {get_auth_manager().generate_jwt(user)}"
        return found

    return make_client


class Stub:
    """A watch that has seen something."""

    def __init__(self, seen: KafkaLook) -> None:
        self.conn_id, self.kafka, self.seen = "kafka_default", {"bootstrap.servers": "k:9092"}, seen

    def look(self) -> KafkaLook:
        return self.seen


def sample(name: str, ago: float, rows: int) -> Sample:
    values = {
        "rows": [Labelled(rows, ("public.orders", "insert"))],
        "lag_bytes": [Labelled(1_500_000)],
        "lag_seconds": [Labelled(75)],
        "slot_wal_kept_bytes": [Labelled(2e9)],
    }
    counts = [0, 0, rows, *[0] * (len(SECONDS) - 2)]
    at = time.time() - ago
    return Sample(name, "orders", "j", "stream", "streaming", 0.0, at, 10.0, values,
                  {"delay_seconds": Distribution(counts, 1.0)})  # fmt: skip


def status(slot: str = "orders", dag_id: str = "orders", **more: Any) -> StatusRecord:
    owner = Owner(dag_id, "run", "stream", -1, "worker", "/secret/folder", "local[*]") if dag_id else None
    job = Job(1, "j", "stream", "h", 5, time.time() - 900, owner)
    return StatusRecord(more.pop("state", "streaming"), job, slot, at=time.time(), **more)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def see(*of: StatusRecord, away: str = "", records: dict[str, Any] | None = None) -> None:
        statuses = {f"7/shop/{each.slot}": each for each in of}
        samples = {name: [sample(name, 10, 10), sample(name, 0, 110)] for name in statuses}
        stub = Stub(KafkaLook(records or {}, statuses, samples, frozenset(), 1.0, away))
        monkeypatch.setattr(kafkas, "watches", lambda: {"kafka_default": stub})
        # the same brokers by another connection
        monkeypatch.setattr(kafkas, "_connections", lambda: {"shop_kafka": ("kafka_default", {})})

    monkeypatch.setattr(detail, "_state", lambda *_: (None, ""))
    return see


def test_who_has_no_token_gets_nothing(client: Client, seen: Callable[..., None]) -> None:
    seen(status())
    of = (f"{what}/kafka_default/{NAME}" for what in ("pipelines", "history", "dead_letters"))
    for path in ("pipelines", *of):
        assert client("").get(f"/api/{path}").status_code == 401, path


def test_a_viewer_sees_the_pipelines_of_dags(client: Client, seen: Callable[..., None]) -> None:
    seen(status(), status("bare", dag_id=""), status("other", dag_id="of another Airflow"))
    answer = client("VIEWER").get("/api/pipelines").json()
    assert [each["slot"] for each in answer["pipelines"]] == ["orders"]
    assert client("VIEWER").get(f"/api/pipelines/kafka_default/{NAME}").status_code == 200
    # without a DAG of this Airflow, the right to read the connection decides
    assert client("VIEWER").get("/api/pipelines/kafka_default/7/shop/bare").status_code == 403
    assert client("VIEWER").get("/api/history/kafka_default/7/shop/other").status_code == 403
    assert len(client("OP").get("/api/pipelines").json()["pipelines"]) == 3


def test_a_pipeline_of_another_airflow_is_none_of_a_dag_here(
    client: Client, seen: Callable[..., None], ran: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the DAG, the run and the task of its job."""
    ran("run", "success", "orders", task_id="stream")
    path, ours = f"/api/pipelines/kafka_default/{NAME}", status()
    seen(ours)
    assert client("VIEWER").get(path).json()["connections"]["postgres"] == "shop_postgres"
    monkeypatch.setenv("AIRFLOW__BOTTLEDWATER__AIRFLOW_ID", "this one")
    assert ours.job.owner is not None
    seen(replace(ours, job=replace(ours.job, owner=replace(ours.job.owner, airflow="another"))))
    assert client("VIEWER").get(path).status_code == 403
    assert client("VIEWER").get("/api/pipelines").json()["pipelines"] == []
    found = client("ADMIN").get(path).json()
    assert found["task"] is None and found["actions"] == [] and "the Airflow that does" in found["no_actions"]


def test_a_task_that_has_rendered_another_pipeline_tells_nothing(
    client: Client, seen: Callable[..., None], ran: Callable[..., None]
) -> None:
    ran("run", "success", "stock", task_id="stream")
    seen(status())
    found = client("ADMIN").get(f"/api/pipelines/kafka_default/{NAME}").json()
    assert found["connections"] == {} and found["actions"] == [] and "no record" in found["no_actions"]


def test_who_may_not_trigger_the_dag_does_not_see_of_which_rows_dead_letters_are(
    client: Client, seen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(status(), status("bare", dag_id=""))
    asked: list[bool] = []
    monkeypatch.setattr(app, "settings_of", lambda *_: {"topic_prefix": "p"})
    monkeypatch.setattr(app, "newest", lambda *_, keys: asked.append(keys) or {"letters": [], "complete": True})
    path = "/api/dead_letters/kafka_default/"
    assert client("VIEWER").get(path + NAME).json() == {"letters": [], "complete": True, "keys": False}
    assert client("USER").get(path + NAME).json()["keys"] is True
    # without a DAG, whoever may read the connection may read the topic, too
    assert client("OP").get(path + "7/shop/bare").json()["keys"] is True
    assert client("VIEWER").get(path + "7/shop/bare").status_code == 403
    assert asked == [False, True, True]


def test_who_may_not_read_the_dag_does_not_see_its_pipeline(
    client: Client, seen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    seen(status())
    monkeypatch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: set())
    monkeypatch.setattr(get_auth_manager(), "is_authorized_connection", lambda **_: True)
    assert client("USER").get("/api/pipelines").json()["pipelines"] == []
    assert client("USER").get(f"/api/pipelines/kafka_default/{NAME}").status_code == 403


def test_a_row_has_numbers_and_what_is_wrong_comes_first(client: Client, seen: Callable[..., None]) -> None:
    problem = Problem("throttled", "orders", "The broker throttles it.", "Give it a quota.", time.time() - 600)
    verified = {verified_key(NAME): encode(VerifiedRecord(5, at=time.time() - 60))}
    seen(status("a"), status("z", problems=[problem]), status(), records=verified)
    answer = client("VIEWER").get("/api/pipelines").json()
    assert [each["slot"] for each in answer["pipelines"]] == ["z", "a", "orders"] and answer["wrong"] == 1
    assert "throttles" in answer["pipelines"][0]["wrong"][0]
    row = answer["pipelines"][2]
    assert row["rate"] == pytest.approx(10, rel=0.1) and row["lag_bytes"] == 1_500_000 and row["wal_kept"] == 2e9
    assert row["verified"]["equal"] and row["delay"] == SECONDS[2] and row["task"]["dag_id"] == "orders"


@pytest.fixture
def ran(airflow: None) -> Iterator[Callable[..., None]]:
    """Adds a run of the DAG orders with its task preflight, as Airflow's tables have it."""
    from airflow.models.dagrun import DagRun
    from airflow.models.renderedtifields import RenderedTaskInstanceFields
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session

    def clear() -> None:
        rights._failed = (0.0, [])
        with create_session() as session:
            for table in (RenderedTaskInstanceFields, TaskInstance, DagRun):
                session.execute(delete(table))

    def add(
        run_id: str,
        state: str,
        slot: str,
        *,
        days: float = 0,
        operator: str = PREFLIGHT,
        task_id: str = "preflight",
        fields: dict[str, Any] | None = None,
    ) -> None:
        rights._failed = (0.0, [])
        began = datetime.now(UTC) - timedelta(days=days)
        run = {"dag_id": "orders", "run_id": run_id}
        pipeline = as_values(Description(slot, source=Source("shop_postgres"), kafka=Kafka("shop_kafka")))
        with create_session() as session:
            values = {**run, "run_type": "manual", "run_after": began, "state": state, "clear_number": 0,
                      "log_template_id": None, "created_dag_version_id": None}  # fmt: skip
            session.execute(insert(DagRun).values(values))
            session.execute(
                insert(TaskInstance).values(
                    **run, id=uuid4(), task_id=task_id, map_index=-1, state=state, operator=operator, pool="p",
                    pool_slots=1, end_date=began, executor_config={}, max_tries=0,
                )
            )  # fmt: skip
            session.execute(
                insert(RenderedTaskInstanceFields).values(
                    **run, task_id=task_id, map_index=-1, rendered_fields=fields or {"pipeline": pipeline}
                )
            )

    clear()
    yield add
    clear()


def test_a_pipeline_that_could_not_begin_is_shown_with_the_task_that_failed(
    client: Client, seen: Callable[..., None], ran: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(status())
    ran("first", "failed", "stock")
    answer = client("VIEWER").get("/api/pipelines").json()
    (found,) = answer["unbegun"]
    assert (found["slot"], found["dag_id"], found["run_id"], found["task_id"]) == (
        "stock",
        "orders",
        "first",
        "preflight",
    )
    assert not found["again"] and found["at"] == pytest.approx(time.time(), abs=30)
    assert answer["wrong"] == 1 and len(answer["pipelines"]) == 1
    assert client("VIEWER").get("/api/pipelines?dag_id=orders").json()["unbegun"] == [found]
    assert client("VIEWER").get("/api/pipelines?dag_id=other").json()["unbegun"] == []
    # while its Kafka was never read, nobody knows what has reported to it; another one that is away hides nothing
    seen()
    away = Stub(KafkaLook(away="Kafka has not answered for 9 s."))
    (read,) = kafkas.watches().values()
    monkeypatch.setattr(kafkas, "watches", lambda: {"kafka_default": away, "other": read})
    answer = client("VIEWER").get("/api/pipelines").json()
    assert answer["unbegun"] == [] and not answer["complete"]
    monkeypatch.setattr(kafkas, "watches", lambda: {"kafka_default": read, "other": away})
    assert client("VIEWER").get("/api/pipelines").json()["unbegun"] == [found]
    # a namesake in another Kafka is another pipeline, whoever has started it
    for namesake in (status("stock"), status("stock", dag_id="")):
        other = Stub(KafkaLook(statuses={"7/shop/stock": namesake}, read=1.0))
        monkeypatch.setattr(kafkas, "watches", lambda other=other: {"kafka_default": read, "other": other})
        assert client("VIEWER").get("/api/pipelines").json()["unbegun"] == [found]
    # once a job has reported, its status says what is wrong; so it is with a pipeline of the command
    seen(status("stock"))
    assert client("VIEWER").get("/api/pipelines").json()["unbegun"] == []
    seen(status("stock", dag_id=""))
    assert client("VIEWER").get("/api/pipelines").json()["unbegun"] == []


def test_a_pipeline_that_airflow_cuts_is_known(ran: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps 4,096 characters of a templated field."""
    tables = [f"sales.table_with_a_long_name_{number}" for number in range(300)]
    shop = Pipeline(
        "stock",
        source=Source("shop_postgres", tables=tables),
        kafka=Kafka("shop_kafka", registry="r"),
        spark=Spark("sp"),
    )
    made = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(shop.dag()))
    fields = _serialize_rendered_fields(shop.dag().get_task("stream"))
    assert str(fields["pipeline"]).startswith("Truncated.")
    ran("one", "failed", "stock", fields=fields)
    ((_, found),) = rights.failed()
    assert found == Description(
        "stock", source=Source("shop_postgres"), kafka=Kafka("shop_kafka", registry="r"), spark=Spark("sp")
    )
    monkeypatch.setattr(rights.SerializedDagModel, "get_dag", lambda _: made)
    assert rights.is_of("stock", "stream", shop) and rights.is_of("stock", "preflight", found)
    assert not rights.is_of("stock", "stream", Description("stock")) and not rights.is_of("stock", "none", shop)
    # what an earlier version has left is not taken for a name
    ran("two", "failed", "stock", fields={"pipeline": fields["pipeline"]})
    assert rights.failed() == []


def test_what_a_later_run_has_settled_or_is_about_something_else_is_not_shown(
    client: Client, seen: Callable[..., None], ran: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    def shown() -> list[str]:
        return [each["run_id"] for each in client("VIEWER").get("/api/pipelines").json()["unbegun"]]

    seen(status())
    ran("old", "failed", "stock", days=8)
    assert shown() == []
    ran("of something else", "failed", "stock", operator="BashOperator")
    assert shown() == []
    ran("again", "up_for_retry", "stock")
    assert shown() == ["again"] and client("VIEWER").get("/api/pipelines").json()["unbegun"][0]["again"]
    with monkeypatch.context() as patch:
        patch.setattr(get_auth_manager(), "get_authorized_dag_ids", lambda **_: set())
        assert shown() == []
    ran("new", "running", "stock")
    assert shown() == []


def test_one_pipeline_has_its_tables_and_no_secrets(client: Client, seen: Callable[..., None]) -> None:
    problem = Problem("not-followed", "public.logs", "It has no key.", "Add one.", time.time())
    seen(status(problems=[problem]))
    answer = client("VIEWER").get(f"/api/pipelines/kafka_default/{NAME}")
    found = answer.json()
    assert [each["table"] for each in found["tables"]] == ["public.logs", "public.orders"]
    assert found["tables"][0]["problems"][0]["remedy"] == "Add one."
    assert found["tables"][1]["rows"] == {"insert": 110}
    assert "/secret/folder" not in answer.text and "k:9092" not in answer.text


def test_what_a_job_found_that_was_stopped_is_not_shown_as_the_present(
    client: Client, seen: Callable[..., None]
) -> None:
    problem = Problem("not-followed", "public.logs", "It has no key.", "Add one.", time.time())
    for state, shown in (("streaming", 1), ("finished", 1), ("stopped", 0), ("failed", 0)):
        seen(status(state=state, problems=[problem], pressure={"wal": 0.9}))
        found = client("VIEWER").get(f"/api/pipelines/kafka_default/{NAME}").json()
        assert len(found["problems"]) == shown, state
        assert len([each for each in found["tables"] if "problems" in each]) == shown, state
        assert found["pressure"] == ({"wal": 0.9} if state == "streaming" else {}), state


def test_a_kafka_that_is_away_is_said_and_what_was_known_is_shown(client: Client, seen: Callable[..., None]) -> None:
    seen(status(), away="Kafka has not answered for 9 s.")
    answer = client("VIEWER").get("/api/pipelines").json()
    assert answer["away"] == {"kafka_default": "Kafka has not answered for 9 s."} and len(answer["pipelines"]) == 1
    seen(away="Kafka has not answered for 9 s.")
    assert client("OP").get(f"/api/pipelines/kafka_default/{NAME}").status_code == 503
    assert client("OP").get("/api/pipelines").json()["away"]


def test_who_sees_no_pipeline_of_a_kafka_and_may_not_read_its_connection_learns_nothing_of_it(
    client: Client, seen: Callable[..., None]
) -> None:
    for away in ("", "Kafka (kafka_default, k:9092) has not answered for 9 s."):
        seen(status("bare", dag_id=""), away=away)
        assert client("VIEWER").get("/api/pipelines").json()["away"] == {}
        answers = [
            client("VIEWER").get(f"/api/{what}/{of}")
            for what in ("pipelines", "history", "dead_letters")
            for of in ("kafka_default/7/shop/bare", f"kafka_default/{NAME}", f"no_connection/{NAME}")
        ]
        assert {(each.status_code, each.text) for each in answers} == {(403, answers[0].text)}
    assert client("OP").get(f"/api/pipelines/no_connection/{NAME}").status_code == 404


def test_a_kafka_that_never_answers_is_said_within_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        watch = KafkaWatch.of("silent", {"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        wait = watch._read.wait
        monkeypatch.setattr(watch._read, "wait", lambda seconds: waited.append(seconds) or wait(seconds))
        assert "'silent') has not answered for" in watch.look().away
        assert watch.look().away
    assert waited[0] < 2 and waited[1] == 0


def test_a_connection_that_is_refused_hides_no_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a Kafka may be a consumer's, without rights on what pipelines report."""
    opened, closed = list[str](), list[str]()

    class Refusing:
        def __init__(self, kafka: dict[str, str]) -> None:
            self.user = kafka["sasl.username"]
            opened.append(self.user)

        def read(self) -> dict[str, Any]:
            if self.user == "consumer":
                raise Refused("Kafka denies every access to topic '_bottledwater'.")
            return {}

        def close(self) -> None:
            closed.append(self.user)

    monkeypatch.setattr(watch, "Pipelines", Refusing)
    monkeypatch.setattr(watch, "_INTERVAL", 0.01)
    of = [{"bootstrap.servers": "k:1", "sasl.username": user} for user in ("consumer", "cdc")]
    several = KafkaWatch.of("consumer", *of)
    until(lambda: several.look().read and not several.look().away, "the other connection reads")
    assert (opened, closed, several.kafka) == (["consumer", "cdc"], ["consumer"], of[1])
    alone = KafkaWatch.of("consumer", of[0])
    assert "denies every access" in alone.look().away
    monkeypatch.setattr(watch, "_IDLE", 0.0)
    for each in (several, alone):
        each._thread.join(10)
    assert opened == ["consumer", "cdc", "consumer"]


def test_three_hundred_pipelines_take_no_more_queries_of_airflow_than_three(
    client: Client, seen: Callable[..., None]
) -> None:
    from airflow import settings

    queries: list[str] = []

    def count(*arguments: Any) -> None:
        queries.append(arguments[2])

    def listed(pipelines: int) -> int:
        seen(*(replace(status(), slot=f"s{i}") for i in range(pipelines)))
        queries.clear()
        # how often connections are looked up is a matter of time, not of the number of pipelines
        kafkas._found = (0.0, {})
        assert len(client("VIEWER").get("/api/pipelines").json()["pipelines"]) == pipelines
        return len(queries)

    listed(1)
    event.listen(settings.engine, "before_cursor_execute", count)
    try:
        assert 0 < listed(3) == listed(300)
    finally:
        event.remove(settings.engine, "before_cursor_execute", count)


def test_connections_of_one_kafka_are_one(
    airflow: None, connect: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaWatch, "of", lambda *_: None)
    connect("kafka_default", conn_type="kafka", extra={"bootstrap.servers": "k:1", "sasl.password": "x"})
    connect("same", conn_type="kafka", extra={"bootstrap.servers": "k:1"})
    connect("other", conn_type="kafka", extra={"bootstrap.servers": "k:2"})
    connect("none", conn_type="http", host="k")
    kafkas._found = (0.0, {})
    try:
        assert list(kafkas.watches()) == ["kafka_default", "other"]
        # a link leads to the page by the id that the task's pipeline has
        assert [kafkas.listed_as(each) for each in ("kafka_default", "same", "other", "none")] == [
            "kafka_default", "kafka_default", "other", "none",
        ]  # fmt: skip
    finally:
        kafkas._found = (0.0, {})


def test_the_kafkas_of_teams_are_found(
    client: Client, connect: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.models.connection import Connection
    from airflow.models.team import Team
    from airflow.utils.session import create_session

    def extra(port: int) -> str:
        return json.dumps({"bootstrap.servers": f"k:{port}"})

    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    monkeypatch.setattr(kafkas, "_KEPT", 0.0)
    monkeypatch.setattr(kafkas, "_found", (0.0, {}))
    monkeypatch.setattr(KafkaWatch, "of", lambda conn_id, *_: Stub(KafkaLook(read=1.0)))
    connect("kafka_default", conn_type="kafka", extra=json.loads(extra(1)))
    connect("_sales_team___of_sales", conn_type="kafka", extra=json.loads(extra(2)))
    connect("_nobody___of_nobody", conn_type="kafka", extra=json.loads(extra(3)))
    with create_session() as session:
        session.add(Team(name="Sales_Team"))
        session.flush()
        session.add(Connection("stored", "kafka", extra=extra(4), team_name="Sales_Team"))
        session.add(Connection("for_all", "kafka", extra=extra(5)))
    try:
        assert list(kafkas.watches()) == ["kafka_default", "for_all", "of_sales", "stored"]
        assert [kafkas.team_of(each) for each in ("kafka_default", "for_all", "of_sales", "stored")] == [
            None, None, "Sales_Team", "Sales_Team",
        ]  # fmt: skip
        answer = client("OP").get("/api/pipelines").json()
        assert answer["kafkas"] == 4 and answer["complete"]
        # who may read it is asked of its team
        asked: list[Any] = []
        manager = SimpleNamespace(is_authorized_connection=lambda details, **_: asked.append(details.team_name))
        monkeypatch.setattr(rights, "get_auth_manager", lambda: manager)
        for each in ("of_sales", "stored", "for_all"):
            rights.Rights(None).may_read(each)
        assert asked == ["Sales_Team", "Sales_Team", None]
        # what Airflow's database has, and cannot be read, is said
        found = kafkas._properties
        monkeypatch.setattr(kafkas, "_properties", lambda *of: None if of[0] in ("stored", "of_sales") else found(*of))
        assert list(kafkas.watches()) == ["kafka_default", "for_all"] and kafkas.missing() == ["stored"]
    finally:
        with create_session() as session:
            session.execute(delete(Connection))
            session.execute(delete(Team))


def test_a_secrets_backend_that_is_away_hides_no_kafka(
    client: Client, connect: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow says of its connections that they are not defined."""
    connect("kafka_default", conn_type="kafka", extra={"bootstrap.servers": "k:1"})
    connect("hidden", conn_type="kafka", extra={"bootstrap.servers": "k:2"})
    monkeypatch.setattr(kafkas, "_KEPT", 0.0)
    monkeypatch.setattr(kafkas, "_found", (0.0, {}))
    monkeypatch.setattr(KafkaWatch, "of", lambda conn_id, *_: Stub(KafkaLook(read=1.0)))
    set_to = {"kafka_conn_ids": "hidden, mistyped", "backend": "a.Vault"}
    asked = SimpleNamespace(get=lambda _, key, fallback: set_to.get(key, fallback), getboolean=lambda *_, **__: False)
    monkeypatch.setattr(kafkas, "conf", asked)
    answer = client("OP").get("/api/pipelines").json()
    assert answer["kafkas"] == 2 and list(answer["away"]) == ["mistyped"] and not answer["complete"]
    answer = client("VIEWER").get("/api/pipelines").json()
    assert not answer["away"] and not answer["complete"]
    found = kafkas._properties
    monkeypatch.setattr(kafkas, "_properties", lambda *of: None if of[0] == "hidden" else found(*of))
    assert client("OP").get("/api/pipelines").json()["kafkas"] == 2
    # without a backend, what is not found was deleted
    del set_to["backend"]
    answer = client("OP").get("/api/pipelines").json()
    assert answer["kafkas"] == 1 and list(answer["away"]) == ["hidden", "mistyped"]


def test_the_page_of_a_pipeline_is_found_by_each_connection_to_its_kafka(
    client: Client, seen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(status())
    monkeypatch.setattr(kafkas, "_connections", lambda: {"same": ("kafka_default", {})})
    assert client("VIEWER").get(f"/api/pipelines/same/{NAME}").json()["name"] == NAME


def test_the_plugin_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from airflow_bottledwater.plugin import BottledWaterPlugin; "
        "print([m for m in ('confluent_kafka', 'psycopg', 'numba', 'fastapi.staticfiles') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout.replace("'", '"')) in ([], ["fastapi.staticfiles"])


def test_the_page_is_in_four_places_of_airflow() -> None:
    assert [each["destination"] for each in BottledWaterPlugin.react_apps] == [
        "nav", "dag", "task_instance", "dashboard",
    ]  # fmt: skip
    assert len({each["url_route"] for each in BottledWaterPlugin.react_apps}) == 4
    assert all(each["bundle_url"].startswith(PREFIX) for each in BottledWaterPlugin.react_apps)
    for each in BottledWaterPlugin.react_apps:
        for name in ("bundle_url", "icon", "icon_dark_mode"):
            assert (page.FOLDER / "built" / each[name].rpartition("/")[2]).exists(), each[name]


def test_the_built_page_is_that_of_the_sources() -> None:
    assert page.RECORD.read_text().strip() == page.sources(), "run make page"
    built = (page.FOLDER / "built" / "main.umd.cjs").read_text()
    assert len(built) < 120_000 and "AirflowPlugin" in built
    # nothing is loaded from elsewhere
    assert set(re.findall(r"https?://([\w.-]+)", built)) <= {"www.w3.org"}


def test_a_user_without_a_token_gets_the_page_but_no_data(client: Client) -> None:
    assert client("").get("/static/main.umd.cjs").headers["content-type"].startswith("application/javascript")


# ------------------------------------------------------------------ buttons
@pytest.fixture
def pressed(
    client: Client, seen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """The buttons of a pipeline by their ids, with DAGs that there are (and whether each is paused)."""

    def buttons(
        role: str,
        *,
        dags: dict[str, bool] | None = None,
        records: dict[str, Any] | None = None,
        full: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        found = {"bottledwater_control": False, "bottledwater_verify": False} if dags is None else dags
        described = Description("orders", source=Source("shop_postgres"), kafka=Kafka("shop_kafka"))
        monkeypatch.setattr(rights, "described", lambda task, slot: described if task else None)
        monkeypatch.setattr(rights, "dags", lambda ids: {each: found[each] for each in ids if each in found})
        monkeypatch.setattr(rights, "conf_of", lambda task: {"tables": ["orders"]})
        monkeypatch.setattr(rights, "full", lambda dag_id: full and dag_id == "orders")
        seen(status(**more), records=records)
        answer = client(role).get(f"/api/pipelines/kafka_default/{NAME}").json()
        told = [answer["error"], *answer["wrong"], *(each["remedy"] for each in answer["problems"])]
        told += [each["remedy"] for table in answer["tables"] for each in table.get("problems", ())]
        return {"": answer["no_actions"], "told": told, **{each["id"]: each for each in answer["actions"]}}

    return buttons


def test_a_button_says_what_it_does_and_triggers_a_dag(pressed: Pressed) -> None:
    found = pressed("USER")
    assert set(found) - {"", "told"} == {"stop", "retire", "drop_slot", "start", "snapshot", "pause_table", "verify"}
    assert not found[""]
    stop = found["stop"]
    assert stop["dag_id"] == "bottledwater_control" and "PostgreSQL keeps its WAL (now 2.0 GB)" in stop["says"]
    assert stop["conf"] == {
        "action": "stop", "snapshot_id": "", "slot": "orders", "postgres_conn_id": "shop_postgres",
        "kafka_conn_id": "shop_kafka", "schema_registry_conn_id": "schema_registry_default",
    }  # fmt: skip
    assert found["start"]["impossible"] == "It runs." and not stop["impossible"]
    assert found["verify"]["conf"]["spark_conn_id"] == "spark_default"


def test_what_was_stopped_is_started_as_it_was(pressed: Pressed) -> None:
    found = pressed("USER", state="stopped", stopped_by="request", counters={"open_dead_letters": 3})
    assert "stop" not in found and not found["start"]["impossible"] and not found["redrive"]["impossible"]
    assert found["start"]["conf"]["dag_id"] == "orders" and found["start"]["conf"]["conf"] == {"tables": ["orders"]}
    assert pressed("USER", counters={"open_dead_letters": 3})["redrive"]["impossible"]


def test_a_dag_that_is_paused_is_not_started(pressed: Pressed) -> None:
    dags = {"bottledwater_control": False, "orders": True}
    found = pressed("USER", state="stopped", dags=dags)
    assert found["start"]["impossible"] == "The DAG orders is paused: unpause it first."
    assert not found["drop_slot"]["impossible"]
    assert not pressed("USER", state="stopped", dags={**dags, "orders": False})["start"]["impossible"]


@pytest.mark.parametrize(
    ("control", "started"),
    [
        (Pipeline("shop").control_dag(), "shop"),
        (Pipeline("shop").control_dag(starts="nightly"), "nightly"),
        (Pipeline("shop").control_dag(starts="{{ params.dag_id }}"), "orders"),
        (None, "orders"),
    ],
)
def test_the_dag_is_named_that_is_started(
    pressed: Pressed, monkeypatch: pytest.MonkeyPatch, control: Any, started: str
) -> None:
    """The last job may be one of a DAG for bounded runs, and the pipeline's own control DAG starts another one."""
    stored = control and DagSerialization.deserialize_dag(DagSerialization.serialize_dag(control))
    monkeypatch.setattr(rights.SerializedDagModel, "get_dag", lambda _: stored)
    dags = {"bottledwater_control": False, started: True}
    start = pressed("USER", state="finished", dags=dags)["start"]
    assert f"the DAG {started} is triggered" in start["says"]
    assert ("as it was last time" in start["says"]) == (started == "orders")
    assert start["impossible"] == f"The DAG {started} is paused: unpause it first."


def test_a_pipeline_is_not_started_again_beside_a_run_that_goes_on_or_waits(pressed: Pressed) -> None:
    """It would wait behind that one, perhaps for as long as a stream runs, and begin when that is stopped."""
    full = "As many runs of the DAG orders go on, or wait, as it may have at a time."
    for state in ("stopped", "failed"):
        assert pressed("USER", state=state, full=True)["start"]["impossible"].startswith(full)
        assert not pressed("USER", state=state)["start"]["impossible"]
    assert pressed("USER", full=True)["start"]["impossible"] == "It runs."


def test_a_dag_is_full_with_as_many_runs_as_it_may_have(airflow: None, ran: Callable[..., None]) -> None:
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    with create_session() as session:
        session.merge(DagModel(dag_id="orders", bundle_name="dags", fileloc="x", max_active_runs=2))
    ran("one", "running", "orders")
    ran("over", "success", "orders")
    assert not rights.full("orders") and not rights.full("another")
    ran("waits", "queued", "orders")
    assert rights.full("orders")


@pytest.mark.parametrize(
    ("remedy", "said"),
    [
        (
            "Let it go on (bottledwater resume-table --tables public.b): then its rows are read again.",
            "Let it go on (the button 'Go on with tables'): then its rows are read again.",
        ),
        (
            "Then stop the stream and run 'bottledwater redrive', or give them up with 'bottledwater dismiss'.",
            "Then stop the stream and press 'Re-drive', or give them up with the button 'Dismiss dead letters'.",
        ),
        (
            "Drop the slot (bottledwater drop-slot --when always) and start again.",
            "Drop the slot (the button 'Drop the slot') and start again.",
        ),
        ("Run bottledwater verify.", "Press 'Verify'."),
        # what a button cannot do, or has another option for
        ("Then: bottledwater snapshot --tables public.b --sweep", ""),
        ("Accept them: bottledwater accept-new-keys --tables public.b.", ""),
        ("See 'bottledwater status', or the DAG bottledwater_control.", ""),
    ],
)  # fmt: skip
def test_what_is_to_be_done_is_said_by_the_buttons(pressed: Pressed, remedy: str, said: str) -> None:
    problems = [Problem("set-aside", "public.b", "It has a change.", remedy), Problem(NOT_FOLLOWED, "c", "No.", remedy)]
    of = {"problems": problems, "counters": {"open_dead_letters": 3}, "error": remedy}
    told = pressed("USER", **of)["told"]
    assert told.count(said or remedy) == 4 and (not said or not any(remedy in each for each in told))
    # and by the commands where there are no buttons
    assert remedy in pressed("USER", dags={}, **of)["told"]


def test_the_slot_is_dropped_by_a_button_once_no_job_runs(pressed: Pressed) -> None:
    found = pressed("USER")
    assert "retire the pipeline, which drops the slot" in found["drop_slot"]["impossible"]
    assert "nothing drops the slot then" not in found["retire"]["says"]
    found = pressed("USER", state="failed", permanent=True, error="The slot is lost.")
    drop = found["drop_slot"]
    assert not drop["impossible"] and drop["danger"] and drop["conf"]["action"] == "drop_slot"
    assert "(now 2.0 GB). Changes that are not yet published (1.5 MB of WAL) are lost" in drop["says"]
    # its DAG's run may be over, and with it the teardown
    assert "nothing drops the slot then: use 'Drop the slot'." in found["retire"]["says"]
    # and so it is for one that is retired and whose slot was kept
    found = pressed("USER", state="stopped", retired=True)
    assert "retire" not in found and not found["drop_slot"]["impossible"]


def test_the_buttons_of_a_live_snapshot_name_its_tables(pressed: Pressed) -> None:
    def asked(*tables: str, paused: bool = False) -> dict[str, Any]:
        return encode(SnapshotRequest(tables, paused=paused))

    one, other = "abcdef0123", "987654abcd"
    records = {snapshots_prefix(NAME) + one: asked("public.a"), snapshots_prefix(NAME) + other: asked("b", paused=True)}
    found = pressed("USER", records=records)
    assert found[f"pause:{one}"]["label"] == "Pause reading public.a again"
    assert "waits until it is told to go on" in found[f"pause:{one}"]["says"]
    assert found[f"resume:{other}"]["label"] == "Go on with reading b again"
    assert found[f"cancel:{other}"]["label"] == "Cancel reading b again"
    records[snapshots_prefix(NAME) + other] = asked("public.a")
    assert pressed("USER", records=records)[f"cancel:{other}"]["label"] == "Cancel reading public.a again (987654)"


def test_a_table_that_is_held_can_be_let_go_on(pressed: Pressed) -> None:
    problems = [Problem("paused", "public.a", "It was paused."), Problem("set-aside", "public.b", "It has a change.")]
    found = pressed("USER", problems=[*problems, Problem("not-followed", "public.c", "It is not.")])["resume_table"]
    assert found["tables"] and found["conf"]["action"] == "resume_table"
    assert found["says"].startswith("public.a, public.b: paused, or set aside")


def test_who_may_not_trigger_the_dag_sees_why_and_no_conf(pressed: Pressed) -> None:
    found = pressed("VIEWER")
    assert found["stop"]["impossible"] == found[""] == "You may not trigger the DAG bottledwater_control."
    assert found["stop"]["conf"] == {} and found["verify"]["conf"] == {}


def test_without_a_dag_that_can_do_it_there_is_no_button(pressed: Pressed) -> None:
    assert "copy it to your DAGs" in pressed("USER", dags={})[""]
    assert "is paused" in pressed("USER", dags={"bottledwater_control": True})["stop"]["impossible"]
    assert "the command bottledwater" in pressed("OP", dag_id="")[""]


def test_the_control_dag_of_another_pipeline_of_this_name_is_left_alone(
    pressed: Pressed, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"orders_control": False, "bottledwater_control": False}
    monkeypatch.setattr(rights, "is_of", lambda *_: True)
    assert pressed("USER", dags=both)["stop"]["dag_id"] == "orders_control"
    monkeypatch.setattr(rights, "is_of", lambda *_: False)
    assert pressed("USER", dags=both)["stop"]["dag_id"] == "bottledwater_control"
