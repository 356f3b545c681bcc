"""Live snapshots: rows that are read again while the stream runs."""

from __future__ import annotations

import pytest

from tests.support.topics import Flow, Message

ROWS = 3000


def _make(flow: Flow, rows: int = ROWS) -> Flow:
    flow.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, day date, name text)",
        f"INSERT INTO items SELECT g, date '2026-01-01' + g::int % 10, 'item ' || g FROM generate_series(1, {rows}) g",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    return flow


@pytest.fixture
def flow(make_flow) -> Flow:  # type: ignore[no-untyped-def]
    return _make(make_flow(tables="items"))


def _again(flow: Flow, request_id: str) -> list[Message]:
    return [m for m in flow.read("items") if m.snapshot.startswith(f"{request_id}/")]


def test_a_table_is_read_again_by_a_bounded_run(flow: Flow) -> None:
    request_id = flow.ask("items")
    flow.stream()
    found = _again(flow, request_id)
    assert sorted(m.value["id"] for m in found) == list(range(1, ROWS + 1))
    assert {m.pos for m in found} == {""}
    report = flow.reported(request_id)
    assert (report.state, report.rows, report.newer, report.error) == ("finished", ROWS, 0, "")
    assert report.tables == ["public.items"]
    # nothing is left to do
    flow.stream()
    assert len(_again(flow, request_id)) == ROWS
    assert flow.compare("items").equal


def test_a_slice(flow: Flow) -> None:
    request_id = flow.ask("items", where="day = '2026-01-03' OR false")
    flow.stream()
    assert {m.value["day"] for m in _again(flow, request_id)} == {"2026-01-03"}
    assert flow.reported(request_id).rows == ROWS // 10


def test_several_queue_and_a_later_change_is_not_undone(flow: Flow) -> None:
    first, second = flow.ask("items", where="id <= 10"), flow.ask("items", where="id <= 20")
    flow.execute("UPDATE items SET name = 'changed' WHERE id <= 5", "DELETE FROM items WHERE id = 6")
    flow.stream()
    assert len(_again(flow, first)) == 9
    assert len(_again(flow, second)) == 19
    assert flow.compare("items").equal


def test_sweep(flow: Flow) -> None:
    flow.damage("items", {"id": 99_999}, {"id": 99_999, "day": None, "name": "not there"})
    flow.damage("items", {"id": 7}, None)
    assert not flow.compare("items").equal
    request_id = flow.ask("items", sweep=True)
    flow.stream()
    report = flow.reported(request_id)
    assert (report.state, report.swept, report.rows) == ("finished", 1, ROWS)
    assert flow.compare("items").equal
