"""Each right, setting and limit that is missing is said by preflight, before anything is made."""

from __future__ import annotations

import re
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import airflow_bottledwater
from airflow_bottledwater.errors import Outage, PreflightError
from airflow_bottledwater.pipeline.debezium import imported
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision import preflight, source_checks
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.provision.source_checks import FUNCTIONS, RELATIONS
from airflow_bottledwater.state.store import state_topic_name
from tests.support.faults import Pooler
from tests.support.pipeline import Source, refuses
from tests.support.topics import create_topic

_FUNCTIONS = "SELECT proname, oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace"


def _named(pattern: str) -> set[str]:
    """What looks so in the package."""
    package = Path(airflow_bottledwater.__file__).parent
    return {name for path in package.rglob("*.py") for name in re.findall(pattern, path.read_text())}


def test_each_function_that_may_not_be_called_is_named_and_all_that_are_called_are_known(source: Source) -> None:
    pipeline = source.pipeline.with_(postgres=source.role("REPLICATION", "GRANT SELECT ON items TO ROLE"))
    known = source.execute(_FUNCTIONS)
    # but for those that only a superuser's event triggers call
    called = _named(r"\bpg_(?!event_trigger)[a-z_]+(?=\()") - {"pg_backend_pid"}  # by each session: nothing begins
    assert called & {name for name, _ in known} <= set(FUNCTIONS)
    before, taken = source.picture(), 0
    for name, function in known:
        if name not in FUNCTIONS:
            continue
        source.execute(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC")
        with pytest.raises(PreflightError) as raised:
            preflight.run(pipeline)
        assert f"GRANT EXECUTE ON FUNCTION pg_catalog.{function} TO" in str(raised.value)
        source.execute(f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC")
        taken += 1
    assert taken >= len(FUNCTIONS) and source.picture() == before


def test_each_catalog_that_may_not_be_read_is_named_and_all_that_are_read_are_known(source: Source) -> None:
    pipeline = source.pipeline.with_(postgres=source.role("REPLICATION", "GRANT SELECT ON items TO ROLE"))
    of = "SELECT relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')"
    # the metrics can do without two, and one is a program, too
    besides = {"pg_stat_replication", "pg_stat_replication_slots", "pg_config"}
    assert _named(r"\bpg_[a-z_]+\b") & {name for (name,) in source.execute(of)} - besides == set(RELATIONS)
    before = source.picture()
    for name in ("pg_locks", "pg_range"):
        source.execute(f"REVOKE SELECT ON pg_catalog.{name} FROM PUBLIC")
        with pytest.raises(PreflightError, match=f"GRANT SELECT ON pg_catalog.{name} TO"):
            preflight.run(pipeline)
        source.execute(f"GRANT SELECT ON pg_catalog.{name} TO PUBLIC")
    assert source.picture() == before


@pytest.mark.long
def test_transactions_that_are_read_only_by_default_are_refused_and_the_advice_helps(source: Source) -> None:
    dsn = source.role("SUPERUSER")
    role = re.findall(r"user=(\w+)", dsn)[-1]
    source.execute(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    refuses(source, source.pipeline.with_(postgres=dsn), f"ALTER ROLE {role} SET default_transaction_read_only = off")
    source.execute(f"ALTER ROLE {role} SET default_transaction_read_only = off")
    create(source.pipeline.with_(postgres=dsn))
    drop(source.pipeline.with_(postgres=dsn), when="always")


def test_a_slot_that_is_invalidated_when_it_is_idle_is_a_warning(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL 18 has the setting."""
    assert "idle_replication_slot_timeout" not in "\n".join(preflight.run(source.pipeline).warnings)
    usual = source_checks._setting
    monkeypatch.setattr(source_checks, "_setting", lambda of, name: "720" if "idle" in name else usual(of, name))
    assert "idle_replication_slot_timeout is set" in "\n".join(preflight.run(source.pipeline).warnings)


def test_a_release_that_may_fail_to_decode_its_wal_is_a_warning(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "fail to decode" not in "\n".join(preflight.run(source.pipeline).warnings)
    monkeypatch.setattr(publication, "repeats_invalidations", lambda _: True)
    assert "may fail to decode its WAL" in "\n".join(preflight.run(source.pipeline).warnings)


def test_what_was_found_before_a_server_is_away_is_said_too(source: Source) -> None:
    source.execute("CREATE TABLE nameless (a int)")
    away = source.pipeline.with_(registry={"url": "http://127.0.0.1:1"})
    with pytest.raises(Outage):
        preflight.run(away)
    with pytest.raises(PreflightError, match=r"(?s)nameless.*127\.0\.0\.1:1"):
        preflight.run(away.with_(tables=("items", "nameless")))


def test_a_connection_pooler_is_refused(source: Source) -> None:
    with closing(Pooler(int(str(conninfo_to_dict(source.dsn)["port"])))) as pooler:
        pooler.ahead = True
        dsn = make_conninfo(source.dsn, port=pooler.port, sslmode="disable", gssencmode="disable")
        refuses(source, source.pipeline.with_(postgres=dsn), "is a connection pooler", "Connect to the primary itself")


def test_a_role_that_is_not_told_when_its_session_began_may_come_through_a_proxy(source: Source) -> None:
    source.execute(f"CREATE ROLE {(role := f'r{uuid.uuid4().hex[:8]}')}")
    with closing(Pooler(int(str(conninfo_to_dict(source.dsn)["port"])))) as proxy:
        dsn = make_conninfo(
            source.dsn, port=proxy.port, sslmode="disable", gssencmode="disable", options=f"-c role={role}"
        )
        with closing(connect(dsn)) as connection:
            assert connection.execute("SELECT current_user").fetchone() == (role,)
            assert connection.pid != connection.info.backend_pid


def test_a_pattern_that_leaves_nothing_out_is_said(source: Source) -> None:
    source.execute("CREATE TABLE secret_log (id int PRIMARY KEY)")
    names = ("*", "!Secret_Log", "!public.secret_*", "!items_*")
    found = preflight.run(source.pipeline.with_(tables=names, schemas=("!Public", "!pub*c_")))
    said = [warning.partition(" leaves nothing out")[0] for warning in found.warnings if "leaves nothing" in warning]
    assert said == ["'!Secret_Log'", "'!items_*'", "'!Public'", "'!pub*c_'"]
    assert [table.name for table in found.tables] == ["items"]


def test_what_a_connectors_description_leaves_open_is_refused(source: Source) -> None:
    connector = {"connector.class": "io.debezium.connector.postgresql.PostgresConnector"}
    made = imported(connector | {"table.exclude.list": r"public\.secret_\d+"}).description["source"]
    refuses(source, source.pipeline.with_(tables=tuple(made["tables"])), "No table matches 'public.NAME_WHAT_IS_MEANT'")
    source.execute("CREATE SCHEMA inventory", "CREATE TABLE inventory.items (id int PRIMARY KEY)")
    made = imported(connector | {"schema.include.list": "inventory"}).description["source"]
    of_schema = {"tables": (), "schemas": tuple(made["schemas"]), "table_options": made["table_options"]}
    found = preflight.run(source.pipeline.with_(**of_schema))
    assert [table.qualified for table in found.tables] == ["inventory.items"]


def test_a_long_definition_is_compressed_and_one_that_does_not_fit_is_refused(source: Source) -> None:
    # more than a megabyte, of which compression leaves little
    columns = ", ".join(f"column_{i} int" for i in range(1500))
    source.execute(f"CREATE TABLE wide (id int PRIMARY KEY, {columns})")
    source.execute(
        *(f"COMMENT ON COLUMN wide.column_{i} IS '{'what it is for ' * 60}'" for i in range(1500)),
    )
    wide = source.pipeline.with_(tables=("wide",))
    create(wide)
    drop(wide, when="always")
    # none of this
    hexes = sql.Literal("".join(uuid.uuid4().hex for _ in range(200))).as_string()
    source.execute(f"CREATE TABLE few (id int PRIMARY KEY); COMMENT ON TABLE few IS {hexes}")
    (database,) = source.execute("SELECT current_database()")[0]
    topic = state_topic_name(database, "other")
    create_topic(
        source.pipeline.kafka,
        topic,
        partitions=1,
        replication=1,
        config={"cleanup.policy": "compact", "max.message.bytes": "5000"},
    )
    other = source.pipeline.with_(slot="other", tables=("few",))
    refuses(source, other, "The definition of public.few (1 columns", "max.message.bytes 5,000")
