"""What is published of single tables: which columns, to which topics; the same in snapshot, stream, live snapshots,
dead letters, re-drives and the verification."""

from __future__ import annotations

import base64
import hmac
import json
import re
from datetime import date
from typing import Any

import psycopg
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_bottledwater.errors import PreflightError, RecordError, Refused, StateError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.metrics.sample import METRICS_TOPIC
from airflow_bottledwater.provision import create, preflight, redrive
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.store import CONTROL_TOPIC
from airflow_bottledwater.state.verification import Verification
from airflow_bottledwater.verify import driver
from tests.support.compare import records
from tests.support.pipeline import logged
from tests.support.tables import look_often
from tests.support.topics import Flow, MakeFlow, limit_topic
from tests.support.verifying import verify_beside_a_stream
from tests.support.waiting import until
from tests.support.writers import state_topic

SECRET = "Ma9ker"
#: too large for its page, so that an update which leaves it alone does not send it
_LARGE = f"(SELECT string_agg('{SECRET}' || md5(i::text), '') FROM generate_series(1, 400) i)"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE people (email text NOT NULL, id int PRIMARY KEY, n int, scan text, note text, scan_at date)",
        "CREATE TABLE visits (at int, email text)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
        "CREATE SCHEMA sales",
        "CREATE TABLE sales.orders (id int PRIMARY KEY, email text, total int)",
    )


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"table_options": {"people": {"exclude": ["email", "scan*"]}, "visits": {"include": "at"}}}


def verified(flow: Flow) -> Verification:
    """Verify beside a stream, which must find no difference; of tables without a key it may be that it can find
    none."""
    found = verify_beside_a_stream(flow)
    assert {each.table: each.verdict for each in found.tables if each.verdict != "equal"}.keys() <= {"public.visits"}
    assert not found.different, found
    return found


def decoded(flow: Flow, registry: SchemaRegistry, table: str) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Keys and values of an Avro topic, as Confluent's deserialiser gives them."""
    read = AvroDeserializer(SchemaRegistryClient({"url": registry.url}))
    topic = flow.topic(table)
    return [
        (
            read(each.key(), SerializationContext(topic, MessageField.KEY)),
            read(each.value(), SerializationContext(topic, MessageField.VALUE)),
        )
        for each in records(flow.pipeline.kafka, topic)
    ]


def everything(flow: Flow) -> bytes:
    """All bytes in the pipeline's topics, also uncommitted ones, with what is encoded in dead letters; and those in the
    topics that all pipelines share."""
    shared = (CONTROL_TOPIC, METRICS_TOPIC)
    topics = [name for name in Topics(flow.pipeline.kafka).names() if flow.pipeline.slot in name or name in shared]
    parts = []
    for message in records(flow.pipeline.kafka, *topics, committed=False):
        value, headers = message.value() or b"", message.headers() or []
        parts += [message.key() or b"", value, *(each or b"" for _, each in headers)]
        if message.topic() == flow.pipeline.topic_prefix + "._bottledwater_dead_letters" and b'"again"' in value:
            parts.append(base64.b64decode(json.loads(value)["again"]["message"]))
    found = b"".join(parts)
    assert b"public" in found
    return found


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_what_is_left_out_is_nowhere(
    make_flow: MakeFlow, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    caplog.set_level("DEBUG")
    registry: SchemaRegistry | None = request.getfixturevalue("registry") if format == "avro" else None
    flow = make_flow(registry, on_error="log", allow_unkeyed=True, topic_config={"max.message.bytes": "20000"})
    row = f"'{SECRET}@x.org', {{}}, {{}}, {_LARGE}, {{}}, '2026-01-01'"
    flow.execute(
        *(f"INSERT INTO people SELECT {row.format(i, i, note)}" for i, note in ((1, "'a'"), (2, "repeat('x', 30000)"))),
        f"INSERT INTO visits VALUES (1, '{SECRET}'), (2, NULL)",
    )
    flow.create()
    assert flow.snapshot().dead_letters == 1
    flow.execute(
        *(f"INSERT INTO people SELECT {row.format(i, i, note)}" for i, note in ((3, "'c'"), (4, "repeat('x', 30000)"))),
        f"UPDATE people SET email = '{SECRET}-2', n = n + 1 WHERE id = 1",
        "UPDATE people SET id = 33 WHERE id = 3",
        f"INSERT INTO visits VALUES (3, '{SECRET}')",
        "UPDATE visits SET at = at + 10",
        "DELETE FROM visits WHERE at = 11",
        f"INSERT INTO people SELECT {row.format(5, 5, 'NULL')}",
        "DELETE FROM people WHERE id = 5",
    )
    asked = flow.ask("people", where="n > 0")
    flow.stream()
    assert flow.reported(asked).dead_letters == 2
    letters = flow.dead_letters()
    assert len(letters) == 4 and {tuple(each.value["columns"]) for each in letters} == {("id", "n", "note")}
    limit_topic(flow, flow.topic("people"), 100_000)
    result = redrive.redrive(flow.pipeline)
    # those of the snapshot and of the stream, and the same rows read by the live snapshot
    assert (result.published + result.overtaken, result.failed) == (4, 0) and result.published
    verified(flow)
    found = everything(flow)
    # but for the names in the saved state
    named = re.sub(rb'\[\d+, ?"scan_at"\]', b"", found.replace(b'"scan*"', b""))
    assert SECRET.encode() not in found and b"scan_at" not in named
    assert SECRET not in logged(caplog)


@pytest.mark.parametrize("format", [pytest.param("json", marks=pytest.mark.long), "avro"])
def test_masked_values_are_nowhere(
    make_flow: MakeFlow, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    caplog.set_level("DEBUG")
    registry: SchemaRegistry | None = request.getfixturevalue("registry") if format == "avro" else None
    mask = {"email": "first:5", "n": None, "scan": "last:30", "note": "constant:hid'den"}
    flow = make_flow(
        registry,
        on_error="log",
        allow_unkeyed=True,
        not_null="required",
        tables=("people", "visits"),
        topic_config={"max.message.bytes": "20000"},
        table_options={"people": {"mask": mask}, "visits": {"mask": {"e*": "last:0"}}},
    )
    row = f"INSERT INTO people SELECT 'äöü€' || '{SECRET}', {{}}, 7654321, {_LARGE}, {{}}, '2026-01-01'"
    flow.execute(row.format(1, f"'{SECRET}'"), row.format(2, "NULL"), f"INSERT INTO visits VALUES (1, '{SECRET}')")
    flow.create()
    flow.snapshot()
    flow.execute(
        row.format(3, f"repeat('{SECRET}', 10000)"),
        "UPDATE people SET scan_at = '2027-01-01', n = 7654321",
        "UPDATE people SET id = 33 WHERE id = 3",
        f"UPDATE visits SET at = 2, email = '{SECRET}' || email",
    )
    asked = flow.ask("people")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    if registry is None:
        found = {each.key["id"]: each.value for each in flow.read("people")}[33]
        tail = flow.execute("SELECT right(scan, 30) FROM people WHERE id = 33")[0][0]
        assert found == {
            "email": "äöü€M", "id": 33, "n": None, "scan": tail, "note": "hid'den", "scan_at": "2027-01-01"
        }  # fmt: skip
    verified(flow)
    found_bytes = everything(flow)
    assert SECRET.encode() not in found_bytes and b"7654321" not in found_bytes
    assert SECRET not in logged(caplog)


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_hashes_are_the_same_in_all_tables_and_the_values_are_nowhere(
    make_flow: MakeFlow, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    caplog.set_level("DEBUG")
    registry: SchemaRegistry | None = request.getfixturevalue("registry") if format == "avro" else None
    key, number = "0123456789 secret", 7654321
    flow = make_flow(
        registry,
        on_error="log",
        allow_unkeyed=True,
        tables=("people", "visits", "sales.orders"),
        topic_config={"max.message.bytes": "20000"},
        hash_key=key,
        table_options={
            "people": {"mask": {"email": "hash", "n": "hash", "scan": "hash"}},
            "visits": {"mask": {"email": "hash"}},
            "sales.orders": {"mask": {"email": "hash", "total": "hash"}},
        },
    )
    mail = f"tab\t{SECRET}\\\n€"
    people = f"INSERT INTO people SELECT %s, {{}}, {number}, {_LARGE}, {{}}, '2026-01-01'"
    with psycopg.connect(flow.dsn, autocommit=True) as connection:
        connection.execute(people.format(1, "'a'"), [mail])
        connection.execute(people.format(2, "repeat('x', 30000)"), [mail])
        connection.execute("INSERT INTO visits VALUES (1, %s), (2, NULL)", [mail])
        connection.execute("INSERT INTO sales.orders VALUES (1, %s, %s)", [mail, number])
        flow.create()
        assert flow.snapshot().dead_letters == 1
        connection.execute(people.format(3, "'c'"), [mail])
        connection.execute("UPDATE people SET scan_at = '2027-01-01' WHERE id <> 2")
        connection.execute("UPDATE people SET id = 33 WHERE id = 3")
        connection.execute("INSERT INTO sales.orders VALUES (2, %s, %s)", [str(number), number])
        connection.execute("UPDATE visits SET at = at + 10")
    asked = flow.ask("people", "sales.orders")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    limit_topic(flow, flow.topic("people"), 100_000)
    assert redrive.redrive(flow.pipeline).published
    verified(flow)

    def hashed(text: str) -> str:
        return hmac.digest(key.encode(), text.encode(), "sha256").hex()

    def rows(table: str) -> list[Any]:
        read = decoded(flow, registry, table) if registry else [(e.key, e.value) for e in flow.read(table)]
        return [value for _, value in read if value]

    scan = flow.execute("SELECT scan FROM people WHERE id = 1")[0][0]
    mine = {"email": hashed(mail), "n": hashed(str(number)), "scan": hashed(scan)}
    assert {each["id"] for each in rows("people")} == {1, 2, 3, 33}
    assert all(each.items() >= mine.items() for each in rows("people"))
    orders = {each["id"]: each for each in rows("sales.orders")}
    assert orders[1] == {"id": 1, "email": mine["email"], "total": mine["n"]}
    assert orders[2] == {"id": 2, "email": mine["n"], "total": mine["n"]}
    assert [each["email"] for each in rows("visits")].count(mine["email"]) == 2
    found = everything(flow)
    for secret in (SECRET, key):
        assert secret.encode() not in found and secret not in logged(caplog)
    assert number.to_bytes(4, "big") not in found


@pytest.mark.long
def test_another_key_of_hashes_is_refused_unless_it_is_meant(make_flow: MakeFlow) -> None:
    options = {"people": {"mask": {"email": "hash"}}}
    flow = make_flow(tables=("people",), table_options=options)
    flow.execute("INSERT INTO people VALUES ('e', 1, 1, '', 'n', NULL)")
    with pytest.raises(Refused, match="there is no key"):
        flow.create()
    flow.change(hash_key="0123456789abcdef")
    flow.create()
    flow.snapshot()
    flow.change(hash_key="0123456789abcdeF")
    flow.execute("INSERT INTO people VALUES ('e', 2, 1, '', 'n', NULL)")
    for run in (flow.stream, lambda: driver.run(flow.pipeline, driver.in_threads(flow.pipeline))):
        with pytest.raises(Refused, match="another one than at the last start"):
            run()
    assert len(flow.read("people")) == 1
    flow.change(hash_key_version=1)
    with pytest.raises(Refused, match="not started with hash_key_version = 1: at its last start it was 0"):
        driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    asked = flow.ask("people")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    verified(flow)
    flow.change(hash_key="0123456789abcdef")
    with pytest.raises(Refused, match="another one than at the last start"):
        flow.stream()


@pytest.mark.long
def test_a_table_is_not_added_with_another_key_of_hashes(make_flow: MakeFlow) -> None:
    """The settings of a creation that was refused, or has failed, are not those of the last start."""
    options = {"people": {"mask": {"email": "hash"}}}
    flow = make_flow(tables=("people",), table_options=options, hash_key="0123456789abcdef")
    flow.execute("INSERT INTO people VALUES ('e', 1, 1, '', 'n', NULL)")
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.change(hash_key="0123456789abcdeF", tables=("people", "sales.orders"))
    with pytest.raises(PreflightError, match="another one than at the last start"):
        flow.create()
    with pytest.raises(Refused, match="another one than at the last start"):
        flow.snapshot()
    flow.change(hash_key="0123456789abcdef")
    flow.create()
    flow.snapshot()
    flow.stream()
    verified(flow)


@pytest.mark.long
def test_the_settings_of_a_creation_that_fails_are_not_those_of_the_last_start(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(tables=("people",), table_options={})
    flow.create()
    flow.snapshot()
    flow.stream()
    saved = status.known(flow.pipeline).settings

    def fails(*_: Any, **__: Any) -> None:
        raise Refused("Something is in the way.")

    flow.change(tables=("people", "sales.orders"), transaction_topic="ends")
    with monkeypatch.context() as patch, pytest.raises(Refused, match="in the way"):
        patch.setattr(create.publication, "extend", fails)
        flow.create()
    assert status.known(flow.pipeline).settings == saved
    # the stream makes the topics that its settings name since its own last start
    flow.change(tables=("people",))
    flow.stream()
    assert Topics(flow.pipeline.kafka).describe([f"{flow.pipeline.slot}.ends"])


def test_options_are_compared_with_those_of_before_when_a_table_is_added(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("visits",), table_options={}, allow_unkeyed=True)
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute("ALTER TABLE visits ALTER at SET NOT NULL", "CREATE UNIQUE INDEX ON visits (at)")
    flow.change(tables=("visits", "people"), table_options={"visits": {"key": ["at"]}})
    with pytest.raises(PreflightError, match="was taken in without a key"):
        flow.create()
    flow.change(table_options={})
    flow.create()
    flow.snapshot()
    flow.stream()


@pytest.mark.long
def test_dates_and_times_have_the_forms_of_their_columns(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    """As a consumer in Python reads them, which cannot read infinity by its logical type."""
    flow = make_flow(
        registry,
        tables=("spans",),
        temporal="plain",
        table_options={"spans": {"temporal": {"day": "text", "times": "text", "l*": "logical"}}},
    )
    day, at = ("infinity", "12026-01-01 00:00:00+00")
    flow.execute(
        "CREATE TABLE spans (day date, id int, at timestamptz, times time[], logical date, PRIMARY KEY (day, id))",
        f"INSERT INTO spans VALUES ('{day}', 1, '{at}', '{{24:00,NULL}}', '2026-01-01')",
    )
    flow.create()
    flow.snapshot()
    flow.execute(
        f"INSERT INTO spans VALUES ('0044-03-15 BC', 2, '{at}', '{{09:30:00.5}}', '2026-01-02')",
        "UPDATE spans SET day = '-infinity' WHERE id = 1",
    )
    asked = flow.ask("spans")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    verified(flow)
    found = {each["id"]: each for _, each in decoded(flow, registry, "spans") if each}
    micros = 317_336_745_600_000_000
    assert found == {
        1: {"day": "-infinity", "id": 1, "at": micros, "times": ["24:00:00", None], "logical": date(2026, 1, 1)},
        2: {"day": "-000043-03-15", "id": 2, "at": micros, "times": ["09:30:00.500000"], "logical": date(2026, 1, 2)},
    }
    assert {"day": "infinity", "id": 1} in [key for key, each in decoded(flow, registry, "spans") if each is None]
    flow.change(table_options={"spans": {"temporal": {"id": "text"}}})
    with pytest.raises(PreflightError, match=r"No column with dates or times of public\.spans matches 'id'"):
        preflight.run(flow.pipeline)


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_columns_have_the_names_of_their_options(
    make_flow: MakeFlow, request: pytest.FixtureRequest, format: str
) -> None:
    registry: SchemaRegistry | None = request.getfixturevalue("registry") if format == "avro" else None
    flow = make_flow(
        registry,
        on_error="log",
        tables=("people",),
        topic_config={"max.message.bytes": "20000"},
        table_options={"people": {"rename": {"id": "number", "n": "note", "note": "n"}, "exclude": ["s*", "email"]}},
    )
    row = "INSERT INTO people (email, id, n, note) VALUES ('', {}, {}, {})"
    flow.execute(row.format(1, 1, "'one'"), row.format(2, 2, "repeat('x', 30000)"))
    flow.create()
    assert flow.snapshot().dead_letters == 1
    flow.execute(row.format(3, 3, "'three'"), "UPDATE people SET id = 11 WHERE id = 1")
    asked = flow.ask("people")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    (letter,) = [each.value for each in flow.dead_letters() if not each.snapshot][:1]
    assert letter["key"] == {"id": "2"} and letter["columns"].keys() == {"id", "n", "note"}
    limit_topic(flow, flow.topic("people"), 100_000)
    assert redrive.redrive(flow.pipeline).published
    verified(flow)
    found = decoded(flow, registry, "people") if registry else [(e.key, e.value) for e in flow.read("people")]
    assert {each["number"]: each for _, each in found if each} == {
        1: {"number": 1, "note": 1, "n": "one"},
        2: {"number": 2, "note": 2, "n": "x" * 30000},
        3: {"number": 3, "note": 3, "n": "three"},
        11: {"number": 11, "note": 1, "n": "one"},
    }
    assert ({"number": 1}, None) in found
    # a value may have another name from now on, the key may not
    names = {"id": "number", "n": "note", "note": "text"}
    flow.change(table_options={"people": {"rename": names, "exclude": ["s*", "email"]}})
    flow.execute(row.format(4, 4, "'four'"))
    flow.stream()
    found = decoded(flow, registry, "people") if registry else [(e.key, e.value) for e in flow.read("people")]
    assert found[-1] == ({"number": 4}, {"number": 4, "note": 4, "text": "four"})
    flow.change(table_options={"people": {"rename": {"id": "no"}, "exclude": ["s*", "email"]}})
    flow.execute(row.format(5, 5, "'five'"))
    with flow.streaming() as errors:
        until(lambda: errors or "or the name that the settings" in str(_problems(flow)), "the key is refused")


@pytest.mark.long
def test_a_column_that_gets_the_name_of_another_one_sets_its_table_aside(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("sales.orders",), table_options={"sales.*": {"rename": {"email": "mail"}}})
    flow.create()
    flow.snapshot()
    flow.execute(
        "INSERT INTO sales.orders VALUES (1, 'e', 1)",
        "ALTER TABLE sales.orders ADD COLUMN mail text DEFAULT 'm'",
        "INSERT INTO sales.orders VALUES (2, 'e', 1)",
    )
    with flow.streaming() as errors:
        until(lambda: "published as 'mail'" in str(_problems(flow)), "the table is red", failed=errors)
        until(lambda: flow.read("sales.orders"), "the row from before is published", failed=errors)
    assert [each.value for each in flow.read("sales.orders")] == [{"id": 1, "mail": "e", "total": 1}]
    flow.change(table_options={"sales.*": {"rename": {"email": "address"}}})
    with flow.streaming() as errors:
        now = {"id": 2, "address": "e", "total": 1, "mail": "m"}
        until(lambda: now in [e.value for e in flow.read("sales.orders")], "its rows are read", failed=errors)
    assert not errors
    flow.stream()  # the rest of them
    verified(flow)


def test_an_error_does_not_show_what_is_left_out(make_flow: MakeFlow) -> None:
    flow = make_flow(
        topic_config={"max.message.bytes": "20000"}, tables=("people",), table_options={"people": {"exclude": "email"}}
    )
    flow.execute(f"INSERT INTO people VALUES ('{SECRET}', 1, 1, '', repeat('x', 30000))")
    flow.create()
    with pytest.raises(RecordError) as raised:
        flow.snapshot()
    assert SECRET not in str(raised.value) and raised.value.row == "the row with id = 1"


def test_the_options_of_a_table_that_cannot_be_published_are_its_own(make_flow: MakeFlow) -> None:
    flow = make_flow(
        tables=("people", "sales.*"),
        topic_config={"max.message.bytes": "20000"},
        table_options={"people": {"on_error": "log"}},
    )
    flow.execute("INSERT INTO people VALUES ('e', 1, 1, '', repeat('x', 30000))")
    flow.create()
    assert flow.snapshot().dead_letters == 1
    flow.execute("INSERT INTO people VALUES ('e', 2, 1, '', repeat('x', 30000))")
    flow.execute("INSERT INTO sales.orders VALUES (1, repeat('x', 30000), 1)")
    with pytest.raises(RecordError, match=r"sales\.orders"):
        flow.stream()
    assert len(flow.dead_letters()) == 2


def test_tables_have_the_topics_of_their_options(make_flow: MakeFlow) -> None:
    flow = make_flow(
        tables=("people", "sales.*"),
        topic_config={"max.message.bytes": "65432"},
        table_options={
            "sales.*": {"topic": "{table}-of-{schema}", "partitions": 3, "exclude": "email"},
            "sales.orders": {"topic_config": {"cleanup.policy": "compact", "max.message.bytes": "54321"}},
        },
    )
    flow.execute("INSERT INTO sales.orders SELECT i, 'e', i FROM generate_series(1, 20) i")
    flow.create()
    topic = f"{flow.pipeline.topic_prefix}.orders-of-sales"
    made = Topics(flow.pipeline.kafka).describe([topic])[topic]
    assert (made.partitions, made.max_bytes, made.cleanup) == (3, 54321, "compact")
    flow.snapshot()
    flow.execute("UPDATE sales.orders SET total = 0")
    flow.stream()
    verified(flow)
    # what is decided by the table's first row cannot be changed: both are said
    flow.change(table_options={"sales.*": {"topic": "{table}", "partitions": 3}})
    with pytest.raises(StateError, match=rf"{topic}.*{flow.pipeline.topic_prefix}\.orders'"):
        flow.stream()
    flow.change(table_options={"sales.*": {"topic": "{table}-of-{schema}", "partitions": 4}})
    with pytest.raises(PreflightError, match="has 3 partitions, and table_options say 4"):
        preflight.run(flow.pipeline)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peoples": {"exclude": "email"}}, r"'peoples'.*did you mean 'people'"),
        ({"people": {"exclude": "emails"}}, r"people.*'emails'.*exclude.*did you mean 'email'"),
        ({"people": {"include": ["id", "nt*"]}}, r"'nt\*'.*include"),
        ({"people": {"exclude": "id"}}, r"'id' is in the key of public.people"),
        ({"people": {"include": "email"}}, r"'id' is in the key of public.people"),
        ({"people": {"include": ["id", "n"], "exclude": "scan*", "new_columns": "error"}}, "'email'.*neither"),
        ({"people": {"mask": {"n": "first:2"}}}, "'first:2' of column 'n' .* needs a text, and its type is integer"),
        ({"people": {"mask": {"scan_at": "hash"}}}, "needs a text, an integer or a uuid, and its type is date"),
        ({"people": {"mask": {"i*": "hash"}}}, "'hash' of column 'id' .* is in the key"),
        ({"people": {"mask": {"id": "hash"}}}, "'id' of the key .* published as a hash.* REPLICA IDENTITY FULL"),
        ({"people": {"mask": {"id": "null"}}}, "'null' of column 'id' .* is in the key"),
        ({"people": {"mask": {"emails": "null"}}}, "'emails', which mask .*did you mean 'email'"),
        ({"people": {"rename": {"email": "note"}}}, "'email' and 'note' of public.people .* published as 'note'"),
        ({"people": {"rename": {"email": "a", "scan": "a"}}}, "'email' and 'scan' .* published as 'a'"),
        ({"people": {"rename": {"ema*": "a"}}}, r"matches 'ema\*', which rename"),
        ({"people": {"topic": "one"}, "sales.*": {"topic": "one"}}, "both become topic"),
        ({"people": {"topic": "a.b"}, "sales.*": {"topic": "a_b"}}, "collides"),
        ({"people": {"topic": "_bottledwater_events"}}, "one of the pipeline's own topics"),
    ],
)
def test_options_that_cannot_be_are_found_before_anything_is_made(
    make_flow: MakeFlow, options: dict[str, Any], said: str
) -> None:
    flow = make_flow(tables=("people", "sales.orders"), table_options=options, hash_key="0123456789abcdef")
    with pytest.raises(PreflightError, match=said):
        flow.create()
    assert not [name for name in Topics(flow.pipeline.kafka).names() if name.startswith(flow.pipeline.topic_prefix)]


@pytest.mark.long
def test_columns_that_come_and_go(make_flow: MakeFlow) -> None:
    """Also columns that are left out move the others."""
    options = {
        "people": {"exclude": ["email", "s*"]},
        "sales.orders": {"include": ["id", "total"], "exclude": "email", "new_columns": "error"},
    }
    flow = make_flow(tables=("people", "sales.orders"), table_options=options)
    flow.create()
    flow.snapshot()
    flow.execute(
        f"INSERT INTO people SELECT '{SECRET}', 1, 1, {_LARGE}, {_LARGE.replace(SECRET, 'x')}, NULL",
        "INSERT INTO sales.orders VALUES (1, 'e', 1)",
        f"ALTER TABLE people ADD COLUMN secret text DEFAULT '{SECRET}'",
        "UPDATE people SET n = 2",
        "ALTER TABLE people DROP COLUMN email, ADD COLUMN open int DEFAULT 7",
        "UPDATE people SET n = 3",
        f"ALTER TABLE sales.orders ADD COLUMN secret text DEFAULT '{SECRET}'",
        "UPDATE sales.orders SET total = 2",
    )
    with flow.streaming() as errors:
        until(lambda: len(flow.read("people")) == 3, "the changes are published", failed=errors)
        until(lambda: "orders" in str(_problems(flow)), "the table is red", failed=errors)
    assert not errors
    assert [each.value and each.value["n"] for each in flow.read("people")] == [1, 2, 3]
    assert flow.read("people")[-1].value["open"] == 7
    assert [each.value for each in flow.read("sales.orders")] == [{"id": 1, "total": 1}]
    assert SECRET.encode() not in everything(flow)
    options["people"]["exclude"] = "s*"
    options["sales.orders"]["exclude"] = ["email", "secret"]
    flow.change(table_options=options)
    with flow.streaming() as errors:
        now = {"id": 1, "total": 2}
        until(lambda: now in [e.value for e in flow.read("sales.orders")], "its rows are read", failed=errors)
    assert not errors, errors
    flow.stream()  # the rest of them
    assert not _problems(flow)
    verified(flow)
    assert SECRET.encode() not in everything(flow)


@pytest.mark.long
def test_a_new_name_does_not_show_what_is_left_out_by_the_old_one(make_flow: MakeFlow) -> None:
    options = {"people": {"exclude": ["email", "scan*", "note"]}}
    flow = make_flow(tables="*", table_options=options, allow_unkeyed=True)
    flow.create()
    flow.snapshot()
    row = f"INSERT INTO {{}} VALUES ('{SECRET}', {{}}, 1, '{SECRET}', '{SECRET}', NULL)"
    flow.execute(row.format("people", 1), "ALTER TABLE people RENAME TO staff", row.format("staff", 2))
    with flow.streaming() as errors:
        until(lambda: "staff" in str(_problems(flow)), "the table is red", failed=errors)
        flow.execute(row.format("staff", 3))
        flow.streams()
    flow.stream()
    assert not errors and "of its new name" in str(_problems(flow))
    assert SECRET.encode() not in everything(flow)
    flow.change(table_options={"staff": options["people"]})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    verified(flow)
    assert SECRET.encode() not in everything(flow)


def test_a_new_name_of_a_column_does_not_show_what_is_hidden_by_the_old_one(make_flow: MakeFlow) -> None:
    options = {"exclude": ["email", "scan*"], "mask": {"note": "null"}}
    flow = make_flow(tables=("people",), table_options={"people": options})
    flow.create()
    flow.snapshot()
    row = f"INSERT INTO people VALUES ('{SECRET}', {{}}, 1, '{SECRET}', '{SECRET}', NULL)"
    flow.execute(row.format(1), "ALTER TABLE people RENAME scan TO scanned", row.format(2))
    flow.stream()
    assert not _problems(flow) and len(flow.read("people")) == 2
    flow.execute("ALTER TABLE people RENAME email TO mail", row.format(3), "ALTER TABLE people RENAME note TO remark")
    with flow.streaming() as errors:
        until(lambda: "was 'email'" in str(_problems(flow)), "the table is red", failed=errors)
        flow.execute(row.format(4))
        flow.streams()
    flow.stream()
    assert not errors and "Name it in exclude or mask" in str(_problems(flow))
    assert SECRET.encode() not in everything(flow)
    flow.change(table_options={"people": {"exclude": ["email", "mail", "scan*"], "mask": options["mask"]}})
    flow.stream()
    assert "was 'note'" in str(_problems(flow))
    flow.change(table_options={"people": {"exclude": ["mail", "scan*"], "mask": {"note": "null", "remark": "null"}}})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    verified(flow)
    assert {each.value["id"] for each in flow.read("people")} == {1, 2, 3, 4}
    assert SECRET.encode() not in everything(flow)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "options", [{"exclude": ["secret*"]}, {"mask": {"secret*": "null"}}], ids=["left out", "masked"]
)
def test_a_column_that_was_added_since_is_hidden_by_the_name_that_it_had(
    make_flow: MakeFlow, options: dict[str, Any]
) -> None:
    flow = make_flow(tables=("sales.orders",), table_options={"sales.orders": options})
    flow.execute("ALTER TABLE sales.orders ADD secret text")
    flow.create()
    flow.snapshot()
    row = f"INSERT INTO sales.orders VALUES ({{}}, 'e', 1, 'x', '{SECRET}')"
    with flow.streaming() as errors:
        flow.execute("ALTER TABLE sales.orders ADD secret_a text", row.format(1))
        until(lambda: "secret_a" in str(_recorded(flow)), "its name is recorded", failed=errors)
        flow.execute("ALTER TABLE sales.orders DROP secret_a, ADD secret_b text")
        until(lambda: "secret_b" in str(_recorded(flow)), "its name is recorded", failed=errors)
        flow.execute(row.format(2), "ALTER TABLE sales.orders RENAME secret_b TO remark", row.format(3))
        until(lambda: "was 'secret_b'" in str(_problems(flow)), "the table is red", failed=errors)
        flow.execute(row.format(4))
        flow.streams()
    flow.stream()
    assert not errors and "was 'secret_b'" in str(_problems(flow))
    assert SECRET.encode() not in everything(flow)
    hidden = (
        {"exclude": ["secret*", "remark"]} if "exclude" in options else {"mask": {"secret*": "null", "remark": "null"}}
    )
    flow.change(table_options={"sales.orders": hidden})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    verified(flow)
    assert {each.value["id"] for each in flow.read("sales.orders")} == {1, 2, 3, 4}
    assert SECRET.encode() not in everything(flow)


def test_a_column_that_came_and_got_another_name_between_two_looks_is_not_shown(make_flow: MakeFlow) -> None:
    """Nothing that is recorded has the name that it had, so a person decides."""
    flow = make_flow(tables=("sales.orders",), table_options={"sales.orders": {"exclude": "secret*"}})
    flow.execute("ALTER TABLE sales.orders ADD secret text")
    flow.create()
    flow.snapshot()
    row = f"INSERT INTO sales.orders VALUES ({{}}, 'e', 1, 'x', '{SECRET}')"
    flow.execute(
        "ALTER TABLE sales.orders ADD secret_a text",
        row.format(1),
        "ALTER TABLE sales.orders RENAME secret_a TO remark",
        row.format(2),
    )
    for _ in range(2):
        flow.stream()
        assert "was 'secret_a'" in str(_problems(flow)) and "resume-table" in str(_problems(flow))
    assert SECRET.encode() not in everything(flow)


def test_a_hidden_column_that_changes_its_name_for_a_visible_one_is_not_shown(make_flow: MakeFlow) -> None:
    """PostgreSQL describes the table to the stream as before."""
    flow = make_flow(tables=("people",), table_options={"people": {"exclude": ["email", "scan", "scan_at"]}})
    flow.execute("ALTER TABLE people ADD nick text, ALTER email DROP NOT NULL, DROP email, ADD email text")
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(f"INSERT INTO people (id, nick, email) VALUES (1, 'a', '{SECRET}')")
        until(lambda: len(flow.read("people")) == 1, "the row is published", failed=errors)
        flow.transaction(
            "ALTER TABLE people DROP nick",
            "ALTER TABLE people RENAME email TO nick",
            "ALTER TABLE people ADD email text",
            "UPDATE people SET email = lower(nick)",
        )
        until(lambda: "was 'email'" in str(_problems(flow)), "the table is red", failed=errors)
        flow.streams()
    flow.stream()
    assert not errors and "was 'email'" in str(_problems(flow))
    assert SECRET.encode() not in everything(flow)


@pytest.mark.some(1)
@pytest.mark.parametrize("again", ["stream", "create"])
def test_a_detached_partition_hides_what_its_table_has_hidden(make_flow: MakeFlow, again: str) -> None:
    options = {"exclude": ["email"], "mask": {"note": "null"}, "where": "id > 0"}
    flow = make_flow(tables="*", table_options={"events": options}, allow_unkeyed=True)
    flow.execute(
        "CREATE TABLE events (id int PRIMARY KEY, email text, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (-9) TO (9)",
    )
    rows = f"INSERT INTO {{}} VALUES ({{}}, '{SECRET}', '{SECRET}'), (-{{}}, 'e', '{SECRET}')"
    flow.execute(rows.format("events", 1, 1))
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE events DETACH PARTITION events_1", rows.format("events_1", 2, 2))
    if again == "create":
        flow.create()
        flow.snapshot()
    with flow.streaming() as errors:
        until(lambda: "events_1 was public.events" in str(_problems(flow)), "the table is red", failed=errors)
        request_id = flow.ask("events", sweep=True)
        until(lambda: flow.reported(request_id).state == "finished", "its rows are gone", failed=errors)
        flow.execute(rows.format("events_1", 3, 3), "ALTER TABLE events_1 RENAME email TO mail")
        flow.streams()
    flow.execute("ALTER TABLE events_1 RENAME mail TO email")
    for _ in range(2):
        flow.stream()
        assert "events_1 was public.events" in str(_problems(flow))
    assert not errors and SECRET.encode() not in everything(flow)
    flow.change(table_options={"events_1": options})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    verified(flow)
    assert {each.value["id"] for each in flow.read("events_1") if each.value} == {1, 2, 3}
    assert SECRET.encode() not in everything(flow)


def test_a_new_name_of_a_key_does_not_show_what_its_hash_hides(make_flow: MakeFlow) -> None:
    hidden = {"exclude": ["email"], "mask": {"id": "hash"}}
    flow = make_flow(tables=("sales.orders",), table_options={"sales.orders": hidden}, hash_key="0123456789abcdef")
    flow.create()
    flow.execute("INSERT INTO sales.orders VALUES (918273645, 'e', 1)")
    flow.snapshot()
    flow.execute("ALTER TABLE sales.orders RENAME id TO number", "UPDATE sales.orders SET total = 2")
    with flow.streaming() as errors:
        until(lambda: "was 'id'" in str(_problems(flow)), "the table is red", failed=errors)
        flow.streams()
    flow.stream()
    assert not errors and b"918273645" not in everything(flow)
    flow.change(table_options={"sales.orders": {**hidden, "mask": {"id": "hash", "number": "hash"}}})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    verified(flow)
    assert b"918273645" not in everything(flow)


def test_a_snapshot_does_not_show_what_is_left_out_by_the_name_of_before(make_flow: MakeFlow) -> None:
    hidden = {"exclude": ["email", "scan*", "note"]}
    flow = make_flow(tables="*", table_options={"people": hidden}, allow_unkeyed=True)
    flow.execute(f"INSERT INTO people VALUES ('{SECRET}', 1, 1, '{SECRET}', '{SECRET}', NULL)")
    flow.create()
    flow.execute("ALTER TABLE people RENAME TO staff")
    with pytest.raises(Refused, match=r"public\.staff was public\.people.* Put its options under the new name"):
        flow.snapshot()
    flow.change(table_options={"people": hidden, "staff": hidden})
    flow.snapshot()
    assert [each.value for each in flow.read("people")] == [{"id": 1, "n": 1}]
    assert SECRET.encode() not in everything(flow)


@pytest.mark.long
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_hidden_table_whose_name_another_one_gets_is_not_shown(make_flow: MakeFlow, exchanged: bool) -> None:
    options = {"people": {"exclude": ["email", "scan*"], "mask": {"note": "null"}, "where": "id > 0"}}
    flow = make_flow(tables="*", table_options=options, allow_unkeyed=True)
    flow.execute("CREATE TABLE staff (LIKE people INCLUDING ALL)") if exchanged else None
    flow.create()
    flow.snapshot()
    row = f"INSERT INTO {{}} VALUES ('{SECRET}', {{}}, 1, '{SECRET}', '{SECRET}', NULL)"
    flow.execute(row.format("people", 1), row.format("people", -1))
    other = "ALTER TABLE staff RENAME TO people" if exchanged else "CREATE TABLE people (LIKE moved INCLUDING ALL)"
    renamed = "ALTER TABLE moved RENAME TO staff"
    flow.transaction("ALTER TABLE people RENAME TO moved", other, *([renamed] if exchanged else []))
    name = "staff" if exchanged else "moved"
    with flow.streaming() as errors:
        until(lambda: f"{name} was public.people" in str(_problems(flow)), "the table is red", failed=errors)
        flow.execute(row.format(name, 2), row.format("people", 3))
        until(lambda: {"id": 3, "n": 1, "note": None} in [e.value for e in flow.read("people")], "taken in")
    flow.stream()  # and a look at each start
    flow.create()
    flow.stream()
    assert f"{name} was public.people" in str(_problems(flow))
    assert SECRET.encode() not in everything(flow)
    flow.change(table_options=options | {name: options["people"]})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    verified(flow)
    assert {1, 2} <= {each.value["id"] for each in flow.read(name) if each.value}
    assert SECRET.encode() not in everything(flow)


def test_a_large_value_is_found_beside_columns_that_are_left_out(make_flow: MakeFlow) -> None:
    """They move the others, whose catalog rows are compared where they were written since."""
    flow = make_flow(tables=("people",), table_options={"people": {"exclude": ["email", "n"]}})
    flow.execute(f"INSERT INTO people SELECT 'e', 1, 1, {_LARGE}, 'note', NULL")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE people SET scan_at = '2026-01-01'", "ALTER TABLE people ALTER scan SET STATISTICS 10")
    flow.stream()
    before, after = (each.value["scan"] for each in flow.read("people"))
    assert before == after and SECRET in after


def _recorded(flow: Flow) -> list[Any]:
    """The columns that the state knows, with their numbers."""
    return [each.table.sent for each in read_state(flow.pipeline, state_topic(flow)).tables.values()]


def _problems(flow: Flow) -> Any:
    job = flow.job
    return job and [str(each) for each in job.problems]


def _with_a_letter(make_flow: MakeFlow, **options: Any) -> Flow:
    """A pipeline of a table with these options, with a dead letter that has fitted into the topic since."""
    flow = make_flow(
        on_error="log",
        tables=("people",),
        table_options={"people": options} if options else {},
        topic_config={"max.message.bytes": "20000"},
    )
    flow.create()
    flow.snapshot()
    flow.execute(f"INSERT INTO people VALUES ('{SECRET}', 1, 1, '', repeat('x', 30000))")
    flow.stream()
    limit_topic(flow, flow.topic("people"), 100_000)
    return flow


def test_what_is_left_out_at_the_next_start_is_not_redriven(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    flow.change(table_options={"people": {"exclude": "emails"}})
    for run in (flow.stream, lambda: redrive.redrive(flow.pipeline)):
        with pytest.raises(PreflightError, match="did you mean 'email'"):
            run()
    flow.change(table_options={"people": {"exclude": "email", "mask": {"note": "first:3", "n": "null"}}})
    assert redrive.redrive(flow.pipeline).published == 1
    assert [each.value for each in flow.read("people")] == [
        {"id": 1, "n": None, "scan": "", "note": "xxx", "scan_at": None}
    ]
    verified(flow)
    assert SECRET not in json.dumps([each.value for each in flow.read("people")])


@pytest.mark.long
def test_a_letter_is_not_published_behind_a_row_that_shows_more(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow, exclude=["n"], mask={"email": "first:3"})
    flow.change(table_options={"people": {"exclude": ["n"], "mask": {"email": "first:5"}}})
    # the letter has three characters
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=1)
    flow.change(table_options={"people": {"mask": {"email": "first:3"}}})
    drop(flow.pipeline, when="always")
    flow.create()
    flow.snapshot()
    # the new snapshot has published its row
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=1)
    assert flow.read("people")[-1].value["n"] == 1
    flow.change(table_options={"people": {"exclude": ["n"], "mask": {"email": "first:3"}}})
    flow.execute("UPDATE people SET note = repeat('y', 200000)")
    flow.stream()
    limit_topic(flow, flow.topic("people"), 1_000_000)
    flow.change(table_options={"people": {"mask": {"email": "first:3"}}})
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=1)
    assert flow.read("people")[-1].value["n"] == 1
    # the advice
    asked = flow.ask("people")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=1)
    verified(flow)


def test_a_letter_is_redriven_by_the_options_of_its_tables_new_name(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    flow.execute("ALTER TABLE people RENAME TO staff")
    flow.change(table_options={"staff": {"exclude": ["email", "note"]}})
    assert redrive.redrive(flow.pipeline).published == 1
    assert [each.value for each in flow.read("people")] == [{"id": 1, "n": 1, "scan": "", "scan_at": None}]


@pytest.mark.long
def test_the_rules_of_a_table_that_is_removed_from_the_settings_stay(make_flow: MakeFlow) -> None:
    """It is still streamed, and would be in the clear without them; so would one that was renamed."""
    hidden = {"exclude": "email"}
    flow = make_flow(tables=("people", "sales.*"), table_options={"people": hidden, "sales.orders": hidden})
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE sales.orders RENAME TO invoices")
    flow.change(tables=("sales.*",))
    preflight.run(flow.pipeline)
    flow.change(table_options={"people": hidden, "sales.orders": hidden, "sales.invoices": hidden})
    preflight.run(flow.pipeline)
    flow.execute(f"INSERT INTO people VALUES ('{SECRET}', 1, 1, '', '', NULL)")
    flow.stream()
    assert [each.value["id"] for each in flow.read("people")] == [1] and SECRET.encode() not in everything(flow)
    options = flow.pipeline.table_options
    flow.change(table_options={"sales.orders": hidden, "sales.invoices": hidden})
    with pytest.raises(
        PreflightError, match="people is still streamed although the settings do not name it"
    ) as refused:
        flow.stream()
    assert "take it out of the publication, too, and start the stream once" in str(refused.value)
    flow.change(tables=("people", "sales.*"))
    flow.stream()  # it is meant
    flow.change(tables=("sales.*",), table_options=options)
    flow.execute(f"ALTER PUBLICATION {flow.pipeline.slot} DROP TABLE people")
    flow.stream()
    flow.change(table_options={"sales.orders": hidden, "sales.invoices": hidden})
    preflight.run(flow.pipeline)  # it is not followed any more
    flow.change(table_options=options)
    flow.execute("DROP TABLE people")
    with pytest.raises(PreflightError, match="No table of the pipeline matches 'people'"):
        preflight.run(flow.pipeline)
