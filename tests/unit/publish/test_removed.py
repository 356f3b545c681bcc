"""The records of deletions with envelopes: an event and a tombstone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.provision.source_rows import SourceRow
from airflow_bottledwater.publish.session import PublishSession


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
