"""What the stream makes of a Relation message."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.stream.relations import Resolver
from tests.support import wire as w

TABLE = w.table(("id", w.plain(w.TEXT)), ("a", w.plain(w.TEXT)), key=["id"], oid=7)


def resolver(monkeypatch: pytest.MonkeyPatch, today: SourceTable = TABLE, **options: Any) -> Resolver:
    """One whose catalog has a table as it is today."""
    pipeline = Settings.of(postgres="dbname=none", format="json", table_options={TABLE.qualified: options})
    monkeypatch.setattr(Resolver, "_as_read", lambda self, message: today)
    return Resolver(pipeline, {7: PinnedTable(TABLE, "t", "id", 1, 0, 0, 700)})


def message(*columns: str) -> pgoutput.RelationMessage:
    found = tuple(pgoutput.RelationColumn(name == "id", name, w.TEXT, -1) for name in columns)
    return pgoutput.RelationMessage(7, TABLE.schema, TABLE.name, "d", found)


def test_a_filter_that_is_new_is_known_of_a_table_that_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An insert may then be an update that has brought a row into the filter, without its large values."""
    assert resolver(monkeypatch)(message("id", "a"), None) == Version(TABLE, "t")
    found = resolver(monkeypatch, where="a <> ''")(message("id", "a"), None)
    assert found is not None and found.table.filtered
