"""Which new tables create_slot leaves to the stream."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.provision.source_checks import _leave_to_stream
from airflow_bottledwater.state.records import COMPLETE, POSITION, Complete, Reached
from tests.unit.tables.test_plan import keyless, known, table

PIPELINE = Settings.of(postgres="host=h", slot="s", format="json")


@pytest.mark.parametrize(
    ("ordinal", "new_tables", "left"), [(3, "add", {2}), (0, "add", set()), (3, "ignore", set()), (None, "add", set())]
)
def test_inside_of_a_transaction_new_tables_are_the_streams(
    ordinal: int | None, new_tables: str, left: set[int]
) -> None:
    """It goes on with the tables that it has, and takes them in behind it."""
    state = known(table(1, "a"))
    state.apply({COMPLETE: Complete((1,), False, 0.0)})
    if ordinal is not None:
        state.apply({POSITION: Reached(100, ordinal, 0.0)})
    new = [table(2, "b"), keyless(3, "c"), replace(keyless(4, "d"), outbox=True)]
    found = Findings(Cluster("7", 1, "d", 180000), [table(1, "a"), *new], state=state)
    _leave_to_stream(PIPELINE.with_(new_tables=new_tables), found)
    assert found.left == left and {each.oid for each in found.tables} == {1, 2, 3, 4} - left
    assert ("public.b is taken in by the stream, behind the transaction" in "".join(found.warnings)) == bool(left)
