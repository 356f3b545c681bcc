"""Tables that extensions make, or store in their own way. No extension that does is there: its tables are made by hand,
and its access method is heap under another name."""

from __future__ import annotations

import uuid

import pytest

from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.postgres import catalog, storage
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.verify import driver
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until
from tests.support.writers import state_topic

COLUMNAR = "CREATE ACCESS METHOD columnar TYPE TABLE HANDLER heap_tableam_handler"
CITUS = (
    "SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass)",
    "GRANT SELECT ON pg_catalog.pg_dist_partition TO PUBLIC",
)
TIMESCALE = (
    "CREATE SCHEMA _timescaledb_catalog",
    "CREATE TABLE _timescaledb_catalog.hypertable (id int, schema_name name, table_name name, compression_state int)",
    "CREATE TABLE _timescaledb_catalog.chunk (hypertable_id int, schema_name name, table_name name)",
    "INSERT INTO _timescaledb_catalog.hypertable VALUES (1, 'public', 'conditions', 0), (2, 'public', 'others', 1)",
    "INSERT INTO _timescaledb_catalog.chunk VALUES (1, 'public', 'b'), (2, 'sales', 'b')",
)
#: what makes a table one whose changes are not decoded, what ends that, and what is said of it
WAYS = {
    "columnar": (
        (COLUMNAR,),
        "ALTER TABLE b SET ACCESS METHOD columnar",
        "ALTER TABLE b SET ACCESS METHOD heap",
        "Table public.b has the access method columnar",
    ),
    "Citus": (
        CITUS,
        "INSERT INTO pg_catalog.pg_dist_partition VALUES ('b'::regclass)",
        "DELETE FROM pg_catalog.pg_dist_partition",
        "Table public.b is one of Citus",
    ),
    "TimescaleDB": (
        TIMESCALE,
        "UPDATE _timescaledb_catalog.hypertable SET compression_state = 1 WHERE id = 1",
        "UPDATE _timescaledb_catalog.hypertable SET compression_state = 0 WHERE id = 1",
        "Table public.b is a chunk of hypertable public.conditions, which has compression",
    ),
}


def _followed(flow: Flow) -> set[str]:
    return {each.table.name for each in read_state(flow.pipeline, state_topic(flow)).tables.values()}


def _verified(flow: Flow) -> dict[str, str]:
    found = driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    return {each.table: each.reason for each in found.tables if each.reason or each.counts}


@pytest.mark.parametrize("way", WAYS)
def test_a_table_whose_changes_are_not_decoded_is_red_until_they_are_and_then_read_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    begins, turn, back, said = WAYS[way]
    look_often(monkeypatch, interval=1.0)
    flow = make_flow(tables=("a", "b"))
    flow.execute(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, t text); INSERT INTO {name} VALUES (1, 'x')" for name in "ab"),
        *begins,
        turn,
    )
    with pytest.raises(PreflightError, match=said):
        flow.create()
    flow.execute(back)
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(turn)
        until(lambda: "public.b" in problems(flow), "it is told", failed=errors)
        found = problems(flow)["public.b"]
        assert found.kind == "not-complete" and said in found.reason and found.remedy
        assert said in _verified(flow)["public.b"]
        asked = flow.ask("b", sweep=True)
        until(lambda: flow.reported(asked).state == "failed", "it is not read", failed=errors)
        assert said in flow.reported(asked).error
        flow.execute(back)
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        until(lambda: len(flow.read("b")) == 2, "it is read again", failed=errors)
        until(lambda: not read_state(flow.pipeline, state_topic(flow)).lives, "all of it", failed=errors)
        assert not _verified(flow)
    assert errors == [] and len(flow.read("a")) == 1


def test_a_new_table_or_partition_of_another_access_method_is_red(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    flow = make_flow(tables=("t*",))
    flow.execute(
        COLUMNAR,
        "CREATE TABLE t1 (id int PRIMARY KEY)",
        "CREATE TABLE t2 (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE t2_heap PARTITION OF t2 FOR VALUES FROM (0) TO (10)",
        f"ALTER DATABASE {flow.execute('SELECT current_database()')[0][0]} SET default_table_access_method = columnar",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(
            "CREATE TABLE t3 (id int PRIMARY KEY); INSERT INTO t3 VALUES (1)",
            "CREATE TABLE t2_part PARTITION OF t2 FOR VALUES FROM (10) TO (20) USING columnar",
            "INSERT INTO t2 VALUES (11)",
        )
        until(lambda: len(problems(flow)) == 2, "both are told", failed=errors)
        found = problems(flow)
        assert "Table public.t3 has the access method columnar" in found["public.t3"].reason
        assert "t2_part, a partition of public.t2, is not stored as heap" in found["public.t2"].reason
        # the advice
        for each in found.values():
            assert "SET ACCESS METHOD heap;" in each.remedy
        flow.execute("ALTER TABLE t3 SET ACCESS METHOD heap", "ALTER TABLE t2_part SET ACCESS METHOD heap")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        until(lambda: "t3" in _followed(flow), "it is followed", failed=errors)
        # heap's own functions are behind this method, so that the stream may have sent a row, too
        until(
            lambda: _read_again(flow, "t3") == {1} and _read_again(flow, "t2") == {11}, "they are read", failed=errors
        )
    assert errors == []


def _read_again(flow: Flow, table: str) -> set[int]:
    return {message.key["id"] for message in flow.read(table) if message.snapshot}


def test_a_pipeline_goes_on_beside_a_table_that_is_not_decoded_any_more_and_can_let_go_of_it(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch, interval=1.0)
    flow = make_flow()
    flow.execute(
        COLUMNAR,
        *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in "ab"),
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    )
    flow.create()
    flow.snapshot()
    flow.execute(*(f"ALTER TABLE {name} SET ACCESS METHOD columnar" for name in ("b", "p_1")))
    # the next run
    flow.create()
    warnings = "\n".join(preflight.run(flow.pipeline).warnings)
    assert "Table public.b has the access method columnar, whose changes are not known to be decoded" in warnings
    assert "p_1, a partition of public.p, is not stored as heap" in warnings
    flow.execute("CREATE TABLE c (id int PRIMARY KEY) USING columnar")
    with pytest.raises(PreflightError) as found:
        preflight.run(flow.pipeline)
    assert [each[:14] for each in found.value.problems] == ["Table public.c"]
    flow.execute("DROP TABLE c")
    # the advice
    flow.change(tables=("*", "!b"))
    flow.create()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("INSERT INTO a VALUES (1)")
        until(lambda: len(flow.read("a")) == 1, "the others go on", failed=errors)
        until(lambda: problems(flow).keys() == {"public.b", "public.p"}, "both are told", failed=errors)
        assert "('!public.b'; one that is followed has to be taken out of its" in problems(flow)["public.b"].remedy
        flow.execute(f"ALTER PUBLICATION {flow.pipeline.publication_name} DROP TABLE ONLY b")
        until(lambda: problems(flow).keys() == {"public.p"}, "it is let go", failed=errors)
        until(lambda: _followed(flow) == {"a", "p"}, "it is not followed", failed=errors)
    assert errors == []


def test_catalogs_of_other_products_that_cannot_be_read_are_warned_of(make_flow: MakeFlow) -> None:
    flow = make_flow()
    role = f"r{uuid.uuid4().hex[:8]}"
    flow.execute(CITUS[0], *TIMESCALE, "CREATE TABLE a (id int PRIMARY KEY)", f"CREATE ROLE {role}")
    flow.execute("CREATE TABLE b (id int PRIMARY KEY)")
    flow.execute("INSERT INTO pg_catalog.pg_dist_partition VALUES ('b'::regclass)")

    def seen() -> tuple[list[str], dict[int, str]]:
        with connect(flow.dsn) as connection:
            ((oid,),) = connection.execute("SELECT 'public.b'::regclass::oid").fetchall()
            connection.execute(f"SET ROLE {role}")  # type: ignore[arg-type]
            return storage.unknown(connection), storage.undecoded(connection, [oid])

    warned, found = seen()
    assert [each.split(" cannot")[0] for each in warned] == ["The catalog of Citus", "The catalog of TimescaleDB"]
    assert not found
    # USAGE alone is not enough
    flow.execute(f"GRANT USAGE ON SCHEMA _timescaledb_catalog TO {role}")
    assert len(seen()[0]) == 2
    # the advice
    for each in warned:
        for statements in each.split("Run: ")[1:]:
            flow.execute(statements)
    warned, found = seen()
    assert not warned and "is one of Citus" in next(iter(found.values()))
    # another version
    flow.execute("ALTER TABLE _timescaledb_catalog.hypertable RENAME compression_state TO state")
    warned, _ = seen()
    assert len(warned) == 1 and "_timescaledb_catalog.hypertable has no column compression_state" in warned[0]
    assert warned[0] in preflight.run(flow.pipeline.with_(tables=("*", "!b"))).warnings
    flow.execute("DROP TABLE _timescaledb_catalog.hypertable")
    warned, _ = seen()
    assert len(warned) == 1 and "_timescaledb_catalog.hypertable is not there in this version" in warned[0]


def test_the_chunks_of_a_hypertable_are_told_together_with_their_pattern(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("*.*", "!_timescaledb_catalog.*"))
    flow.execute(
        *TIMESCALE[:3],
        "INSERT INTO _timescaledb_catalog.hypertable VALUES (1, 'public', 'conditions', 1), (2, 'inside', 'packed', 2)",
        "CREATE SCHEMA inside",
        *(f"CREATE TABLE inside._hyper_1_{n}_chunk (id int PRIMARY KEY)" for n in range(1, 21)),
        *(f"CREATE TABLE inside.compress_hyper_2_{n}_chunk (id int PRIMARY KEY)" for n in range(21, 23)),
        "INSERT INTO _timescaledb_catalog.chunk SELECT CASE WHEN tablename LIKE 'compress%' THEN 2 ELSE 1 END, "
        "schemaname, tablename FROM pg_tables WHERE schemaname = 'inside'",
    )
    with pytest.raises(PreflightError) as found:
        preflight.run(flow.pipeline)
    first, second = found.value.problems
    assert first.startswith("20 tables are chunks of hypertable public.conditions (inside._hyper_1_1_chunk, ")
    assert "Leave them out ('!inside._hyper_1_*'; one that" in first and "decompress all chunks" in first
    assert second.startswith("2 tables are chunks of hypertable inside.packed (") and "decompress" not in second
    assert "Leave them out ('!inside.compress_hyper_2_*'; one that" in second
    # the advice
    patterns = (*flow.pipeline.tables, "!inside._hyper_1_*", "!inside.compress_hyper_2_*")
    flow.execute("CREATE TABLE plain (id int PRIMARY KEY)")
    assert preflight.run(flow.pipeline.with_(tables=patterns)).tables[0].name == "plain"


def test_tables_of_extensions_are_taken_by_their_names_only(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    flow = make_flow()
    flow.execute(
        "CREATE TABLE mine (id int PRIMARY KEY)",
        "CREATE TABLE spatial_ref_sys (id int PRIMARY KEY)",
        "CREATE SCHEMA cron; CREATE TABLE cron.job (id int PRIMARY KEY)",
        "ALTER EXTENSION plpgsql ADD TABLE spatial_ref_sys",
        "ALTER EXTENSION plpgsql ADD TABLE cron.job",
    )

    def taken(*tables: str, schemas: tuple[str, ...] = ()) -> list[str]:
        with connect(flow.dsn) as connection:
            found = catalog.names(connection, catalog.resolve(connection, tables, schemas)).values()
        return sorted(".".join(each) for each in found)

    # a new pipeline says what it leaves out
    assert [each for each in preflight.run(flow.pipeline).notes if "extensions" in each] == [
        "Tables that belong to extensions are left out (cron.job, public.spatial_ref_sys): they are taken by their own "
        "names only."
    ]
    assert taken() == taken("*", "*.*") == taken(schemas=("*",)) == ["public.mine"]
    assert taken("spatial_ref_sys", "cron.job", "mine") == ["cron.job", "public.mine", "public.spatial_ref_sys"]
    with pytest.raises(PreflightError, match=r"matches 'cron\.\*' but tables of extensions, which are taken by their"):
        preflight.run(flow.pipeline.with_(schemas=("cron",)))
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        # CREATE EXTENSION makes them in one transaction
        flow.execute(
            "BEGIN; CREATE TABLE brought (id int PRIMARY KEY); ALTER EXTENSION plpgsql ADD TABLE brought; COMMIT",
            "CREATE TABLE more (id int PRIMARY KEY); INSERT INTO more VALUES (1)",
        )
        until(lambda: "more" in _followed(flow), "another one is taken in", failed=errors)
        # what is followed stays so
        flow.execute("ALTER EXTENSION plpgsql ADD TABLE more", "INSERT INTO more VALUES (2)", "SELECT pg_sleep(1)")
        until(lambda: flow.compare("more").equal, "it goes on", failed=errors)
        assert not problems(flow)
        # also for patterns of commands
        asked = flow.ask("mo?e", sweep=True)
        until(lambda: flow.reported(asked).state == "finished", "it is read", failed=errors)
    assert errors == []
    assert _followed(flow) == {"mine", "more"}
    found = preflight.run(flow.pipeline)
    assert "more" in {each.name for each in found.tables} and not any("extensions" in each for each in found.notes)


def test_children_that_cannot_be_followed_are_to_be_left_out(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a",))
    flow.execute("CREATE TABLE a (id int PRIMARY KEY)", COLUMNAR)

    def warned(*tables: str) -> str:
        found = preflight.run(flow.pipeline.with_(tables=tables)).warnings
        return next((each for each in found if "inherit from it" in each), "")

    flow.execute("CREATE UNLOGGED TABLE quick () INHERITS (a)", "CREATE TABLE packed () INHERITS (a) USING columnar")
    said = warned("a")
    assert "public.packed, public.quick cannot be followed (a foreign table, an unlogged one" in said
    assert "Name the" not in said
    flow.execute("CREATE TABLE plain (PRIMARY KEY (id)) INHERITS (a)")
    assert "Name the others as well" in warned("a") and "cannot be followed" in warned("a")
    # the advice
    assert "cannot be followed" not in warned("a", "!quick", "!packed") and "Name them" in warned(
        "a", "!quick", "!packed"
    )
    assert "it in topics of those tables" not in warned("a", "plain", "!quick", "!packed")
    flow.execute("ALTER TABLE quick SET LOGGED", "ALTER TABLE packed SET ACCESS METHOD heap")
    assert "cannot be followed" not in warned("a")
