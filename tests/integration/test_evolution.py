"""Columns and types that change under a running pipeline, against a real registry at each level of compatibility."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter
from datetime import date
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.errors import RecordError, Refused
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.snapshot import lane
from airflow_bottledwater.snapshot.task import SnapshotChunk
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.verify import driver
from tests.support.scan import scan
from tests.support.tables import look_often
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

LEVELS = {"BACKWARD", "FORWARD", "FULL"}
PREPARE = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL, b text, m mood, p pair)",
)
#: (change, a row behind it, what the new row's record says of it, the levels that take it)
CHANGES: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "add": ("ALTER TABLE t ADD extra text", "(2, 2, 'x', 'ok', '(1,y)', 'new')", {"extra": "new"}, LEVELS),
    "drop": ("ALTER TABLE t DROP b", "(2, 2, 'ok', '(1,y)')", {"m": "ok"}, LEVELS),
    "rename": ("ALTER TABLE t RENAME b TO c", "(2, 2, 'x', 'ok', '(1,y)')", {"c": "x"}, LEVELS),
    "wider": (
        "ALTER TABLE t ALTER n TYPE bigint",
        "(2, 3000000000, 'x', 'ok', '(1,y)')",
        {"n": 3 * 10**9},
        {"BACKWARD"},
    ),
    "other": ("ALTER TABLE t ALTER n TYPE text", "(2, 'two', 'x', 'ok', '(1,y)')", {"n": "two"}, set()),
    "label": (
        "ALTER TYPE mood ADD VALUE 'glad' BEFORE 'ok'",
        "(2, 2, 'x', 'glad', '(1,y)')",
        {"m": "glad"},
        {"BACKWARD"},
    ),
    "attribute": (
        "ALTER TYPE pair ADD ATTRIBUTE c date",
        "(2, 2, 'x', 'ok', '(1,y,2000-01-01)')",
        {"p": {"a": 1, "b": "y", "c": date(2000, 1, 1)}},
        LEVELS,
    ),
    "nullable": ("ALTER TABLE t ALTER n DROP NOT NULL", "(2, NULL, 'x', 'ok', '(1,y)')", {"n": None}, {"BACKWARD"}),
}  # fmt: skip


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"enums": "enum", "not_null": "required"}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (*PREPARE, "INSERT INTO t VALUES (1, 1, 'x', 'sad', '(1,x)')")


def snapshotted(make_flow: MakeFlow, registry: SchemaRegistry, level: str) -> Flow:
    """A pipeline whose first row is published, under this level of compatibility."""
    flow = make_flow(registry)
    flow.create()
    SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('t')}-value", level=level)
    flow.snapshot()
    return flow


def records(flow: Flow) -> dict[int, dict[str, Any] | None]:
    """The topic's rows by id (None: deleted), as fastavro reads them with the schemas that they were written with."""
    assert flow.registry is not None
    client = SchemaRegistryClient({"url": flow.registry.url})

    def decoded(data: bytes) -> dict[str, Any]:
        schema = json.loads(client.get_schema(int.from_bytes(data[1:5], "big")).schema_str)
        row = fastavro.schemaless_reader(io.BytesIO(data[5:]), schema)
        assert isinstance(row, dict)
        return row

    found: dict[int, dict[str, Any] | None] = {}
    for message in scan(flow.pipeline.kafka, flow.topic("t"), Topics(flow.pipeline.kafka).ends(flow.topic("t"), 1)):
        value = message.value()
        found[decoded(message.key())["id"]] = None if value is None else decoded(value)
    return found


def letters(flow: Flow) -> list[Any]:
    return [m.value for m in flow.dead_letters()]


def says(flow: Flow, id: int, expected: dict[str, Any]) -> bool:
    """Whether the row's last record has these values."""
    row = records(flow)[id]
    return row is not None and expected.items() <= row.items()


def test_a_schema_that_gets_another_name_leaves_keys_with_its_enums_as_they_are(
    make_flow: MakeFlow, registry: SchemaRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Each key has the id of a schema that has the enum's name."""
    flow = make_flow(registry, tables="tenant*.orders")
    flow.execute(
        "CREATE SCHEMA tenant",
        "CREATE TYPE tenant.region AS ENUM ('eu', 'us')",
        "CREATE TABLE tenant.orders (id tenant.region PRIMARY KEY, n int)",
        "INSERT INTO tenant.orders VALUES ('eu', 1), ('us', 2)",
    )
    flow.create()
    flow.snapshot()
    topic = flow.topic("tenant.orders")

    def keys() -> Counter[bytes | None]:
        ends = Topics(flow.pipeline.kafka).ends(topic, 1)
        return Counter(message.key() for message in scan(flow.pipeline.kafka, topic, ends))

    before = keys()
    flow.execute("ALTER SCHEMA tenant RENAME TO tenant_old", "UPDATE tenant_old.orders SET n = 3 WHERE id = 'eu'")
    flow.stream()
    assert keys().keys() == before.keys() and keys().total() == 3 and "another key" not in caplog.text
    # also where its rows are read again for another reason
    name = flow.pipeline.publication_name
    flow.execute(f"ALTER PUBLICATION {name} DROP TABLE tenant_old.orders", "UPDATE tenant_old.orders SET n = 4")
    flow.stream()
    flow.stream()
    assert keys().keys() == before.keys() and keys().total() >= 5


def pairs() -> list[Any]:
    """In the quick suite each change once where it is taken, and once where it is not."""
    found = []
    for change, (*_, levels) in CHANGES.items():
        first = {min(levels, default=""), min(LEVELS - levels, default="")}
        found += [
            pytest.param(change, level, marks=[] if level in first else [pytest.mark.long]) for level in sorted(LEVELS)
        ]
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(("change", "level"), pairs())
def test_a_change_of_columns_or_types_is_published_or_a_record_error(
    make_flow: MakeFlow, registry: SchemaRegistry, change: str, level: str
) -> None:
    statement, row, expected, levels = CHANGES[change]
    flow = snapshotted(make_flow, registry, level)
    flow.execute(statement, f"INSERT INTO t VALUES {row}")
    if level in levels:
        flow.stream()
    else:
        for _ in range(2):
            with pytest.raises(RecordError, match=r"cannot be published .* The schema registry .* refuses the schema"):
                flow.stream()
            assert set(records(flow)) == {1}
        # by a person's decision the rows become letters, one each, and the stream goes on
        flow.change(on_error="log")
        flow.execute("INSERT INTO t SELECT 3, n, b, m, p FROM t WHERE id = 2", "DELETE FROM t WHERE id = 3")
        assert flow.stream()["dead_letters"] == 2
        assert [letter["op"] for letter in letters(flow)] == ["c", "c"]
        assert "refuses the schema" in letters(flow)[0]["error"]
        assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=2)
        # the subject takes it now, and the delete has overtaken one of them
        SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('t')}-value", level="NONE")
        assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1, overtaken=1)
    assert says(flow, 1, {"n": 1, "m": "sad"})
    assert says(flow, 2, expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("change", ["label", "attribute", "nullable"])
def test_a_type_that_changes_while_the_stream_runs_is_read_anew(
    make_flow: MakeFlow, registry: SchemaRegistry, change: str
) -> None:
    """Nothing in the stream says so: no Relation message comes, and a value that does not fit is the first that is
    heard of it."""
    statement, row, expected, _ = CHANGES[change]
    flow = snapshotted(make_flow, registry, "BACKWARD")
    with flow.streaming() as errors:
        flow.execute("UPDATE t SET b = 'y'")
        until(lambda: says(flow, 1, {"b": "y"}), "the update", failed=errors)
        flow.execute(statement, f"INSERT INTO t VALUES {row}")
        until(lambda: 2 in records(flow), "the stream notices the new type", failed=errors)
    assert says(flow, 2, expected)
    assert errors == []


def test_attributes_that_the_catalog_does_not_know_are_a_record_error(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = snapshotted(make_flow, registry, "BACKWARD")
    flow.execute("INSERT INTO t VALUES (2, 2, 'x', 'ok', '(1,y)')", "ALTER TYPE pair DROP ATTRIBUTE b")
    with pytest.raises(RecordError, match=r"column 'p': the value does not fit what the catalog says of its type"):
        flow.stream()


def test_so_they_are_if_another_column_gets_another_type_behind_them(make_flow: MakeFlow) -> None:
    """To read the definitions anew does not help, since the version that the row was written under is the same."""
    flow = make_flow(skip_snapshot=True)
    flow.create()
    flow.execute(
        "INSERT INTO t VALUES (2, 2, 'x', 'ok', '(1,y)')",
        "ALTER TYPE pair DROP ATTRIBUTE b",
        "ALTER TABLE t ALTER n TYPE bigint",
        "INSERT INTO t VALUES (3, 3, 'x', 'ok', '(1)')",
    )
    with pytest.raises(RecordError, match=r"column 'p': the value does not fit what the catalog says of its type"):
        flow.stream()
    flow.change(on_error="log")
    assert flow.stream()["dead_letters"] == 1
    # the table is read again, too, since a name inside of a type has gone
    assert [m.key for m in flow.read("t") if m.op != "r"] == [{"id": 3}]


def test_a_type_that_is_altered_is_read_anew_even_if_the_column_has_another_one_by_now(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    flow.create()
    with flow.streaming() as errors:
        flow.execute("INSERT INTO t VALUES (2, 2, 'x', 'ok', '(1,y)')")
        until(lambda: flow.read("t"), "the first row", failed=errors)
        flow.transaction(
            "ALTER TYPE pair ADD ATTRIBUTE c int",
            "INSERT INTO t VALUES (3, 3, 'x', 'ok', '(1,y,7)')",
            "ALTER TABLE t ALTER p TYPE text USING p::text",
        )
    assert errors == []
    flow.stream()
    assert [m.value["p"] for m in flow.read("t") if m.key == {"id": 3}] == [{"a": 1, "b": "y", "c": 7}]


#: a change of the attributes (a int8, b int8), a value behind it, and what its record says
ATTRIBUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "replaced": ("ALTER TYPE span DROP ATTRIBUTE b, ADD ATTRIBUTE b float8", "(7,12.5)", {"a": 7, "b": 12.5}),
    "of another size": ("ALTER TYPE span DROP ATTRIBUTE b, ADD ATTRIBUTE b bool", "(7,t)", {"a": 7, "b": True}),
    "dropped": ("ALTER TYPE span DROP ATTRIBUTE a", "(7)", {"b": 7}),
    "added": ("ALTER TYPE span ADD ATTRIBUTE c int", "(7,8,9)", {"a": 7, "b": 8, "c": 9}),
}


def spans(make_flow: MakeFlow, **settings: Any) -> Flow:
    flow = make_flow(skip_snapshot=True, tables="spans", **settings)
    flow.execute("CREATE TYPE span AS (a int8, b int8)", "CREATE TABLE spans (id int PRIMARY KEY, s span, l span[])")
    flow.create()
    return flow


def span(number: int, value: str = "(1,2)") -> str:
    return f"INSERT INTO spans VALUES ({number}, '{value}', '{{\"{value}\"}}')"


def says_span(flow: Flow, number: int, value: dict[str, Any]) -> bool:
    found = [m.value for m in flow.read("spans") if m.key == {"id": number}]
    return bool(found) and found[-1] == {"id": number, "s": value, "l": [value]}


@pytest.mark.some(1)
@pytest.mark.parametrize("change", ATTRIBUTES)
def test_attributes_that_change_while_the_stream_runs_are_read_anew(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    alter, value, expected = ATTRIBUTES[change]
    flow, publish = spans(make_flow), StreamPublisher.publish

    def slowly(self: StreamPublisher, batch: Batch, *more: Any) -> Position:
        if len(batch):
            time.sleep(1.5)
        return publish(self, batch, *more)

    monkeypatch.setattr(StreamPublisher, "publish", slowly)
    with flow.streaming() as errors:
        flow.execute(span(1))
        until(lambda: flow.read("spans"), "the first row", failed=errors)
        flow.execute(span(2))
        time.sleep(0.5)
        # one batch, of which the first transaction has the definition that is known
        flow.execute(span(3), alter, span(4, value))
        until(lambda: says_span(flow, 4, expected), "the stream notices the change", failed=errors)
    assert errors == []
    assert {"id": 3, "s": {"a": 1, "b": 2}, "l": [{"a": 1, "b": 2}]} in [m.value for m in flow.read("spans")]


@pytest.mark.some(1)
@pytest.mark.parametrize("change", ATTRIBUTES)
def test_values_from_before_attributes_changed_are_a_record_error_unless_they_lack_what_was_added(
    make_flow: MakeFlow, change: str
) -> None:
    alter, value, expected = ATTRIBUTES[change]
    flow = spans(make_flow, on_error="log")
    flow.execute(span(1), alter, span(2, value))
    added = change == "added"
    assert flow.stream()["dead_letters"] == (not added)
    assert says_span(flow, 2, expected)
    if added:
        assert says_span(flow, 1, {"a": 1, "b": 2, "c": None})


#: a type's attributes, a value, what alters the type during a snapshot, what a row's record says then
DURING_SNAPSHOT = {
    # the rows of a COPY have the attributes of today
    "added": ("a int8, b int8", "(1,2)", "ADD ATTRIBUTE c int", {"a": 1, "b": 2, "c": None}),
    "dropped": ("a int8, b int8", "(1,2)", "DROP ATTRIBUTE a", {"b": 2}),
    # the query names the attributes, since the server turns one into text
    "renamed": ("a int8, b point", '(1,"(1,2)")', "RENAME ATTRIBUTE b TO c", {"a": 1, "c": "(1,2)"}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("change", DURING_SNAPSHOT)
def test_a_type_that_is_altered_during_a_snapshot_is_read_anew(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """ALTER TYPE does not wait for the locks of the table."""
    attributes, value, alter, expected = DURING_SNAPSHOT[change]
    flow = make_flow(tables="spans", range_bytes=64 * 1024, lanes=2)
    flow.execute(
        f"CREATE TYPE span AS ({attributes})",
        "CREATE TABLE spans (id int PRIMARY KEY, s span)",
        f"INSERT INTO spans SELECT g, '{value}' FROM generate_series(1, 3000) g",
    )
    flow.create()
    read, lock, altered = lane._Lane._read, threading.Lock(), list[str]()

    def then(self: lane._Lane, chunk: SnapshotChunk) -> None:
        with lock:
            read(self, chunk)
            if not altered:
                altered.append(alter)
                flow.execute(f"ALTER TYPE span {alter}")

    monkeypatch.setattr(lane._Lane, "_read", then)
    assert flow.snapshot().open_dead_letters == 0
    assert {m.key["id"]: m.value["s"] for m in flow.read("spans")} == dict.fromkeys(range(1, 3001), expected)
    flow.execute("INSERT INTO spans SELECT 0, s FROM spans WHERE id = 1")
    flow.stream()
    assert flow.read("spans")[-1].value == {"id": 0, "s": expected}


#: a composite with an attribute that the server has to turn into text, a composite with such a one inside, and arrays
PLACES = (
    "CREATE TYPE place AS (street text, at point)",
    "CREATE TYPE stay AS (n int, where_ place)",
    "CREATE TABLE places (id int PRIMARY KEY, p place, s stay, l place[])",
)


def places(make_flow: MakeFlow) -> Flow:
    flow = make_flow(skip_snapshot=True, tables="places")
    flow.execute(*PLACES)
    flow.create()
    return flow


def _row(number: int, more: str = "") -> str:
    place = f'(s,"(1,2)"{more})'
    inner = place.replace('"', '""')
    return f"""INSERT INTO places VALUES ({number}, '{place}', '(1,"{inner}")', ARRAY['{place}'::place])"""


def _place(zip_: str = "", name: str = "at") -> dict[str, Any]:
    return {"street": "s", name: "(1,2)", **({"zip": zip_ or None} if zip_ != "-" else {})}


@pytest.mark.some(1)
@pytest.mark.parametrize("running", [True, False])
def test_attributes_that_are_added_to_a_composite_of_the_servers_texts_are_published(
    make_flow: MakeFlow, running: bool
) -> None:
    flow = places(make_flow)
    before, behind = _row(1), _row(4, ",z")
    alter = "ALTER TYPE place ADD ATTRIBUTE zip text"
    if running:
        with flow.streaming() as errors:
            flow.execute(before)
            until(lambda: flow.read("places"), "the first row", failed=errors)
            flow.execute(alter, behind)
        assert errors == []
    else:
        flow.execute(before, alter, behind)
    flow.stream()
    old, *_, new = (m.value for m in flow.read("places"))
    zip_ = "-" if running else ""
    assert (old["p"], old["s"]) == (_place(zip_), {"n": 1, "where_": _place(zip_)})
    assert old["l"] == '{"(s,\\"(1,2)\\"%s)"}' % ("" if running else ",")
    assert (new["p"], new["s"]) == (_place("z"), {"n": 1, "where_": _place("z")})
    assert new["l"] == '{"(s,\\"(1,2)\\",z)"}'


def test_an_attribute_that_is_renamed_in_a_composite_of_the_servers_texts_is_read_anew(make_flow: MakeFlow) -> None:
    flow = places(make_flow)
    with flow.streaming() as errors:
        flow.execute(_row(1))
        until(lambda: flow.read("places"), "the first row", failed=errors)
        flow.execute("ALTER TYPE place RENAME ATTRIBUTE at TO spot", _row(2))
        new = _place("-", "spot")
        # also in the row that was published before
        until(
            lambda: {m.key["id"]: m.value["p"] for m in flow.read("places")} == {1: new, 2: new},
            "the stream notices the new name",
            failed=errors,
        )
    assert errors == []


def test_an_attribute_that_is_dropped_from_a_composite_of_the_servers_texts_is_a_record_error(
    make_flow: MakeFlow,
) -> None:
    flow = places(make_flow)
    flow.execute(_row(1), "ALTER TYPE place DROP ATTRIBUTE street")
    with pytest.raises(RecordError, match="the value does not fit what the catalog says of its type"):
        flow.stream()


def test_another_form_of_a_key_is_refused(database: str, kafka: KafkaBroker, registry: SchemaRegistry) -> None:
    flow = Flow(database, kafka, registry, tables="k")
    flow.execute("CREATE TABLE k (id numeric(5,1) PRIMARY KEY)", "INSERT INTO k VALUES (1)")
    flow.create()
    for step, row in ((flow.snapshot, 2), (flow.stream, 3)):
        flow.execute(f"INSERT INTO k VALUES ({row})")
        flow.change(numeric="string")
        with pytest.raises(Refused, match=r"The key of public\.k changed \(id: the type of a column, or the form"):
            step()
        flow.change(numeric="decimal")
        step()
    assert flow.compare("k").differences == []


@pytest.mark.long
def test_a_key_of_texts_that_become_longer_or_in_another_order_stays_the_same(
    database: str, kafka: KafkaBroker
) -> None:
    flow = Flow(database, kafka, None, tables="k", verify_timeout=20.0)
    flow.execute(
        "CREATE TABLE k (a varchar(3), b int, c text, PRIMARY KEY (a, b))",
        "INSERT INTO k VALUES ('x', 1, 'c'), ('y', 2, 'c')",
    )
    flow.create()
    changes = (
        "ALTER TABLE k ALTER a TYPE varchar(10)",
        "ALTER TABLE k ALTER a TYPE text",
        "ALTER TABLE k DROP CONSTRAINT k_pkey, ADD PRIMARY KEY (b, a)",
    )
    flow.execute(changes[0])
    flow.snapshot()
    for change in changes:
        flow.execute(change, "UPDATE k SET c = c || 'd' WHERE b = 1", "UPDATE k SET b = b + 10 WHERE b > 1")
        flow.stream()
    request = flow.ask("k", sweep=True)
    flow.stream()
    assert (flow.reported(request).state, flow.reported(request).tombstones) == ("finished", 0)
    latest = {tuple(m.key.items()): m.value for m in flow.read("k")}
    rows = flow.execute("SELECT a, b, c FROM k")
    assert {key: value for key, value in latest.items() if value is not None} == {
        (("a", a), ("b", b)): {"a": a, "b": b, "c": c} for a, b, c in rows
    }
    with flow.streaming():
        (found,) = driver.run(flow.pipeline, driver.in_threads(flow.pipeline)).tables
    assert found.verdict == "equal"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("key", "statement"), [("char(3)", "char(5)"), ("varchar(3)", "char(5)"), ("numeric(5,1)", "numeric(6,2)")]
)
def test_a_key_whose_values_get_other_texts_is_another_key(
    database: str, kafka: KafkaBroker, key: str, statement: str
) -> None:
    flow = Flow(database, kafka, None, tables="k")
    flow.execute(f"CREATE TABLE k (id {key} PRIMARY KEY)", "INSERT INTO k VALUES ('1')")
    flow.create()
    flow.snapshot()
    flow.execute(f"ALTER TABLE k ALTER id TYPE {statement}", "INSERT INTO k VALUES ('2')")
    flow.stream()
    assert flow.compare("k").equal and len([m for m in flow.read("k") if m.value is None]) == 1


# ---------------------------------------------------------------------- keys under REPLICA IDENTITY FULL, of which the
# stream says nothing
_NEW_KEY = ("ALTER TABLE k DROP CONSTRAINT k_pkey", "ALTER TABLE k ADD PRIMARY KEY (other)")


def _full(database: str, kafka: KafkaBroker) -> Flow:
    flow = Flow(database, kafka, None)
    flow.execute(
        "CREATE TABLE k (id int PRIMARY KEY, other int NOT NULL)",
        "ALTER TABLE k REPLICA IDENTITY FULL",
        "INSERT INTO k VALUES (1, 10), (2, 20)",
    )
    flow.create()
    flow.snapshot()
    return flow


@pytest.mark.parametrize("change", [_NEW_KEY, ("ALTER TABLE k DROP id",)], ids=["another", "dropped"])
def test_a_key_that_changed_under_full_identity_is_noticed_at_a_start(
    database: str, kafka: KafkaBroker, change: tuple[str, ...]
) -> None:
    flow = _full(database, kafka)
    flow.execute(*change, "UPDATE k SET other = other + 1")
    flow.stream()
    if change == _NEW_KEY:
        assert flow.compare("k").equal
    else:
        assert len(flow.read("k")) == 2


def test_a_key_that_changes_under_full_identity_is_taken_up_by_a_running_stream(
    database: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    flow = _full(database, kafka)
    with flow.streaming() as errors:
        flow.execute("UPDATE k SET other = 11 WHERE id = 1")
        until(lambda: len(flow.read("k")) == 3, "the update", failed=errors)
        # the columns stay as they are, so the Relation message does, too
        flow.execute(*_NEW_KEY, "UPDATE k SET id = 5 WHERE other = 20")
        until(lambda: flow.compare("k").equal, "it has the new key", failed=errors)
    assert errors == []
    # nothing was published under a key that does not mean it
    assert {m.key.get("id") for m in flow.read("k") if m.value is not None and "id" in m.key} == {1, 2}


# ---------------------------------------------------------------------- names, comments, and types that are gone
def test_a_renamed_table_keeps_the_name_of_its_records(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = snapshotted(make_flow, registry, "BACKWARD")
    flow.execute("ALTER TABLE t RENAME TO renamed", "INSERT INTO renamed VALUES (2, 2, 'x', 'ok', '(1,y)')")
    flow.stream()
    flow.execute("ALTER TABLE renamed ADD extra text", "INSERT INTO renamed VALUES (3, 3, 'x', 'ok', '(1,y)', 'new')")
    flow.stream()
    assert says(flow, 2, {"n": 2}) and says(flow, 3, {"extra": "new"})
    client = SchemaRegistryClient({"url": registry.url})
    latest = client.get_latest_version(f"{flow.topic('t')}-value").schema.schema_str
    assert json.loads(latest or "")["name"] == "t"


def test_a_comment_on_a_part_of_the_key_is_not_another_key(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = make_flow(registry)
    flow.execute("CREATE TABLE k (p pair PRIMARY KEY, n int)", "INSERT INTO k VALUES ('(1,x)', 1)")
    flow.create()
    flow.snapshot()
    flow.execute("COMMENT ON COLUMN pair.a IS 'first'", "UPDATE k SET n = 2")
    flow.stream()
    flow.execute("UPDATE k SET n = 3")
    flow.stream()
    assert len({message.key() for message in scan(flow.pipeline.kafka, flow.topic("k"), [3])}) == 1


def test_a_type_that_was_dropped_does_not_stop_a_stream_that_is_behind(make_flow: MakeFlow) -> None:
    flow = make_flow(not_null="nullable")
    flow.create()
    flow.snapshot()
    flow.execute(
        "UPDATE t SET n = 2",
        "ALTER TABLE t ALTER m TYPE text, DROP p",
        "DROP TYPE mood",
        "DROP TYPE pair",
        "UPDATE t SET n = 3",
    )
    flow.stream()
    assert [(m.value["n"], m.value["m"], m.value.get("p")) for m in flow.read("t")] == [
        (1, "sad", {"a": 1, "b": "x"}), (2, "sad", {"a": 1, "b": "x"}), (3, "sad", None),
    ]  # fmt: skip
