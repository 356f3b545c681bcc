"""Large values that an update left unchanged are not in the stream: where they are taken from, and where they are
not."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from airflow_bottledwater.errors import Outage, RecordError
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.publish.current import Cells, CurrentRows
from airflow_bottledwater.publish.toast import Completed, ToastResolver
from airflow_bottledwater.stream.publisher import StreamPublisher
from tests.support.topics import MakeFlow, Message, assert_exactly_once_in_order

#: 9 kB in a column that is never compressed: stored out of line
LARGE = "repeat('{}', 9000)"


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"skip_snapshot": True}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE w (id int PRIMARY KEY, v int, big text)",
        "ALTER TABLE w ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO w SELECT g, 0, {LARGE.format('o')} || g FROM generate_series(1, 5) g",
    )


def large(message: Message) -> str:
    """The letter that the large value is made of, and what follows it."""
    big = message.value["big"]
    return str(big[0] + big[9000:])


def test_a_value_of_another_row_that_has_the_key_today_is_not_moved_on(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.execute(
        "UPDATE w SET v = 100 WHERE id = 3",
        "UPDATE w SET id = 575 WHERE id = 3",
        f"INSERT INTO w VALUES (3, 1, {LARGE.format('n')})",
    )
    flow.stream()
    of_moved = [m for m in flow.read("w") if m.key == {"id": 575}]
    assert [large(m) for m in of_moved] == ["o3"]
    assert [m.toast for m in flow.read("w")] == ["reread", "", "reread", ""]  # the second is the old key's tombstone


def test_all_values_of_a_batch_are_read_by_one_query_a_table(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.execute("UPDATE w SET v = id * 10", "UPDATE w SET v = v + 1")
    flow.stream()
    messages = flow.read("w")
    assert [(m.value["v"], large(m)) for m in messages] == [
        (k * 10 + n, f"o{k}") for n in (0, 1) for k in range(1, 6)
    ]  # fmt: skip
    assert [m.toast for m in messages] == ["reread"] * 10


def test_a_policy_that_hides_rows_is_an_error_and_drops_none(make_flow: MakeFlow) -> None:
    flow = make_flow()
    role = f"cdc_{flow.pipeline.slot}"
    database = flow.execute("SELECT current_database()")[0][0]
    flow.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'",
        f"GRANT CREATE ON DATABASE {database} TO {role}",
        f"ALTER TABLE w OWNER TO {role}",
        f"GRANT USAGE, CREATE ON SCHEMA public TO {role}",
    )
    flow.change(postgres=make_conninfo(flow.dsn, user=role, password="secret"))
    flow.create()
    flow.execute(
        "ALTER TABLE w ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE w FORCE ROW LEVEL SECURITY",
        "CREATE POLICY hide ON w USING (id <> 3)",
        "UPDATE w SET v = 1 WHERE id = 3",
    )
    # a right that was revoked may be granted again
    flow.change(outage_timeout=2.0)
    with pytest.raises(Outage, match="BYPASSRLS"):
        flow.stream()
    assert flow.read("w") == []
    # what the error advises
    flow.execute(f"ALTER ROLE {role} BYPASSRLS")
    counters = flow.stream()
    assert (counters["superseded"], [large(m) for m in flow.read("w")]) == (0, ["o3"])
    flow.execute(f"ALTER TABLE w OWNER TO {flow.execute('SELECT current_user')[0][0]}")


@pytest.mark.some(1)
@pytest.mark.parametrize("altered", ["bytea USING big::bytea", "varchar(20000)"])
def test_a_value_of_another_type_than_the_changes_is_a_record_error(make_flow: MakeFlow, altered: str) -> None:
    flow = make_flow(on_error="log")
    flow.create()
    flow.execute("UPDATE w SET v = 1 WHERE id = 3", f"ALTER TABLE w ALTER big TYPE {altered}", "UPDATE w SET v = 2")
    counters = flow.stream()
    assert (counters["dead_letters"], counters["superseded"]) == (1, 0)
    (letter,) = flow.dead_letters()
    assert "the type of column 'big' was altered since" in letter.value["error"]
    assert [m.value["v"] for m in flow.read("w")] == [2] * 5


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "altered",
    [
        ["ALTER TABLE w DROP big", f"ALTER TABLE w ADD big text DEFAULT {LARGE.format('n')}"],
        ["ALTER TABLE w RENAME big TO former", "ALTER TABLE w RENAME second TO big"],
        [
            "ALTER TABLE w RENAME big TO aside",
            "ALTER TABLE w RENAME second TO big",
            "ALTER TABLE w RENAME aside TO second",
        ],
        ["ALTER TABLE w DROP big", "ALTER TABLE w RENAME second TO big"],
        [
            "ALTER TABLE w DROP big, DROP second",
            f"ALTER TABLE w ADD big text DEFAULT {LARGE.format('n')}, ADD second text",
        ],
    ],
    ids=["made again", "replaced", "swapped", "dropped and replaced", "both made again"],
)
def test_a_value_of_a_column_that_only_has_the_name_of_the_changes_is_a_record_error(
    make_flow: MakeFlow, altered: list[str]
) -> None:
    flow = make_flow(on_error="log")
    flow.execute("ALTER TABLE w ADD second text", f"UPDATE w SET second = {LARGE.format('s')}")
    flow.create()
    flow.execute("UPDATE w SET v = 1 WHERE id = 3", *altered, f"UPDATE w SET v = 2, big = {LARGE.format('m')} || id")
    counters = flow.stream()
    assert (counters["dead_letters"], counters["superseded"]) == (1, 0)
    (letter,) = flow.dead_letters()
    assert "column 'big' is another one since" in letter.value["error"]
    assert sorted((m.value["v"], large(m)) for m in flow.read("w")) == [(2, f"m{k}") for k in range(1, 6)]
    # from now on it is the changes' column again
    flow.execute("UPDATE w SET v = 3")
    assert flow.stream()["dead_letters"] == 1  # in all
    assert sorted(large(m) for m in flow.read("w") if m.value["v"] == 3) == [f"m{k}" for k in range(1, 6)]


@pytest.mark.parametrize(
    "altered",
    [
        ["ALTER TABLE w ALTER big TYPE text USING upper(big)"],
        ["ALTER TABLE w DROP big", "ALTER TABLE w ADD big text DEFAULT upper(incompressible())"],
    ],
    ids=["written anew", "made again"],
)
def test_a_value_of_before_an_alter_that_writes_all_rows_is_not_taken_from_the_batch(
    make_flow: MakeFlow, altered: list[str]
) -> None:
    flow = make_flow()
    flow.execute(
        "CREATE FUNCTION incompressible() RETURNS text LANGUAGE sql VOLATILE AS $$"
        " SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 300) $$"
    )
    flow.create()
    # PostgreSQL announces the same columns again
    flow.execute("INSERT INTO w VALUES (6, 0, incompressible())", *altered, "UPDATE w SET v = 1 WHERE id = 6")
    flow.stream()
    before, after = flow.read("w")
    ((now,),) = flow.execute("SELECT big FROM w WHERE id = 6")
    assert (before.value["big"].islower(), after.value["big"] == now, after.toast) == (True, True, "reread")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "altered",
    [
        ["ALTER TABLE w ALTER big SET NOT NULL, ALTER big SET DEFAULT 'x', ALTER big SET STATISTICS 10"],
        ["ALTER TABLE w DROP former", "ALTER TABLE w ADD former text", "ALTER TABLE w ALTER big SET STATISTICS 10"],
        ["ALTER TABLE w ADD extra text", "ALTER TABLE w DROP extra", "ALTER TABLE w ALTER big SET STATISTICS 10"],
        ["ALTER TABLE w RENAME v TO former_v", "ALTER TABLE w ALTER big SET STATISTICS 10"],
        ["ALTER TABLE w RENAME big TO aside", "ALTER TABLE w RENAME aside TO big"],
        ["ALTER TABLE w ALTER made SET STATISTICS 10, ALTER big SET STATISTICS 10", "VACUUM FREEZE pg_attribute"],
        ["ALTER TABLE w DROP made, ALTER big SET STATISTICS 10"],
        ["ALTER TABLE w ALTER made DROP EXPRESSION, ALTER big SET STATISTICS 10"],
        # with another description of the table in between
        [
            "ALTER TABLE w ADD late int",
            "UPDATE w SET v = 1 WHERE id = 3",
            "ALTER TABLE w DROP made, ALTER big SET STATISTICS 10",
        ],
    ],
    ids=["altered", "another made again", "another made and dropped", "another renamed", "renamed back", "frozen",
         "a generated one dropped", "one no longer generated", "dropped later"],
)  # fmt: skip
def test_a_value_of_a_column_that_is_still_the_changes_is_read(make_flow: MakeFlow, altered: list[str]) -> None:
    flow = make_flow()
    # with columns that are not sent before and behind it
    flow.execute(
        "ALTER TABLE w DROP big, ADD gone int, ADD made int GENERATED ALWAYS AS (v + 1) STORED, ADD former text",
        "ALTER TABLE w DROP gone, ADD big text, ADD last int GENERATED ALWAYS AS (v + 2) STORED",
        "ALTER TABLE w ALTER big SET STORAGE EXTERNAL",
        f"UPDATE w SET big = {LARGE.format('o')} || id",
    )
    flow.create()
    flow.execute("UPDATE w SET v = 1 WHERE id = 3", *altered)
    flow.stream()
    assert {large(m) for m in flow.read("w")} == {"o3"}


def test_a_column_behind_one_that_was_generated_is_not_taken_for_its_neighbour(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log")
    flow.execute(
        "ALTER TABLE w DROP big, ADD made int GENERATED ALWAYS AS (v + 1) STORED, ADD first text, ADD big text",
        "ALTER TABLE w ALTER big SET STORAGE EXTERNAL",
        f"UPDATE w SET first = 'small', big = {LARGE.format('o')}",
    )
    flow.create()
    altered = ["ALTER TABLE w DROP made, DROP big", "ALTER TABLE w RENAME first TO big"]
    flow.execute("UPDATE w SET v = 1 WHERE id = 3", *altered)
    assert flow.stream()["dead_letters"] == 1
    (letter,) = flow.dead_letters()
    assert "column 'big' is another one since" in letter.value["error"]


def test_a_table_that_was_renamed_is_found_and_one_that_took_its_name_is_not(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="w")
    flow.create()
    flow.execute(
        "UPDATE w SET v = 1 WHERE id = 3",
        "CREATE TABLE other (LIKE w INCLUDING ALL)",
        f"INSERT INTO other VALUES (3, 7, {LARGE.format('x')})",
        "ALTER TABLE w RENAME TO before",
        "ALTER TABLE other RENAME TO w",
    )
    flow.stream()
    # behind it, the topic goes on with the rows of the table that bears the name
    assert [large(m) for m in flow.read("w")] == ["o3", "x"]


def test_a_row_whose_key_has_another_type_today_is_a_record_error(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.execute("UPDATE w SET v = 1 WHERE id = 3", "ALTER TABLE w ALTER id TYPE text")
    with pytest.raises(RecordError, match="a key column was dropped, renamed or given another type"):
        flow.stream()


def test_a_row_whose_key_has_a_label_that_was_renamed_is_a_record_error_and_others_are_found(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow(on_error="log")
    flow.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE k (id mood, n int, v int, big text, PRIMARY KEY (n, id))",
        "ALTER TABLE k ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO k SELECT CASE WHEN g = 2 THEN 'sad' ELSE 'ok' END::mood, g, 0, {LARGE.format('a')} "
        "FROM generate_series(1, 5) g",
    )
    flow.create()
    flow.execute("UPDATE k SET v = 1", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
    counters = flow.stream()
    assert (counters["dead_letters"], counters["superseded"]) == (1, 0)
    (letter,) = flow.dead_letters()
    assert "by its key, in which a label or an attribute was renamed, added or dropped since" in letter.value["error"]
    assert [m.key["n"] for m in flow.read("k") if m.pos] == [1, 3, 4, 5]
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=1)
    # the table is read again, too
    assert flow.compare("k").equal


@pytest.mark.parametrize("key", ["pair", "int[]"])
def test_a_row_is_found_by_a_key_that_is_published_as_text(make_flow: MakeFlow, key: str) -> None:
    flow = make_flow(composites="text", arrays="text")
    flow.execute(
        "CREATE TYPE pair AS (a int, b text)",
        f"CREATE TABLE k (id {key} PRIMARY KEY, v int, big text)",
        "ALTER TABLE k ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO k VALUES ({'(1, 2)' if key == 'pair' else 'ARRAY[1, 2]'}, 0, {LARGE.format('o')})",
    )
    flow.create()
    flow.execute("UPDATE k SET v = 1")
    assert flow.stream()["superseded"] == 0
    assert [(m.value["v"], large(m)) for m in flow.read("k")] == [(1, "o")]


def _type_without_binary_form(name: str, like: str, storage: str) -> list[str]:
    made = [
        f"CREATE TYPE {name}",
        f"CREATE FUNCTION {name}_in(cstring) RETURNS {name} LANGUAGE internal IMMUTABLE STRICT AS '{like}in'",
        f"CREATE FUNCTION {name}_out({name}) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS '{like}out'",
        f"CREATE TYPE {name} (INPUT = {name}_in, OUTPUT = {name}_out, {storage})",
    ]
    if like != "int4":
        return made
    operators = {"<": "lt", "<=": "le", "=": "eq", ">=": "ge", ">": "gt"}
    for operator, function in operators.items():
        made += [
            f"CREATE FUNCTION {name}_{function}({name}, {name}) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS "
            f"'int4{function}'",
            f"CREATE OPERATOR {operator} (LEFTARG = {name}, RIGHTARG = {name}, FUNCTION = {name}_{function})",
        ]
    places = ", ".join(f"OPERATOR {n} {operator}" for n, operator in enumerate(operators, 1))
    return [
        *made,
        f"CREATE FUNCTION {name}_cmp({name}, {name}) RETURNS int LANGUAGE internal IMMUTABLE STRICT AS 'btint4cmp'",
        f"CREATE OPERATOR CLASS {name}_ops DEFAULT FOR TYPE {name} USING btree AS {places}, FUNCTION 1 "
        f"{name}_cmp({name}, {name})",
    ]


@pytest.mark.some(1)
@pytest.mark.parametrize("key", ["int", "odd_key"])
def test_types_that_are_sent_as_text_are_read_again_as_text(make_flow: MakeFlow, key: str) -> None:
    flow = make_flow()
    flow.execute(
        *_type_without_binary_form("odd_key", "int4", "LIKE = int4"),
        *_type_without_binary_form("odd", "text", "INTERNALLENGTH = VARIABLE, STORAGE = external"),
        f"CREATE TABLE k (id {key} PRIMARY KEY, v int, big odd, large text)",
        "ALTER TABLE k ALTER large SET STORAGE EXTERNAL",
        f"INSERT INTO k VALUES ('1', 0, '{'o' * 9000}', repeat('l', 9000)), ('2', 0, NULL, repeat('l', 9000))",
    )
    flow.create()
    flow.execute("UPDATE k SET v = 1")
    flow.stream()
    assert sorted((str(m.key["id"]), m.value["v"], m.value["big"], m.value["large"]) for m in flow.read("k")) == [
        ("1", 1, "o" * 9000, "l" * 9000),
        ("2", 1, None, "l" * 9000),
    ]


#: the smallest that can be set
_MOST = 65536


@pytest.mark.parametrize(
    "updated",
    [
        pytest.param("many rows", marks=pytest.mark.long),
        pytest.param("a row again and again", marks=pytest.mark.long),
        "rows of several tables",
    ],
)
def test_values_that_do_not_fit_into_memory_are_published_in_parts_of_their_transaction(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, updated: str
) -> None:
    flow = make_flow(max_transaction_bytes=_MOST)
    flow.execute(
        f"INSERT INTO w SELECT g, 0, {LARGE.format('o')} || g FROM generate_series(6, 100) g",
        "CREATE TABLE w2 (id int[] PRIMARY KEY, v int, big jsonb)",
        "INSERT INTO w2 SELECT ARRAY[id], v, jsonb_build_object('big', (SELECT string_agg(md5(n::text), '') FROM "
        "generate_series(id, id + 500) n)) FROM w",
    )
    flow.create()
    statements = {
        "many rows": ["UPDATE w SET v = id"],
        "a row again and again": [f"UPDATE w SET v = {n} WHERE id = 3" for n in range(1, 101)],
        "rows of several tables": ["UPDATE w SET v = id", "UPDATE w2 SET v = id[1]", "UPDATE w SET v = id * 2"],
    }
    flow.transaction(*statements[updated])
    sizes, read = [0], [0]
    lead, complete = ToastResolver.leading, ToastResolver.complete
    fetch, send = CurrentRows.fetch, StreamPublisher._send

    def leading(resolver: ToastResolver, batch: Any, programs: Any) -> Any:
        resolver._value_bytes = 500.0  # always too little
        return lead(resolver, batch, programs)

    def completed(resolver: ToastResolver, batch: Any, programs: Any) -> Completed:
        done = complete(resolver, batch, programs)
        sizes.append(done.batch.data.size - batch.data.size)
        return done

    def fetched(current: CurrentRows, *arguments: Any, **options: Any) -> Cells:
        cells = fetch(current, *arguments, **options)
        read.append(cells.data.size)
        return cells

    def sent(publisher: StreamPublisher, encoded: Any) -> None:
        if publisher.position.ordinal > 20:
            raise KeyboardInterrupt
        send(publisher, encoded)

    monkeypatch.setattr(ToastResolver, "leading", leading)
    monkeypatch.setattr(ToastResolver, "complete", completed)
    monkeypatch.setattr(CurrentRows, "fetch", fetched)
    with monkeypatch.context() as patch:
        patch.setattr(StreamPublisher, "_send", sent)
        with pytest.raises(KeyboardInterrupt):
            flow.stream()
    before = len(flow.read("w"))
    assert 20 < before < 100
    counters = flow.stream()
    assert len(sizes) > 12 and max(sizes) < 2 * _MOST > max(read)
    messages = flow.read("w")
    assert_exactly_once_in_order(messages)
    assert_exactly_once_in_order(flow.read("w2"))
    assert counters["published"] == {"rows of several tables": 300}.get(updated, 100)
    assert {large(m) for m in messages} == (
        {"o3"} if updated == "a row again and again" else {f"o{k}" for k in range(1, 101)}
    )
    assert dict(flow.execute("SELECT id, v FROM w")) == dict.fromkeys(range(1, 101), 0) | {
        m.key["id"]: m.value["v"] for m in messages
    }


def test_a_truncate_behind_values_that_do_not_fit_into_memory_ends_the_stream_when_its_turn_comes(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow(max_transaction_bytes=_MOST, on_truncate="stop")
    flow.execute("UPDATE w SET big = repeat('x', 50000)", "CREATE TABLE other (id int PRIMARY KEY)")
    flow.create()
    # all values are expected to fit, since there are few
    flow.execute("UPDATE w SET v = 1 WHERE id <= 3", "UPDATE w SET v = 2 WHERE id > 3", "TRUNCATE other")
    with pytest.raises(RecordError, match=r"TRUNCATE of public\.other"):
        flow.stream()
    assert len(flow.read("w")) == 5


@pytest.mark.parametrize("array", [False, True])
def test_a_key_that_its_domain_does_not_allow_any_more_is_looked_up(make_flow: MakeFlow, array: bool) -> None:
    flow = make_flow()
    base, first, second = ("int[]", "'{1}'", "'{2}'") if array else ("int", "1", "2")
    flow.execute(
        f"CREATE DOMAIN d AS {base}",
        "CREATE TABLE k (id d PRIMARY KEY, v int, big text)",
        "ALTER TABLE k ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO k VALUES ({first}, 0, {LARGE.format('a')}), ({second}, 0, {LARGE.format('b')})",
    )
    flow.create()
    flow.execute(
        "UPDATE k SET v = 1",
        f"DELETE FROM k WHERE id = {first}",
        f"ALTER DOMAIN d ADD CONSTRAINT c CHECK (VALUE <> {first})",
    )
    counters = flow.stream()
    assert counters["superseded"] == 1
    messages = flow.read("k")
    assert [large(m) for m in messages if m.value] == ["b"] and len(messages) == 2
