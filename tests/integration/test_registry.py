"""A registry that is read-only, that changes its mind, that was emptied, or is another one under the same URL: at the
start and while a stream runs. Its own answers are real; those that Apicurio has not are a front's."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from random import Random
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from airflow_bottledwater import backoff
from airflow_bottledwater.errors import Outage, PreflightError, RecordError, Refused
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision import pausing, preflight
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.provision.redrive import redrive
from airflow_bottledwater.state import schemas, store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.stream import relations
from airflow_bottledwater.verify import driver
from tests.integration.test_evolution import records, says
from tests.support.registry_front import RegistryFront, fronted, read_only
from tests.support.scan import scan
from tests.support.topics import Flow, MakeFlow, limit_records
from tests.support.waiting import until


@pytest.fixture
def front(registry: SchemaRegistry) -> Iterator[RegistryFront]:
    with fronted(registry) as found:
        yield found


@pytest.fixture(autouse=True)
def asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the registry does not know is asked for again at once, and not for ten seconds."""
    monkeypatch.setattr(schemas, "_AGAIN", (0.1,))


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE t (id int PRIMARY KEY, n numeric(10,2), d date)",
        "INSERT INTO t VALUES (1, 12.34, '2000-01-01')",
    )


def followed(make_flow: MakeFlow, registry: Any, **settings: Any) -> Flow:
    """A pipeline whose first row is published."""
    flow = make_flow(registry, **settings)
    flow.create()
    flow.snapshot()
    return flow


def level(flow: Flow, level: str) -> None:
    """Set the level of compatibility of the table's rows."""
    assert flow.registry is not None
    client = SchemaRegistryClient({"url": flow.registry.url})
    client.set_compatibility(f"{flow.topic('t')}-value", level=level)


def state_of(flow: Flow) -> PipelineState:
    """What the pipeline remembers."""
    return read_state(flow.pipeline, store.state_topic_name(flow.cluster.database, flow.pipeline.slot))


def everything(flow: Flow) -> list[Any]:
    """The records of the table's topic."""
    return list(scan(flow.pipeline.kafka, flow.topic("t"), Topics(flow.pipeline.kafka).ends(flow.topic("t"), 1)))


def readable(flow: Flow) -> set[int]:
    """The rows whose latest records a consumer can read, as the registry is now. Records that are overwritten do not
    count."""
    registry, latest, found = Registry(flow.pipeline.registry), dict[bytes, bytes | None](), set[int]()
    for message in everything(flow):
        latest[message.key()] = message.value()
    for value in latest.values():
        if value is not None and (text := registry.schema(int.from_bytes(value[1:5], "big"))) is not None:
            row = fastavro.schemaless_reader(io.BytesIO(value[5:]), json.loads(text), None)
            assert isinstance(row, dict)
            found.add(row["id"])
    return found


# ---------------------------------------------------------------------- what it says of a schema, and of itself
@pytest.mark.long
def test_a_registry_that_is_read_only_is_waited_for_and_no_row_is_a_dead_letter(
    make_flow: MakeFlow, front: RegistryFront
) -> None:
    flow = followed(make_flow, front, on_error="log")
    front.answer = read_only
    flow.execute(
        "INSERT INTO t VALUES (2, 1, NULL)", "ALTER TABLE t ADD x text", "INSERT INTO t VALUES (3, 1, NULL, 'x')"
    )
    with flow.streaming() as errors:
        until(
            lambda: sum(method == "POST" and path.endswith("/versions") for method, path in front.asked) > 4, "it asks"
        )
        assert not errors
        assert 3 not in records(flow)
        front.answer = lambda method, path: None
        until(lambda: 3 in records(flow), "the row is published", failed=errors)
    assert flow.dead_letters() == []
    assert says(flow, 3, {"x": "x"})


@pytest.mark.long
def test_under_exit_it_is_an_outage_that_ends_with_its_time(make_flow: MakeFlow, front: RegistryFront) -> None:
    flow = followed(make_flow, front, outage_timeout=0.5)
    front.answer = read_only
    flow.execute("ALTER TABLE t ADD x text", "INSERT INTO t VALUES (3, 1, NULL, 'x')")
    with pytest.raises(Outage, match=r"takes no schema for subject .*: Subject is in read-only mode.*READWRITE"):
        flow.stream()
    # what is registered already needs nothing of it
    front.answer = lambda method, path: None
    flow.stream()
    front.answer = read_only
    flow.execute("INSERT INTO t VALUES (4, 1, NULL, 'x')")
    flow.stream()
    assert set(records(flow)) == {1, 3, 4}


def test_a_registry_that_denies_access_ends_the_stream_and_no_table_is_set_aside(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "ROTATION", 0.5)
    flow = followed(make_flow, front)
    flow.execute("ALTER TABLE t ADD x text", "INSERT INTO t VALUES (3, 1, NULL, 'x')")
    front.answer = lambda method, path: (403, 40301, "User may not register") if path.endswith("/versions") else None
    with pytest.raises(Refused, match=r"denies access \(asked about '.*t-value'\): User may not .*Grant the user"):
        flow.stream()
    front.answer = lambda method, path: (401, 40101, "Unauthorized")
    with pytest.raises(Outage, match=r"denies access.*had worked with these credentials"):
        flow.stream()
    front.answer = lambda method, path: None
    flow.stream()
    assert says(flow, 3, {"x": "x"}) and len(everything(flow)) == 2


def test_a_refused_schema_is_asked_for_again_while_the_stream_runs(
    make_flow: MakeFlow, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relations, "_ASK_AGAIN", 0.2)
    flow = followed(make_flow, registry, on_error="log")
    with flow.streaming() as errors:
        flow.execute("ALTER TABLE t ALTER n TYPE bool USING true", "INSERT INTO t VALUES (2, true, NULL)")
        until(lambda: len(flow.dead_letters()) == 1, "the dead letter", failed=errors)
        # whoever starts the stream again is not kept from it
        assert any("refuses the schema" in each for each in preflight.run(flow.pipeline).warnings)
        with pytest.raises(PreflightError, match="refuses the schema"):
            preflight.run(flow.pipeline.with_(on_error="exit"))
        level(flow, "NONE")
        until(
            lambda: (
                flow.execute("INSERT INTO t SELECT max(id) + 1, true FROM t RETURNING id") and len(records(flow)) > 1
            ),
            "a row is published again",
            failed=errors,
            pause=0.3,
        )
    assert not errors
    flow.stream()
    assert len(records(flow)) + len(flow.dead_letters()) == flow.execute("SELECT count(*) FROM t")[0][0]


# ---------------------------------------------------------------------- what it accepts, and readers misread
@pytest.mark.long
@pytest.mark.parametrize(
    ("alter", "told"),
    [
        ("n TYPE numeric(12,4)", r"n \(decimal with 4 digits behind the point\) as decimal with 2 digits"),
        ("d TYPE timestamp", r"d \(date\) as local-timestamp-micros"),
    ],
)
def test_a_change_that_readers_would_misread_is_refused_and_its_ways_out_work(
    make_flow: MakeFlow, registry: SchemaRegistry, alter: str, told: str
) -> None:
    flow = followed(make_flow, registry)
    column = alter[0]
    flow.execute(f"ALTER TABLE t ALTER {alter}", "INSERT INTO t VALUES (2, 1.5, '2000-01-02')")
    with pytest.raises(RecordError, match=told):
        flow.stream()
    with pytest.raises(PreflightError, match=f"{told}.*until one of them is published"):
        preflight.run(flow.pipeline)
    # a person's word for the row that is written under the old name
    level(flow, "NONE")
    flow.stream()
    level(flow, "BACKWARD")
    flow.execute("INSERT INTO t VALUES (3, 1.5, '2000-01-03')")
    flow.stream()
    assert set(records(flow)) == {1, 2, 3}
    # a later change has nothing to do with it
    flow.execute("ALTER TABLE t ADD later text")
    preflight.run(flow.pipeline)
    flow.execute("INSERT INTO t (id, later) VALUES (4, 'x')")
    flow.stream()
    assert says(flow, 4, {"later": "x"})
    # another change, and under another name at once
    flow.transaction(f"ALTER TABLE t ALTER {column} TYPE bigint USING 7", f"ALTER TABLE t RENAME {column} TO other")
    flow.execute("INSERT INTO t (id, other) VALUES (5, 7)")
    flow.stream()
    assert says(flow, 5, {"other": 7})


@pytest.mark.long
@pytest.mark.parametrize("way", ["rename", "isolate"])
def test_what_is_advised_for_rows_that_are_written_already_helps(
    make_flow: MakeFlow, registry: SchemaRegistry, way: str
) -> None:
    flow = followed(make_flow, registry)
    flow.execute("ALTER TABLE t ALTER n TYPE numeric(12,4)", "INSERT INTO t VALUES (2, 1.5)")
    with pytest.raises(RecordError, match=f"readers would read n .*{way}"):
        flow.stream()
    if way == "rename":
        flow.change(table_options={"t": {"rename": {"n": "amount"}}})
        preflight.run(flow.pipeline)
        flow.stream()
        assert says(flow, 2, {"amount": Decimal("1.5000")})
        return
    # it is no remedy to undo it alone
    flow.execute("ALTER TABLE t ALTER n TYPE numeric(10,2)", "INSERT INTO t VALUES (3, 2.5)")
    with pytest.raises(RecordError, match="readers would read n"):
        flow.stream()
    flow.change(on_error="isolate")
    flow.stream()
    assert set(records(flow)) == {1}
    pausing.ask(flow.pipeline, ["t"], paused=False)
    flow.stream()
    assert set(records(flow)) == {1, 2, 3} and says(flow, 2, {"n": Decimal("1.50")})


def test_a_field_that_was_gone_meanwhile_is_compared_with_what_it_was(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    """The registry compares with the latest version only."""
    flow = followed(make_flow, registry)
    flow.execute("ALTER TABLE t DROP n", "INSERT INTO t VALUES (2)", "ALTER TABLE t ADD n numeric(12,4)")
    flow.execute("INSERT INTO t (id, n) VALUES (3, 1.5)")
    with pytest.raises(RecordError, match=r"and records with schema id \d+, readers would read n"):
        flow.stream()
    assert set(records(flow)) == {1, 2}


UNIT = r"between it and records with schema id \d+, readers would read m \(timestamp-micros\) as local-timestamp-micros"


@pytest.fixture
def plain(make_flow: MakeFlow, registry: SchemaRegistry) -> Flow:
    """A pipeline whose schemas do not say what the numbers of dates and times count."""
    flow = make_flow(registry, temporal="plain")
    flow.execute("ALTER TABLE t ADD m timestamp")
    flow.create()
    return flow


def test_a_number_of_another_unit_is_refused_and_its_ways_out_work(plain: Flow) -> None:
    plain.snapshot()
    plain.execute("ALTER TABLE t ALTER m TYPE timestamptz", "INSERT INTO t (id) VALUES (2)")
    with pytest.raises(RecordError, match=UNIT):
        plain.stream()
    with pytest.raises(PreflightError, match=UNIT):
        preflight.run(plain.pipeline)
    level(plain, "NONE")
    plain.stream()
    level(plain, "BACKWARD")
    # the schema, and so its id, is the same: the state knows that it was accepted
    plain.execute("INSERT INTO t (id) VALUES (3)", "ALTER TABLE t ADD later text")
    preflight.run(plain.pipeline)
    plain.execute("INSERT INTO t (id) VALUES (4)")
    plain.stream()
    assert set(records(plain)) == {1, 2, 3, 4}


@pytest.mark.long
def test_what_a_live_snapshot_was_let_in_with_is_taken_from_the_stream(plain: Flow) -> None:
    plain.snapshot()
    with plain.streaming() as errors:
        plain.published("INSERT INTO t (id) VALUES (2)")
        level(plain, "NONE")
        plain.execute("ALTER TABLE t ALTER m TYPE timestamptz")
        request = plain.ask("t")
        until(lambda: plain.reported(request).state == "finished", "it is read", failed=errors)
        level(plain, "BACKWARD")
        plain.published("INSERT INTO t (id) VALUES (3)")
    assert not errors


@pytest.mark.long
def test_rows_that_are_read_have_no_numbers_of_another_unit_either(plain: Flow) -> None:
    plain.execute("ALTER TABLE t ALTER m TYPE timestamptz")
    with pytest.raises(Refused, match=UNIT):
        plain.snapshot()
    plain.execute("ALTER TABLE t ALTER m TYPE timestamp")
    plain.snapshot()
    with plain.streaming() as errors:
        plain.published("INSERT INTO t (id) VALUES (2)")
        plain.execute("ALTER TABLE t ALTER m TYPE timestamptz")
        request = plain.ask("t")
        until(lambda: plain.reported(request).state == "failed", "it is refused", failed=errors)
        assert re.search(UNIT, str(plain.reported(request)))
    assert not errors and len(everything(plain)) == 2


def test_what_the_registry_has_forgotten_is_compared_all_the_same(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = followed(make_flow, registry)
    SchemaRegistryClient({"url": registry.url}).delete_subject(f"{flow.topic('t')}-value")
    flow.execute("ALTER TABLE t ALTER n TYPE numeric(12,4)", "INSERT INTO t (id) VALUES (2)")
    with pytest.raises(PreflightError, match=r"readers would read n \(decimal with 4"):
        preflight.run(flow.pipeline)
    with pytest.raises(RecordError, match=r"readers would read n \(decimal with 4"):
        flow.stream()


@pytest.mark.long
def test_at_a_transitive_level_a_schema_is_compared_with_all_versions(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = followed(make_flow, registry)
    level(flow, "BACKWARD_TRANSITIVE")
    flow.execute("ALTER TABLE t DROP d", "INSERT INTO t VALUES (2)")
    flow.stream()
    flow.execute("ALTER TABLE t ADD d bool")
    with pytest.raises(PreflightError, match=r"refuses the schema .* not compatible with version 1"):
        preflight.run(flow.pipeline)
    level(flow, "BACKWARD")
    preflight.run(flow.pipeline)


# ---------------------------------------------------------------------- what it has lost
def ids(flow: Flow) -> tuple[int, int]:
    """The ids of key and value that the state has for the table."""
    (pinned,) = state_of(flow).tables.values()
    return pinned.key_schema, pinned.value_schema


def test_a_value_schema_that_is_lost_while_the_stream_runs_is_registered_again_and_rows_are_published_anew(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    flow = followed(make_flow, front)
    key, value = ids(flow)
    with flow.streaming() as errors:
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")
        front.lost = {value}
        until(lambda: ids(flow)[1] != value, "the new id", failed=errors)
        flow.execute("INSERT INTO t VALUES (3, 1, NULL)")
        # with the id that is lost, nobody could read them
        until(lambda: readable(flow) == {1, 2, 3}, "all rows can be read", failed=errors)
    assert not errors
    assert ids(flow)[0] == key
    flow.stream()


@pytest.mark.long
def test_a_label_in_a_key_that_is_renamed_before_a_schema_is_lost_leaves_no_keys(
    make_flow: MakeFlow, front: RegistryFront
) -> None:
    flow = make_flow(front)
    flow.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "ALTER TABLE t ADD m mood NOT NULL DEFAULT 'sad', DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, m)",
    )
    flow.create()
    flow.snapshot()
    front.lost = {ids(flow)[1]}
    flow.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", "INSERT INTO t (id) VALUES (2)")
    flow.stream()
    latest = {message.key(): message.value() for message in everything(flow)}
    assert sum(value is not None for value in latest.values()) == 2


def altered(flow: Flow, x: int = 2) -> int:
    """Publish a row with one more column; returns the id of its schema."""
    flow.execute("ALTER TABLE t ADD x text", f"INSERT INTO t VALUES ({x}, 1, NULL, 'x')")
    flow.stream()
    used = int.from_bytes(everything(flow)[-1].value()[1:5], "big")
    assert used not in ids(flow)
    return used


@pytest.mark.long
def test_a_schema_of_altered_rows_is_known_and_compared(make_flow: MakeFlow, front: RegistryFront) -> None:
    flow = followed(make_flow, front)
    used = altered(flow)
    front.asked = []
    flow.execute("INSERT INTO t VALUES (3, 1, NULL, 'x')")
    flow.stream()
    assert not any(method == "POST" for method, _ in front.asked)
    front.lost = {used}
    flow.execute("INSERT INTO t VALUES (4, 1, NULL, 'x')")
    flow.stream()
    assert readable(flow) == {1, 2, 3, 4}
    assert used not in ids(flow) and not state_of(flow).later


@pytest.mark.long
@pytest.mark.parametrize("format", ["avro", "protobuf", "json-schema"])
def test_schemas_of_columns_that_come_and_go_are_not_taken_for_lost(
    make_flow: MakeFlow, front: RegistryFront, format: str
) -> None:
    flow = followed(make_flow, front, format=format)
    for number, change in enumerate(("ADD x text", "DROP n", "ADD y int", "DROP x", "ADD n numeric(10,2)"), 2):
        flow.execute(f"ALTER TABLE t {change}", f"INSERT INTO t (id) VALUES ({number})")
        flow.stream()
    before, published, front.asked = ids(flow), len(everything(flow)), []
    (later,) = state_of(flow).later.values()
    assert len(later) > 1
    flow.execute("INSERT INTO t (id) VALUES (10)")
    flow.stream()
    assert ids(flow) == before and len(everything(flow)) == published + 1 and not state_of(flow).lives
    # but for Avro, several definitions may have one schema, with which the first of them is recorded
    assert format != "avro" or not any(method == "POST" for method, _ in front.asked)


def test_all_schemas_of_a_table_get_their_ids_back(make_flow: MakeFlow, front: RegistryFront) -> None:
    flow = followed(make_flow, front)
    used, before = altered(flow), ids(flow)
    front.lost = {*before, used}
    with pytest.raises(PreflightError, match="has lost schema ids that keys"):
        flow.create()
    # a start that leads through preflight is what gives them back
    front.importing = True
    flow.create()
    flow.execute("INSERT INTO t VALUES (3, 1, NULL, 'x')")
    flow.stream()
    assert (ids(flow), front.lost) == (before, set())
    assert readable(flow) == {1, 2, 3}


@pytest.mark.long
def test_a_schema_gets_its_id_back_with_a_dropped_column_that_has_come_back(
    make_flow: MakeFlow, front: RegistryFront
) -> None:
    flow = followed(make_flow, front, format="protobuf")
    for number, change in enumerate(("DROP n", "ADD x text", "ADD n numeric(10,2)"), 2):
        flow.execute(f"ALTER TABLE t {change}", f"INSERT INTO t (id) VALUES ({number})")
        flow.stream()
    before, (later,) = ids(flow), state_of(flow).later.values()
    (used,) = later
    assert [column.name for column in later[used].columns] == ["id", "d", "x", "n"]
    published, front.lost, front.importing = len(everything(flow)), {*before, used}, True
    flow.stream()
    assert (ids(flow), front.lost, len(everything(flow))) == (before, set(), published)


@pytest.mark.long
def test_a_table_that_is_recorded_anew_during_its_snapshot_keeps_the_columns_of_its_rows(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, format="protobuf")
    flow.create()
    flow.execute("ALTER TABLE t DROP n")
    flow.snapshot()
    (later,) = state_of(flow).later.values()
    assert {number: [column.name for column in table.columns] for number, table in later.items()} == {
        ids(flow)[1]: ["id", "d", "n"]
    }


def test_a_schema_of_altered_rows_that_is_lost_while_the_stream_runs_is_noticed(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    flow = followed(make_flow, front)
    with flow.streaming() as errors:
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")
        flow.published("ALTER TABLE t ADD x text", "INSERT INTO t VALUES (3, 1, NULL, 'x')")
        (used,) = until(lambda: [*state_of(flow).later.values()], "it is recorded", failed=errors)[0]
        front.lost = {used}
        until(lambda: used not in ids(flow) and readable(flow) == {1, 2, 3}, "all can be read", failed=errors)
    assert not errors


@pytest.mark.long
def test_a_lost_schema_of_altered_rows_without_a_key_is_a_problem(make_flow: MakeFlow, front: RegistryFront) -> None:
    flow = make_flow(front, allow_unkeyed=True)
    flow.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
    flow.create()
    flow.snapshot()
    used = altered(flow)
    front.lost = {used}
    flow.stream()
    job = flow.job
    assert job is not None
    (found,) = job.problems
    assert found.kind == "schemas-lost" and f"schema {used}:" in found.reason
    # it is told once: the records are what they are, and new ones carry another id
    assert not state_of(flow).later


def test_records_of_a_table_without_a_key_that_nobody_can_read_any_more_are_a_problem(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    flow = make_flow(front, allow_unkeyed=True)
    flow.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
    flow.create()
    flow.snapshot()
    (pinned,) = state_of(flow).tables.values()
    front.lost = {pinned.value_schema}
    with flow.streaming() as errors:
        (found,) = until(lambda: (job := flow.job) and job.problems, "the problem", failed=errors)
        assert (found.kind, found.subject) == ("schemas-lost", f"topic {flow.topic('t')}")
        assert "cannot be published again" in found.reason and "backup" in found.remedy
        # it goes on with the schema of now
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")
    assert not errors


@pytest.mark.long
def test_a_dead_letter_is_published_with_a_schema_that_the_registry_knows(
    make_flow: MakeFlow, front: RegistryFront
) -> None:
    flow = followed(make_flow, front, on_error="log")
    flow.execute("ALTER TABLE t ADD x text", "INSERT INTO t (id) VALUES (2)")
    flow.stream()
    limit_records(flow, "t", 500)
    flow.execute("INSERT INTO t SELECT 3, 1, NULL, string_agg(md5(g::text), '') FROM generate_series(1, 100) g")
    flow.stream()
    assert len(flow.dead_letters()) == 1
    limit_records(flow, "t", 1_000_000)
    front.lost = {ids(flow)[1]}
    assert redrive(flow.pipeline).published == 1
    assert 3 in readable(flow)
    flow.stream()
    assert readable(flow) == {1, 2, 3}


@pytest.mark.long
def test_a_key_schema_that_is_lost_ends_the_stream_and_its_id_is_taken_back(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    flow = followed(make_flow, front)
    before = ids(flow)
    said = rf"has lost schema ids that keys in topics carry, .*: {before[0]} of subject '{flow.topic('t')}-key'"
    with flow.streaming() as errors:
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")
        front.lost = set(before)
        until(lambda: errors, "the stream ends")
    assert re.search(said, str(errors[0]))
    for step in (flow.stream, lambda: preflight.run(flow.pipeline)):
        with pytest.raises((Refused, PreflightError), match=said):
            step()
    assert ids(flow) == before
    front.importing = True
    flow.execute("DELETE FROM t WHERE id = 1")
    flow.stream()
    assert (ids(flow), front.lost) == (before, set())
    assert readable(flow) == {2}


def test_a_registry_that_was_emptied_gets_no_new_schema(make_flow: MakeFlow, front: RegistryFront) -> None:
    """The ids that it would give may be those of other schemas in the registry that a person restores."""
    flow = followed(make_flow, front)
    with flow.streaming() as errors:
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")
        front.lost, front.asked = set(ids(flow)), []
        flow.execute("ALTER TABLE t ADD x text", "INSERT INTO t VALUES (3, 1, NULL, 'x')")
        until(lambda: errors, "the stream ends")
    assert "has lost schema ids that keys in topics carry" in str(errors[0])
    front.lost = set()
    assert SchemaRegistryClient({"url": front.url}).get_versions(f"{flow.topic('t')}-value") == [1]
    flow.stream()
    assert readable(flow) == {1, 2, 3}


@pytest.mark.long
def test_tables_whose_keys_ids_are_lost_for_good_are_taken_up_with_those_of_today(
    make_flow: MakeFlow, front: RegistryFront
) -> None:
    flow = followed(make_flow, front)
    flow.execute("INSERT INTO t VALUES (2, 1, NULL)")
    flow.stream()
    before = ids(flow)
    front.lost = set(before)
    flow.execute("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (3, 1, NULL)")
    with pytest.raises(Refused, match="accept-new-keys"):
        flow.stream()
    accept(flow.pipeline, ["t"])
    earlier = len(everything(flow))
    flow.stream()
    assert not {*ids(flow)} & {*before}
    # the old keys have their tombstones, the new ones their rows
    assert readable(flow) == {2, 3}
    published = everything(flow)[earlier:]
    assert {int.from_bytes(each.key()[1:5], "big") for each in published if each.value()} == {ids(flow)[0]}
    latest = dict[bytes, bool]()
    for message in everything(flow):
        latest[message.key()] = message.value() is not None
    assert [int.from_bytes(key[1:5], "big") for key, there in latest.items() if there] == [ids(flow)[0]] * 2


def test_an_id_that_means_another_schema_is_lost(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = followed(make_flow, registry)
    (pinned,) = state_of(flow).tables.values()
    asked = Registry(flow.pipeline.registry)
    wanted = schemas.pinned_schemas(flow.pipeline, [replace(pinned, key_schema=pinned.value_schema)])
    assert [each.of_key for each in schemas.lost(asked, wanted)] == [True]
    assert schemas.lost(asked, schemas.pinned_schemas(flow.pipeline, [pinned])) == []


def test_a_subject_that_was_deleted_is_registered_again(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = followed(make_flow, registry)
    before, subject = ids(flow), f"{flow.topic('t')}-key"
    SchemaRegistryClient({"url": registry.url}).delete_subject(subject)
    flow.execute("INSERT INTO t VALUES (2, 1, NULL)")
    flow.stream()
    assert ids(flow) == before
    assert SchemaRegistryClient({"url": registry.url}).get_latest_version(subject).schema_id == before[0]


@pytest.mark.long
def test_a_subject_that_is_deleted_while_the_stream_runs_is_registered_again(
    make_flow: MakeFlow, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    flow = followed(make_flow, registry)
    before, subject = ids(flow), f"{flow.topic('t')}-value"
    client = SchemaRegistryClient({"url": registry.url})
    with flow.streaming() as errors:
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")
        client.delete_subject(subject)
        until(lambda: subject in client.get_subjects(), "it is there again", failed=errors)
        flow.published("INSERT INTO t VALUES (3, 1, NULL)")
    assert not errors and ids(flow) == before


def test_a_registry_that_is_away_at_the_start_is_a_problem_and_not_needed(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    flow = followed(make_flow, front)
    front.answer = lambda method, path: (500, 50001, "Error in the backend data store")
    with flow.streaming() as errors:
        flow.published("INSERT INTO t VALUES (2, 1, NULL)")

        def problems() -> list[Any]:
            job = flow.job
            return job.problems if job else []

        found = until(problems, "the problem", failed=errors)
        assert (found[0].kind, "backend data store" in found[0].reason) == ("schemas-unchecked", True)
        front.answer = lambda method, path: None
        until(lambda: not problems(), "it is gone", failed=errors)
    assert not errors


@pytest.mark.long
def test_verification_says_what_carries_the_id_of_another_schema(make_flow: MakeFlow, front: RegistryFront) -> None:
    flow = followed(make_flow, front)
    _, value = ids(flow)
    theirs = {"type": "record", "name": "other", "fields": [{"name": "id", "type": "int"}]}
    client = SchemaRegistryClient({"url": front.url})
    other = client.register_schema(f"{flow.topic('t')}-other", Schema(json.dumps(theirs), "AVRO"))
    front.asked = []
    with flow.streaming():
        # the stream itself would end: it has asked at its start and then beside it, and asks again in a minute
        until(lambda: front.asked.count(("GET", f"/schemas/ids/{value}")) > 1, "it asks")
        front.instead = {value: other}
        (found,) = driver.run(flow.pipeline, driver.in_threads(flow.pipeline)).tables
    assert (found.verdict, found.counts) == ("different", {"unreadable": 1})
    assert f"no schema {value} of this topic's records" in str(found.differences[0])


@pytest.mark.long
def test_a_live_snapshot_publishes_no_id_that_is_lost(
    make_flow: MakeFlow, front: RegistryFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a verification advises where records cannot be read: it must not write the same ids again."""
    monkeypatch.setattr(schemas, "_INTERVAL", 2.0)
    flow = followed(make_flow, front)
    with flow.streaming() as errors:
        until(lambda: ("GET", f"/schemas/ids/{ids(flow)[1]}") in front.asked, "it has asked", failed=errors)
        front.lost.add(lost := ids(flow)[1])
        request = flow.ask("t", sweep=True)
        until(lambda: flow.reported(request).state == "finished", "the live snapshot", failed=errors)
    carried = [int.from_bytes((message.value() or b"")[1:5], "big") for message in everything(flow)]
    assert (carried[0], set(carried[1:])) == (lost, {ids(flow)[1]})


# ---------------------------------------------------------------------- all of it, in any order
@pytest.mark.long
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.long] if n > 1 else []) for n in range(1, 9)])
def test_whatever_it_forgets_each_row_can_be_read_in_the_end(
    make_flow: MakeFlow, front: RegistryFront, seed: int
) -> None:
    """Between runs of the stream the registry loses ids and subjects, takes nothing, or is away, and the table is
    altered. A stream that goes on publishes what can be read; one that ends says that a key's id is lost, and goes on
    when the registry is restored."""
    random, flow = Random(seed), followed(make_flow, front, outage_timeout=1.0)
    subjects, rows = [f"{flow.topic('t')}-{part}" for part in ("key", "value")], 1

    def lose_value() -> None:
        front.lost.add(ids(flow)[1])

    def lose_key() -> None:
        front.lost.add(ids(flow)[0])

    def delete() -> None:
        client, subject = SchemaRegistryClient({"url": front.url}), random.choice(subjects)
        if subject in client.get_subjects():
            client.delete_subject(subject)

    def alter() -> None:
        flow.execute(f"ALTER TABLE t ADD c{rows} text")

    for _ in range(6):
        for work in random.sample([lose_value, lose_key, delete, alter], random.randint(1, 3)):
            work()
        rows += 1
        flow.execute(f"INSERT INTO t (id) VALUES ({rows})")
        key = ids(flow)[0]
        front.answer = random.choice([read_only, lambda method, path: None, lambda method, path: (500, 50001, "away")])
        refused: Refused | None = None
        try:
            flow.stream()
        except Outage:
            pass
        except Refused as error:
            refused = error
        assert refused is None or ("has lost schema ids that keys" in str(refused) and key in front.lost)
        front.answer = lambda method, path: None
        if key in front.lost:
            front.importing = True
            with contextlib.suppress(Outage):  # the table was altered, and in its mode IMPORT it takes no new schema
                flow.stream()
            front.importing = False
        flow.stream()
        assert ids(flow)[0] == key
        assert readable(flow) == set(range(1, rows + 1))
