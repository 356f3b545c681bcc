"""What a pipeline was told once, and relies on, is changed under it: while no job runs, and while one does. It goes on,
and topic and table are equal; or it is red for whoever asks, and says what is no longer as it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.jobs import health, pipelines
from airflow_bottledwater.jobs.pipelines import HealthLimits
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.publish import session
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.problems import GRACE
from airflow_bottledwater.triggers import stream_error
from tests.support.topics import Flow, MakeFlow, alter, alter_topic, create_topic, limit_topic
from tests.support.waiting import until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """One that forgets what nobody else's may."""
    with KafkaBroker(tmp_path_factory.mktemp("forgetting")) as server:
        yield server


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return ("CREATE TABLE a (id int PRIMARY KEY, t text)", "INSERT INTO a VALUES (1, 'x')")


def _service(flow: Flow, kind: str) -> str:
    return f"{flow.pipeline.topic_prefix}._bottledwater_{kind}"


def _state(flow: Flow) -> str:
    return store.state_topic_name(flow.cluster.database, flow.pipeline.slot)


def _delete(flow: Flow, topic: str) -> None:
    admin = AdminClient(flow.pipeline.kafka)
    for future in admin.delete_topics([topic]).values():
        future.result()
    until(lambda: topic not in Topics(flow.pipeline.kafka).names(), "the topic is gone")


def _make_again(flow: Flow, topic: str, config: Mapping[str, str] | None = None) -> None:
    _delete(flow, topic)
    config = config or {"cleanup.policy": "compact"}
    create_topic(flow.pipeline.kafka, topic, partitions=1, replication=1, config=config)


def _more_partitions(flow: Flow, topic: str) -> None:
    admin, before = AdminClient(flow.pipeline.kafka), Topics(flow.pipeline.kafka).describe([topic])[topic].partitions
    for future in admin.create_partitions([NewPartitions(topic, before + 2)]).values():
        future.result()


def _without_slot(flow: Flow, then: str = "SELECT 1") -> None:
    slot = flow.pipeline.slot
    ended = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}' AND active"

    def dropped() -> bool:
        flow.execute(ended)
        try:
            flow.execute(f"SELECT pg_drop_replication_slot('{slot}')", then)
        except Exception:
            return False
        return True

    until(dropped, "the slot is dropped", pause=0.01)


def _publication(flow: Flow, what: str) -> None:
    flow.execute(f"{what.partition(' ')[0]} PUBLICATION {flow.pipeline.publication_name} {what.partition(' ')[2]}")


@dataclass(frozen=True)
class Change:
    """What is not as it was.

    :param said: what is said of it; empty if the pipeline goes on.
    :param running: the same while a job runs, if that is something else.
    """

    name: str
    make: Callable[[Flow], Any]
    said: str = ""
    running: str = ""


_GONE = "does not exist any more"
_FORGETS = {"cleanup_policy": "delete", "retention_ms": "600000"}
_EXPIRES = {name.replace("_", "."): value for name, value in _FORGETS.items()}
CHANGES = (
    Change("the topic is gone", lambda f: _delete(f, f.topic("a")), _GONE),
    Change("the topic is a new one", lambda f: _make_again(f, f.topic("a")), "deleted and made again"),
    Change("the topic has more partitions", lambda f: _more_partitions(f, f.topic("a")), "has 3 partitions, it had 1"),
    Change("the topic forgets", lambda f: alter_topic(f, "a", **_FORGETS), "cleanup.policy=delete"),
    Change("the topic takes little", lambda f: limit_topic(f, f.topic("a"), 100), r"max\.message\.bytes is 100"),
    Change(
        "the state is gone",
        lambda f: _delete(f, _state(f)),
        "does not know slot",
        running=rf"State topic '[^']+' {_GONE}\.[^']+#state-topics-and-lost-state",
    ),
    Change("the state is empty", lambda f: _make_again(f, _state(f)), "does not know slot|its records"),
    Change("the state forgets", lambda f: alter(f, _state(f), _EXPIRES), "cleanup.policy=delete.*written once"),
    Change("the topic of events forgets", lambda f: alter(f, _service(f, "events"), _EXPIRES), "event of a TRUNCATE"),
    Change("the state has more partitions", lambda f: _more_partitions(f, _state(f))),
    Change("the topic of events is gone", lambda f: _delete(f, _service(f, "events")), _GONE),
    Change(
        "the topic of events is a new one",
        lambda f: _make_again(f, _service(f, "events"), {"cleanup.policy": "delete", "retention.ms": "-1"}),
        # a start takes the topic as it is
        running="events of truncations that it held are gone",
    ),
    Change(
        "the topic of events is gone, and a table is new",
        lambda f: (_delete(f, _service(f, "events")), f.execute("CREATE TABLE c (id int PRIMARY KEY)")),
        rf"{_GONE}.*truncated",
    ),
    Change("the topic of dead letters is gone", lambda f: _delete(f, _service(f, "dead_letters")), _GONE),
    Change("the slot is gone", _without_slot, _GONE),
    Change(
        "the slot is a new one",
        lambda f: _without_slot(f, f"SELECT pg_create_logical_replication_slot('{f.pipeline.slot}', 'pgoutput')"),
        "ahead of what was published",
    ),
    Change(
        "the publication is gone",
        lambda f: _publication(f, "DROP"),
        # a start makes it again, and the rows are read again
        running=r"Publication '\w+' does not exist",
    ),
    Change("the publication lacks the table", lambda f: _publication(f, "ALTER DROP TABLE a")),
    Change(
        "the publication lacks updates",
        lambda f: _publication(f, "ALTER SET (publish = 'insert')"),
        "published without update",
    ),
    Change("the table has another name", lambda f: f.execute("ALTER TABLE a RENAME TO b")),
    Change("the shared topic is gone", lambda f: _delete(f, store.CONTROL_TOPIC)),
    Change("the shared topic is a new one", lambda f: _make_again(f, store.CONTROL_TOPIC)),
    Change("the shared topic has more partitions", lambda f: _more_partitions(f, store.CONTROL_TOPIC)),
)


@pytest.mark.some(3)
@pytest.mark.parametrize("running", [False, pytest.param(True, marks=pytest.mark.long)], ids=["stopped", "running"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.name)
def test_what_is_no_longer_as_it_was_is_noticed(
    make_flow: MakeFlow, broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch, change: Change, running: bool
) -> None:
    monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.5)
    flow = make_flow(broker=broker, outage_timeout=4.0)
    flow.create()
    flow.snapshot()
    flow.stream()
    errors: list[BaseException] = []
    said = (running and change.running) or change.said
    if running:
        with flow.streaming() as errors:
            flow.streams()
            _changed(flow, change)
            if said:
                # at first, it may only be seen that nothing moves
                until(lambda: re.search(said, _text(errors, *_watchers(flow))), "it is said", seconds=180, pause=0.5)
            else:
                # at first, a job that nobody sees may be one that never was
                until(
                    lambda: _equal(flow) and not any(_watchers(flow)),
                    "it goes on",
                    failed=errors,
                    seconds=120,
                    pause=0.5,
                )
            told = _agreed(flow)
    else:
        _changed(flow, change)
        try:
            flow.stream()
        except BottledWaterError as error:
            errors = [error]
        told = _agreed(flow)
    if said:
        assert re.search(said, _text(errors, told))
        # what fails before it has claimed the slot tells its own task, or the command
        assert told or not running
    else:
        assert not errors and not told and _equal(flow)


def _text(errors: Sequence[BaseException], *told: str) -> str:
    return " ".join([*map(str, errors), *told])


def _changed(flow: Flow, change: Change) -> None:
    change.make(flow)
    (name,) = flow.execute("SELECT relname FROM pg_class WHERE relname IN ('a', 'b')")[0]
    flow.execute(f"INSERT INTO {name} VALUES (2, '{'y' * 200}')", f"UPDATE {name} SET t = 'z' WHERE id = 1")


def _equal(flow: Flow) -> bool:
    """Whether a reader of the topic has what the table has."""
    try:
        rows = {message.key["id"]: message.value for message in flow.read("a")}
    except Exception:
        return False
    (name,) = flow.execute("SELECT relname FROM pg_class WHERE relname IN ('a', 'b')")[0]
    return {key: value["t"] for key, value in rows.items()} == dict(flow.execute(f"SELECT id, t FROM {name}"))


def _agreed(flow: Flow) -> str:
    """What those who watch say, who all have to see the same."""

    def agree() -> tuple[str, str, str] | None:
        found = _watchers(flow)
        return found if len({bool(each) for each in found}) == 1 else None

    return " ".join(until(agree, "they agree")).strip()


def _watchers(flow: Flow) -> tuple[str, str, str]:
    """What is wrong by ``status --check``, by the sensor, and by the DAG of the health: of what lasts."""
    try:
        found, status = health.look(flow.pipeline, timeout=20)
        records = control_topic.read(flow.pipeline.kafka)
    except BottledWaterError as error:
        return (str(error),) * 3  # whoever asks fails
    if status is None:
        return ("No job has ever reported.",) * 3
    limits = HealthLimits(silence=0.0, pause=None)
    if status.state == "finished":
        # a bounded run: nothing has to run, and only what it has left is wrong
        wrong = " ".join(pipelines.wrong(flow.name, status, records, limits, alive=True))
        return wrong, wrong, wrong
    now, status = time.time() + GRACE, replace(status, at=status.at + GRACE)
    check = health.problem(found, status, max_lag=None, max_age=None, now=now)
    longest = 0.0 if status.ended else 9.0
    event = stream_error.evaluate(status, silent=0.0, longest=longest, earlier="", max_dead_letters=0) or {}
    wrong = " ".join(
        [
            *pipelines.wrong(flow.name, status, records, limits, alive=True, now=now),
            *pipelines.wrong_slot(found, status, limits),
        ]
    )
    return check, str(event.get("message", "")), wrong
