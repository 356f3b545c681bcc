"""What the verification finds, a live snapshot with sweep mends: the advice that it gives, followed."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.verify import driver
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

PLAIN = ("CREATE TABLE items (id int PRIMARY KEY, name text)",)
PARTITIONED = (
    "CREATE TABLE items (id int PRIMARY KEY, name text) PARTITION BY RANGE (id)",
    "CREATE TABLE items_1 PARTITION OF items FOR VALUES FROM (0) TO (500)",
    "CREATE TABLE items_2 PARTITION OF items FOR VALUES FROM (500) TO (5000)",
)


@pytest.mark.some(1)
@pytest.mark.parametrize("table", [PLAIN, PARTITIONED], ids=["plain", "partitioned"])
def test_what_is_damaged_is_found_and_mended_while_the_stream_runs(make_flow: MakeFlow, table: tuple[str, ...]) -> None:
    flow = make_flow(tables="items", verify_timeout=30.0)
    flow.execute(*table, "INSERT INTO items SELECT g, 'item ' || g FROM generate_series(1, 1000) g")
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("UPDATE items SET name = 'changed' WHERE id <= 10", "DELETE FROM items WHERE id = 20")
        assert _counts(flow) == {}
        flow.damage("items", {"id": 7}, {"id": 7, "name": "stale"})
        flow.damage("items", {"id": 600}, None)
        flow.damage("items", {"id": 9999}, {"id": 9999, "name": "nowhere"})
        assert _counts(flow) == {"different": 1, "missing": 1, "surplus": 1}
        request_id = flow.ask("items", sweep=True)
        until(lambda: flow.reported(request_id).ended, "the live snapshot ends", failed=errors)
        assert flow.reported(request_id).tombstones == 1
        assert _counts(flow) == {}


def _counts(flow: Flow) -> dict[str, Any]:
    pipeline = flow.pipeline.with_(verify_tables="items")
    (table,) = driver.run(pipeline, driver.in_threads(pipeline)).tables
    assert table.verdict == ("different" if table.counts else "equal")
    return table.counts
