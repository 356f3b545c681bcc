"""The reading of envelopes that the hand-over and fault suites use finds what it must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.model.lsn import Position
from tests.support.forms import unwrapped
from tests.support.topics import Message


def _row(key: int, version: int) -> dict[str, Any]:
    return {"id": key, "version": version, "large": None}


def _event(offset: int, op: str, key: int, before: Any, after: Any, ordinal: int, lsn: int = 100) -> Message:
    source = {
        "schema": "public", "table": "a", "connector": "postgresql", "snapshot": "false", "lsn": lsn,
        "sequence": f'["{lsn}","{ordinal}"]', "txId": 7, "ts_ms": 5,
    }  # fmt: skip
    value = {"before": before, "after": after, "op": op, "source": source}
    return Message(0, offset, {"id": key}, value, op, str(Position(lsn, ordinal)), 5, "7")


def _tombstone(event: Message) -> Message:
    return replace(event, value=None, offset=event.offset + 1)


def _records() -> list[Message]:
    """A row of a snapshot, an update, a change of the key, a deletion."""
    snapshot = _event(0, "r", 1, None, _row(1, 1), 0)
    snapshot.value["source"]["snapshot"] = "true"
    moved = _event(2, "d", 1, _row(1, 2), None, 2)
    deleted = _event(7, "d", 2, _row(2, 3), None, 1, 200)
    return [
        replace(snapshot, pos="", xid=""), _event(1, "u", 1, _row(1, 1), _row(1, 2), 1), moved, _tombstone(moved),
        _event(4, "c", 2, None, _row(2, 3), 2), deleted, _tombstone(deleted),
        _event(10, "c", 5, None, _row(5, 9), 2, 200),
    ]  # fmt: skip


def test_events_are_read_as_rows() -> None:
    found = unwrapped(_records(), "a", committed=True)
    assert [each.op for each in found] == ["r", "u", "d", "u", "d", "c"]
    assert [each.value and each.value["version"] for each in found] == [1, 2, None, 3, None, 9]
    assert [each.before and each.before["version"] for each in found] == [None, 1, 2, None, 3, None]
    # a tombstone is no gap; that at 5 and 6, which is the marker of a transaction, and at 9 are
    assert [each.offset for each in found] == [0, 1, 2, 3, 6, 8]


def test_what_was_not_committed_may_lack_a_tombstone() -> None:
    records = [each for each in _records() if each.offset != 3]
    assert len(unwrapped(records, "a", committed=False)) == 6
    with pytest.raises(AssertionError, match="has no tombstone"):
        unwrapped(records, "a", committed=True)


def _changed(**source: Any) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        return replace(message, value={**message.value, "source": {**message.value["source"], **source}})

    return change


@pytest.mark.parametrize(
    ("number", "change"),
    [
        *((1, _changed(**{name: "other"})) for name in ("table", "snapshot", "lsn", "sequence", "txId", "ts_ms")),
        (0, _changed(snapshot="incremental")),
        (1, lambda each: replace(each, value={**each.value, "op": "c"})),
        (1, lambda each: replace(each, value={**each.value, "after": None})),
        (2, lambda each: replace(each, value={**each.value, "after": _row(1, 1)})),
        (2, lambda each: replace(each, value=None)),
        (3, lambda each: replace(each, key={"id": 9})),
        (3, lambda each: replace(each, offset=9)),
        (6, lambda each: replace(each, pos=str(Position(200, 9)))),
    ],
)
def test_what_is_wrong_with_an_event_is_found(number: int, change: Callable[[Message], Message]) -> None:
    records = _records()
    records[number] = change(records[number])
    with pytest.raises(AssertionError):
        unwrapped(records, "a", committed=True)
