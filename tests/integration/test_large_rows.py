"""A row that PostgreSQL cannot send, since its message would have more than 1 GB: it is named, and there is a way past
it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.state.control_records import SnapshotReport
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

pytestmark = pytest.mark.long

#: a row of 1.2 GB: twice a value of 600 MB that is stored compressed, since PostgreSQL does not make such a row of new
#: values
_LARGE = "INSERT INTO a SELECT {}, v, v FROM s"


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return (
        "CREATE TABLE a (id int PRIMARY KEY, b text, c text)",
        "CREATE TABLE o (id int PRIMARY KEY)",
        "CREATE TABLE s (v text)",
        "INSERT INTO s VALUES (repeat('x', 600000000))",
    )


def _ids(flow: Flow, table: str) -> list[int]:
    return [message.key["id"] for message in flow.read(table)]


def test_a_snapshot_names_a_row_that_cannot_be_sent_and_passes_it(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a",), outage_timeout=60.0)
    flow.execute("INSERT INTO a VALUES (1)", _LARGE.format(2), "INSERT INTO a VALUES (3)")
    flow.create()
    with pytest.raises(RecordError, match=r"public\.a .*a row of 1,200,000,00. bytes.*1 GB") as raised:
        flow.snapshot()
    assert raised.value.row.startswith("the row with id = 2 ")
    flow.change(on_error="log")
    flow.snapshot()
    assert _ids(flow, "a") == [1, 3]
    (letter,) = flow.dead_letters()
    assert (letter.value["key"], letter.value["relation"]) == ({"id": "2"}, "public.a")


def test_the_stream_names_a_change_that_cannot_be_sent_and_a_person_passes_it(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a", "o"), outage_timeout=60.0, skip_snapshot=True)
    flow.create()
    flow.execute("INSERT INTO a VALUES (1)")
    flow.transaction(
        "INSERT INTO o VALUES (10)", "INSERT INTO a VALUES (5)", _LARGE.format(2), "INSERT INTO o VALUES (11)"
    )
    flow.execute("INSERT INTO a VALUES (3)")
    with pytest.raises(RecordError, match=r"cannot be sent by PostgreSQL.*The log of the job.*skip_position") as raised:
        flow.stream()
    assert raised.value.row.startswith("the row with id = 2 ")
    assert _ids(flow, "a") == [1]
    position = raised.value.position
    assert position.endswith("/00000003")
    flow.change(skip_position=position)
    flow.stream()
    assert _ids(flow, "a") == [1, 5, 3]
    assert _ids(flow, "o") == [10]
    flow.execute("DELETE FROM a WHERE id = 2")
    flow.stream()


def _reported(flow: Flow, **options: Any) -> SnapshotReport:
    """How a live snapshot ends."""
    with flow.streaming() as errors:
        flow.streams()
        asked = flow.ask("a", **options)
        until(lambda: flow.reported(asked).ended, "the live snapshot ends", seconds=120, failed=errors)
    return flow.reported(asked)


def test_a_live_snapshot_names_a_row_that_cannot_be_sent_and_passes_it(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(tables=("a",), outage_timeout=60.0, skip_snapshot=True)
    flow.execute("INSERT INTO a VALUES (1)", _LARGE.format(2), "INSERT INTO a VALUES (3)")
    flow.create()
    report = _reported(flow, sweep=True)
    assert report.state == "failed"
    assert re.search(r"public\.a .*a row of 1,200,000,00. bytes.*1 GB", report.error) and "id = 2" not in report.error
    assert "It is the row with id = 2 (" in caplog.text
    assert _ids(flow, "a") == []
    flow.change(on_error="log")
    for by_key in (False, True):
        report = _reported(flow, by_key=by_key)
        assert (report.state, report.dead_letters) == ("finished", 1)
    assert _ids(flow, "a") == [1, 3] * 2
    assert [letter.value["key"] for letter in flow.dead_letters()] == [{"id": "2"}] * 2
