"""What of a batch is published when a table is set aside because of a record in it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from airflow_bottledwater.encoding import layout
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.publish.reject import Rejection
from airflow_bottledwater.stream.aside import left_out, set_aside
from airflow_bottledwater.stream.events import published_truncates, truncate_events
from airflow_bottledwater.stream.stops import truncate_stop
from tests.support import wire as w
from tests.unit.stream.test_stops import TABLES, VERSIONS

#: of the tables in turn, two transactions: of three changes, and of six with a TRUNCATE of the first, and of both
CHANGES = [
    *((0, w.insert(1, b"a"), 16), (1, w.insert(2, b"b"), 16), (0, w.insert(1, b"c"), 16)),
    *((0, w.insert(1, b"d"), 32), (1, w.insert(2, b"e"), 32), (0, w.insert(1, b"f"), 32)),
    *((0, w.truncate([1]), 32), (0, w.truncate([1, 2]), 32), (1, w.insert(2, b"g"), 32)),
]
PROGRAMS: Any = SimpleNamespace(tables=TABLES)


def _batch() -> Batch:
    changes, at = np.zeros(len(CHANGES), dtype=layout.CHANGE), 0
    for i, (relation, data, lsn) in enumerate(CHANGES):
        changes[i]["kind"], changes[i]["relation"], changes[i]["offset"] = data[0], relation, at
        changes[i]["length"], changes[i]["lsn"], changes[i]["ordinal"] = len(data), lsn, i + 1
        at += len(data)
    whole = np.frombuffer(b"".join(data for _, data, _ in CHANGES), dtype=np.uint8)
    return Batch(Position(0), Position(33), whole, changes, VERSIONS)


BATCH = _batch()


def _encoded(*rejections: Rejection) -> EncodedBatch:
    table = np.zeros(7, dtype=layout.RECORD)
    table["row"] = [i for i, (_, data, _) in enumerate(CHANGES) if data[:1] == b"I"]
    made: Any = SimpleNamespace(batch=BATCH)
    return EncodedBatch(made, Records(table, np.zeros(1, dtype=np.uint8), 0, ""), list(rejections))


def _pipeline(**settings: Any) -> Settings:
    return Settings.of(postgres="dbname=none", format="json", **{"on_error": "isolate", **settings})


def _rows(found: EncodedBatch) -> list[int]:
    return found.records.table["row"].tolist()


def test_without_such_a_record_the_batch_is_as_it_was() -> None:
    whole = _encoded()
    assert set_aside(_pipeline(), whole, PROGRAMS, ()) is whole
    letters = _encoded(Rejection(3, "it is too large"))
    assert set_aside(_pipeline(on_error="log"), letters, PROGRAMS, ()) is letters
    assert set_aside(_pipeline(skip_position="0000000000000020/00000004"), letters, PROGRAMS, ()) is letters


def test_a_table_is_set_aside_from_its_transaction_on_and_the_first_reason_counts() -> None:
    found = set_aside(_pipeline(), _encoded(Rejection(5, "second."), Rejection(3, "first.")), PROGRAMS, ())
    assert _rows(found) == [0, 1, 2, 4, 8] and found.rejections == [] and found.held == {1: 32}
    assert list(found.gaps) == [1] and found.gaps[1].held and not found.gaps[1].paused
    assert found.gaps[1].why == "has a change at 0000000000000020/00000004 that cannot be published (first)"
    assert left_out(found, found.held).tolist() == [3, 5, 6, 7]
    # of the TRUNCATE of both, the other one is told
    (event,) = truncate_events(BATCH, 5, "7/shop/shop", found.held)
    value = bytes(event.data[event.table[0]["value"] : event.table[0]["value"] + event.table[0]["value_length"]])
    assert json.loads(value)["topics"] == ["topic2"]
    assert published_truncates(BATCH, found.held).tolist() == [7]
    assert published_truncates(BATCH, {1: 33}).tolist() == published_truncates(BATCH, {}).tolist() == [6, 7]


def test_nothing_of_a_table_that_is_held_already_is_published_or_sets_it_aside_again() -> None:
    found = set_aside(_pipeline(), _encoded(Rejection(0, "again"), Rejection(4, "the other")), PROGRAMS, {1})
    assert _rows(found) == [1] and found.held == {1: 0, 2: 32} and list(found.gaps) == [2]
    whole = set_aside(_pipeline(), _encoded(), PROGRAMS, {1, 99})
    assert _rows(whole) == [1, 4, 8] and not whole.gaps


def test_a_record_of_a_table_with_another_policy_stays_what_it_is() -> None:
    programs: Any = SimpleNamespace(tables=(TABLES[0], replace(TABLES[1], name="u")))
    pipeline = _pipeline(table_options={"t": {"on_error": "log"}})
    found = set_aside(pipeline, _encoded(Rejection(0, "a letter"), Rejection(4, "the other")), programs, ())
    assert [each.row for each in found.rejections] == [0] and found.held == {2: 32}


def test_a_truncate_of_what_is_held_ends_nothing() -> None:
    stopping = _pipeline(on_truncate="stop")
    stop = truncate_stop(stopping, BATCH, {1})
    assert stop is not None and stop.position == "0000000000000020/00000008"
    assert truncate_stop(stopping, BATCH, {1, 2}) is None
