"""What a person is told before something is taken away, on real servers."""

from __future__ import annotations

import pytest

from airflow_bottledwater.jobs import requests
from airflow_bottledwater.operators.control import ACTIONS
from airflow_bottledwater.provision.consequences import of_action, of_drop
from airflow_bottledwater.provision.drop import drop
from tests.support.topics import MakeFlow


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE a (id int PRIMARY KEY, name text)",
        "CREATE TABLE b (id int, part int, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
        "CREATE TABLE b1 PARTITION OF b FOR VALUES IN (1)",
        "INSERT INTO a SELECT g, repeat('x', 100) FROM generate_series(1, 50000) g",
        "INSERT INTO b SELECT g, 1 FROM generate_series(1, 50000) g",
    )


def test_the_numbers_are_those_of_the_pipeline(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a,b", allow_unkeyed=False)
    flow.create()
    flow.snapshot()
    flow.stream()
    pipeline = flow.pipeline
    assert of_drop(pipeline, "never") == of_drop(pipeline, "retired") == ""
    for harmless in ACTIONS.keys() - {"retire", "drop_slot", "resume_table", "accept_new_keys"}:
        assert of_action(pipeline, harmless, [], sweep=False) == "", harmless
    flow.execute("UPDATE a SET name = repeat('y', 100)")
    said = of_action(pipeline, "drop_slot", [], sweep=False)
    assert f"Slot '{pipeline.slot}' of database" in said and "new snapshot reads 2 tables (" in said
    size, unit = said.partition("The changes in ")[2].split()[:2]
    # an update of 50,000 rows of 150 bytes, in place and in the index
    assert unit == "MB" and 10 < float(size) < 60
    assert "reads 2 tables (" in of_action(pipeline, "retire", [], sweep=False)
    swept = of_action(pipeline, "snapshot", ["b"], sweep=True)
    assert swept.startswith("Read again: 1 table (") and "B: public.b). Then each key" in swept
    assert "public.a" in of_action(pipeline, "accept_new_keys", ["a"], sweep=False)
    with_slot = flow.cluster
    requests.stop_pipeline(pipeline, with_slot, retire=True)
    flow.execute(f"SELECT pg_drop_replication_slot('{pipeline.slot}')")
    gone = of_drop(pipeline, "always")
    assert "is gone already; its saved state is deleted" in gone and "reads 2 tables" in gone
    drop(pipeline, when="always")
    assert of_drop(pipeline, "always") == ""
