"""DDL statements as records, also those that no trigger has written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import CredentialsRefused, TableRefused
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import AVRO, JSON
from airflow_bottledwater.postgres.pgoutput import RelationMessage
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.stream.ddl import Statements
from tests.support.wire import TEXT, plain, table

_TABLE = replace(table(("id", plain(20)), ("a-b", plain(TEXT)), ("a_2d_b", plain(TEXT))), oid=7, key=("id",))
_VERSION = Version(_TABLE, "p.t", 3, 4)
_OF_TABLE = {
    "type": "table", "schema": "public", "name": "t", "oid": 7, "replica_identity": "d",
    "columns": [["id", 20, -1, True], ["a-b", 25, -1, False]],
}  # fmt: skip


def _statements(found: Version | Exception | None, *, outbox: bool = False) -> tuple[Statements, list[RelationMessage]]:
    asked: list[RelationMessage] = []

    def resolve(message: RelationMessage, current: Version | None) -> Version | None:
        asked.append(message)
        if isinstance(found, Exception):
            raise found
        return found

    pinned = PinnedTable(replace(_TABLE, outbox=outbox), "p.t", "", 1, 3, 4, 0)
    return Statements(TableMapping(format=AVRO), {7: pinned}, resolve), asked


def _said(statements: Statements, *objects: Any) -> Any:
    content = json.dumps({"tag": "ALTER TABLE", "objects": list(objects)}).encode()
    return json.loads(statements(content, lambda _: None))


@pytest.mark.parametrize(
    ("found", "schemas"),
    [
        (_VERSION, {"p.t-key": 3, "p.t-value": 4}),
        # no schema can be made of it: two columns have one name in Avro
        (replace(_VERSION, value_schema=0, refused="two are one"), {"p.t-key": 3, "p.t-value": None}),
        (TableRefused("another key", ""), {"p.t-value": None}),
    ],
)
def test_a_statement_tells_the_ids_of_schemas(found: Version | Exception, schemas: dict[str, int | None]) -> None:
    statements, (asked) = _statements(found)
    said = _said(statements, _OF_TABLE, {"type": "view", "schema": "public", "name": "v"}, {**_OF_TABLE, "oid": 8})
    assert said["schemas"] == schemas
    assert said["objects"][0] == {"type": "table", "schema": "public", "name": "t"}
    assert [column.name for column in asked[0].columns] == ["id", "a-b"] and len(asked) == 1


def test_a_registry_that_rejects_the_password_says_nothing_of_a_schema() -> None:
    statements, _ = _statements(CredentialsRefused("The schema registry denies access."))
    with pytest.raises(CredentialsRefused):
        _said(statements, _OF_TABLE)


def test_an_outbox_has_no_schemas_nor_has_a_table_that_is_not_followed() -> None:
    statements, asked = _statements(_VERSION, outbox=True)
    assert "schemas" not in _said(statements, _OF_TABLE) and not asked
    assert "schemas" not in _said(_statements(None)[0], _OF_TABLE)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no json", b"[]", b"7", b"[" * 100_000, b'{"objects": 7}', b'{"objects": [7]}', b'{"objects": ["ab"]}',
        b'{"objects": [[]]}', b'{"objects": [], "tag": "\\ud800"}', b"\xff", b"{}",
    ],
)  # fmt: skip
def test_what_no_trigger_has_written_stays_as_it_is(content: bytes) -> None:
    """Everybody who may connect may write a message with this prefix: it must never end the stream."""
    assert _statements(_VERSION)[0](content, lambda _: None) == content


@pytest.mark.parametrize(
    "change",
    [
        {"oid": [7]}, {"oid": "7"}, {"oid": -1}, {"schema": None}, {"columns": 7}, {"columns": [["id"]]},
        {"columns": [["id", "x", -1, True]]}, {"columns": [["id", 1 << 32, -1, True]]}, {"replica_identity": 1},
        {"columns": [["id", 20, 1 << 31, True]]},
    ],
)  # fmt: skip
def test_a_table_that_is_described_in_another_way_is_not_asked_about(change: dict[str, Any]) -> None:
    statements, asked = _statements(_VERSION)
    assert "schemas" not in _said(statements, {**_OF_TABLE, **change}) and not asked


def test_without_a_registry_nothing_is_asked() -> None:
    statements, asked = _statements(_VERSION)
    statements._mapping = TableMapping(format=JSON)
    assert "schemas" not in _said(statements, _OF_TABLE) and not asked
