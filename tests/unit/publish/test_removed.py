"""The records of deletions with envelopes: an event and a tombstone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import JSON
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision.source_rows import SourceRow
from airflow_bottledwater.publish import removed
from airflow_bottledwater.publish.removed import _json_row, removals
from airflow_bottledwater.publish.session import PublishSession
from tests.support.wire import plain, table


def _deletions(keys: int) -> Records:
    """An event of a thousand bytes and a tombstone for each key."""
    table = np.zeros(2 * keys, dtype=RECORD)
    table["key"], table["key_length"] = np.repeat(np.arange(keys) * 1008, 2), 8
    table["value_length"] = [1000, -1] * keys
    table["event"] = wire.EVENT_DELETE
    return Records(table, np.zeros(1, dtype=np.uint8), 0)


@pytest.mark.parametrize("limit", [1, 2400, 3000, 5000, 1 << 20])
def test_the_event_of_a_deletion_stays_with_its_tombstone(limit: int) -> None:
    session = object.__new__(PublishSession)
    session.pace = SimpleNamespace(limit=limit)  # type: ignore[assignment]
    pieces = list(session._pieces([_deletions(7)]))
    assert sum(map(len, pieces)) == 14
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert len(pieces) == 1 or limit < 1 << 20


def test_a_letter_of_a_deletion_needs_that_the_row_is_gone() -> None:
    records = _deletions(1)
    for i in range(2):
        assert SourceRow(gone=True, same=False).allows(records, i)
        assert not SourceRow(gone=False, same=True).allows(records, i)


def test_a_letter_of_a_deletion_does_not_depend_on_what_is_not_known_of_the_new_row() -> None:
    records = _deletions(1)
    records.table["event"][1] = wire.EVENT_UPDATE
    for found, rows, doubt in (
        (SourceRow(gone=True, same=False, unknown="altered"), (0,), ""),
        (SourceRow(gone=True, same=False, unknown="altered"), (0, 1), "altered"),
        (SourceRow(gone=None, same=False, unknown="hashed"), (0,), "hashed"),
    ):
        assert found.doubt(records, rows) == doubt


@pytest.mark.parametrize("with_schema", [False, True])
def test_a_key_is_told_as_it_is_however_many_digits_it_has(with_schema: bool) -> None:
    of = replace(table(("id", plain(1700)), ("at", plain(1184))), key=("id",))
    version, mapping = Version(of, "t"), TableMapping(format=JSON, envelope=Envelope("shop", with_schema))
    around = mapping.around("t", of, "db")
    assert around is not None
    row = b'{"id":123456789012345678901234567890.10}'
    tail = b"}" if with_schema else b""
    old = _json_row(mapping, version)
    assert old(around.key_head + row + tail) == row
    # keys that another program has written
    for key in (b"", b"7", b"x", b'{"id":', b'[{"id":7}]'):
        assert old(around.key_head + key + tail) == b"null"
    assert old(b"other" + row) == b"null"


def test_the_records_of_a_removal_in_an_envelope_say_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a header, a record is taken for a row of a snapshot."""
    session = object.__new__(PublishSession)
    session.index = {"t": 4}
    session.pipeline = Settings.of(postgres="host=db", format="json", envelope="debezium")
    monkeypatch.setattr(removed, "_around", lambda *_: (b"[", b"|", b"]"))
    version = Version(replace(table(("id", plain(23))), key=("id",)), "t")
    found = removals(session, version, [(0, b'{"id":1}'), (2, b'{"id":22}')], wire.FROM_SNAPSHOT)

    def part(row: Any, name: str) -> bytes | None:
        at, size = int(row[name]), int(row[f"{name}_length"])
        return None if size < 0 else bytes(found.data[at : at + size])

    op = b"\0\0\0\3op\0\0\0\0\1d"
    assert [(part(row, "key"), part(row, "value"), part(row, "headers")) for row in found.table] == [
        (b'{"id":1}', b'[{"id":1}|]', op), (b'{"id":1}', None, op),
        (b'{"id":22}', b'[{"id":22}|]', op), (b'{"id":22}', None, op),
    ]  # fmt: skip
    assert (found.table["time"] > 0).all(), "records without a time have no headers of their own"
    assert found.table["partition"].tolist() == [0, 0, 2, 2] and found.headers == 0
