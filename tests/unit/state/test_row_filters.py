"""Row filters of tables that are followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import table_key
from airflow_bottledwater.state.row_filters import refused
from tests.support import wire as w

LOGS = replace(w.table(("line", w.plain(w.TEXT)), oid=7), schema="public", name="logs", where="line > ''")


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        ({"logs": {"where": LOGS.where}}, False),
        ({"entries": {"where": LOGS.where}}, False),
        ({"entries": {"where": "line = 'x'"}}, True),
        ({}, True),
    ],
)
def test_the_filter_of_a_table_without_a_key_goes_with_its_name(rules: dict[str, Any], changed: bool) -> None:
    known = PipelineState()
    known.apply({table_key(LOGS.oid): PinnedTable(LOGS, "logs", "id", 1, 0, 0, 0)})
    pipeline = Settings(postgres="host=db", table_options=rules)
    where = TableMapping.of(pipeline).options("public", "entries").where
    renamed = replace(LOGS, name="entries", where=where)
    found = refused(pipeline, known, [renamed])
    assert bool(found) is changed and all("public.entries" in said for said in found)
    # one that was dropped has nothing that could be changed
    assert not refused(pipeline, known, [])
