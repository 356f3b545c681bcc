"""Which change ends the stream, and what becomes of a TRUNCATE."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from airflow_bottledwater.encoding import layout
from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.publish.reject import Rejection
from airflow_bottledwater.stream.events import truncate_events
from airflow_bottledwater.stream.stops import rejection_stop, truncate_stop
from tests.support import wire as w

TABLES = (w.table(("id", w.plain(w.TEXT)), key=["id"], oid=1), w.table(("id", w.plain(w.TEXT)), key=["id"], oid=2))
VERSIONS = tuple(Version(table, f"topic{table.oid}", 0, 0) for table in TABLES)


def batch(*messages: tuple[int, bytes]) -> Batch:
    """Each message in a transaction of its own: at 16, 32, …"""
    changes = np.zeros(len(messages), dtype=layout.CHANGE)
    at = 0
    for i, (relation, data) in enumerate(messages):
        changes[i]["kind"], changes[i]["relation"], changes[i]["offset"] = data[0], relation, at
        changes[i]["length"], changes[i]["lsn"], changes[i]["ordinal"] = len(data), 16 * (i + 1), i
        changes[i]["xid"], changes[i]["time"] = 700 + i, 1_700_000_000_000 + i
        at += len(data)
    whole = np.frombuffer(b"".join(data for _, data in messages), dtype=np.uint8)
    return Batch(Position(0), Position(16 * len(messages) + 1), whole, changes, VERSIONS)


def pipeline(**settings: Any) -> Settings:
    return Settings.of(postgres="dbname=none", format="json", **settings)


BATCH = batch((0, w.insert(1, b"a")), (1, w.truncate([2, 1], 3)), (0, w.insert(1, b"b")), (0, w.truncate([1, 99])))


def test_a_truncate_ends_the_stream_only_where_it_is_to() -> None:
    assert truncate_stop(pipeline(on_truncate="event"), BATCH) is None
    stop = truncate_stop(pipeline(on_truncate="stop"), BATCH)
    assert stop is not None
    assert stop.position == "0000000000000020/00000001"
    assert TABLES[1].qualified in str(stop) and "skip_position" in str(stop)


def test_the_truncate_that_a_person_lets_pass_does_not_end_it_but_the_next_one_does() -> None:
    stop = truncate_stop(pipeline(on_truncate="stop", skip_position="0000000000000020/00000001"), BATCH)
    assert stop is not None and stop.position == "0000000000000040/00000003"


def rejected(*rows: int) -> EncodedBatch:
    made: Any = SimpleNamespace(batch=BATCH)
    return EncodedBatch(made, None, [Rejection(row, f"reason {row}") for row in rows])  # type: ignore[arg-type]


def test_the_first_rejection_ends_the_stream_whatever_their_order() -> None:
    programs: Any = SimpleNamespace(tables=TABLES)
    stop = rejection_stop(pipeline(on_error="exit"), rejected(2, 0), programs)
    assert stop is not None
    assert (stop.position, stop.topic) == ("0000000000000010/00000000", "topic1")
    assert "reason 0" in str(stop)
    after = rejection_stop(pipeline(on_error="exit", skip_position=stop.position), rejected(2, 0), programs)
    assert after is not None and after.position == "0000000000000030/00000002"
    assert rejection_stop(pipeline(on_error="log"), rejected(2, 0), programs) is None
    assert rejection_stop(pipeline(on_error="exit"), rejected(), programs) is None


def test_what_a_dead_letter_would_lose_ends_the_stream_under_log() -> None:
    programs: Any = SimpleNamespace(tables=TABLES)

    def stop(**settings: str) -> RecordError | None:
        lost = {2}
        return rejection_stop(pipeline(**settings), rejected(0, 2), programs, loses=lambda each: each.row in lost)

    found = stop(on_error="log")
    assert found is not None and found.position == "0000000000000030/00000002"
    assert "a larger max.message.bytes of the dead-letter topic" in found.remedy
    assert stop(on_error="log", skip_position=found.position) is None
    assert stop(on_error="isolate") is None  # nothing of it is left out for good


def test_every_truncate_is_an_event_with_the_tables_that_it_emptied() -> None:
    events = list(truncate_events(BATCH, 5, "7/shop/shop"))
    values = [
        json.loads(bytes(e.data[e.table[0]["value"] : e.table[0]["value"] + e.table[0]["value_length"]]))
        for e in events
    ]
    assert [value["pos"] for value in values] == ["0000000000000020/00000001", "0000000000000040/00000003"]
    assert [value["relations"] for value in values] == [
        [TABLES[1].qualified, TABLES[0].qualified],
        [TABLES[0].qualified, 99],
    ]
    assert [value["topics"] for value in values] == [["topic2", "topic1"], ["topic1"]]
    assert [(value["cascade"], value["restart_identity"]) for value in values] == [(True, True), (False, False)]
    assert [(value["xid"], int(e.table[0]["time"])) for value, e in zip(values, events, strict=True)] == [
        (701, 1_700_000_000_001),
        (703, 1_700_000_000_003),
    ]
    assert {int(e.table[0]["topic"]) for e in events} == {5}
    assert {value["pipeline"] for value in values} == {"7/shop/shop"}


@pytest.mark.parametrize("position", ["", "0000000000000030/00000000"])
def test_a_position_of_something_else_lets_nothing_pass(position: str) -> None:
    stop = truncate_stop(pipeline(on_truncate="stop", skip_position=position), BATCH)
    assert stop is not None and stop.position == "0000000000000020/00000001"
