"""The records of a slot's state topic: each is read as it was written, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.model.attached import AttachedTable
from airflow_bottledwater.model.boundary import Boundary, Snapshot
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.relation import Column, ColumnType, Member, SourceTable
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.postgres.coverage import Coverage, Publication
from airflow_bottledwater.postgres.partitions import KnownPartition
from airflow_bottledwater.state import records
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import StateRecord

_PRICE = ColumnType(90000, -1, 1700, (10 << 16 | 2) + 4, "b", "public.price")
_DEEP = ColumnType(1231, -1, 1231, -1, "b", "numeric[][]", _PRICE, 2, attributes=(Column("x", _PRICE),), labels=("l",))
_COLUMNS = (Column("a", _PRICE, "what it costs"), Column("b", _PRICE, required=True), Column("c", _DEEP))
_TABLE = SourceTable(16384, "crêpes", "t", "f", ("b", "a"), _COLUMNS, 7, "x", "p", 3, True, key_problem="why")
_PARTITIONS = records.Partitions({7: KnownPartition("public.a", 2**31, "77"), 8: KnownPartition("public.b", 0)})

RECORDS: dict[str, StateRecord] = {
    records.CLAIM: Job.next(None, "stream"),
    records.IDS: records.Ids(("a", "b")),
    records.INTENT: records.Intent("shop", "shop", 1.5, "7381", "root", "avro", "", {"1": "2/3"}),
    records.SAVED_SETTINGS: records.SavedSettings({"tables": ["a"], "partitions": 6}),
    records.SLOT: SlotRecord("shop", "7381", 1, "shop", 2**40, 12),
    records.COVERAGE: Coverage({"shop": Publication(500, "77", 10, False, "insert")}, {1: frozenset({901, 7})}),
    records.COMPLETE: records.Complete((1, 2), False, 2.5),
    records.POSITION: records.Reached(2**63, 3, 4.5, "f", 2, 7, 0, 5),
    records.table_key(1): PinnedTable(_TABLE, "shop.t", "id", 6, 1, 2, 2**33),
    records.boundary_key(1): Boundary(Snapshot(2**33, 2**33 + 9, (2**33 + 1, 2**33 + 4)), 2**40, 2**33, True),
    records.plan_key(1): records.Plan(7, "definition", ((0, 10, 0), (10, 20, 1))),
    records.progress_key(1, 2): records.Progress(1000, 20, True, 1, 3),
    records.sweep_key(1): records.Sweep((1, 2**40), False),
    records.partitions_key(1): _PARTITIONS,
    records.gap_key(1): records.Gap("was paused by alice", held=True, paused=True, at=5.5),
    records.types_key(1): records.ChangedTypes(
        (Column("m", ColumnType(7, -1, 7, -1, "e", "mood", members=(Member(9, "sad", 700),))),)
    ),
    records.stopped_key(2): records.Stopped(_TABLE),
    records.schema_key(1, 3): records.LaterSchema(_TABLE, 3),
    records.former_key("shop.t"): records.Former(1, "public.t"),
    records.start_key("shop.t"): records.StartOffsets("id", (7, 2**40)),
    records.attached_key(1): AttachedTable("public.t"),
    records.letters_key(1, records.by_lane(3)): records.Letters("public.t", 7, 2),
    records.live_key("x"): records.LiveProgress((1, 2), upto=7, key=("a",), found=_PARTITIONS, required=True),
}


@pytest.mark.parametrize("key", RECORDS)
def test_a_record_is_read_as_it_was_written(key: str) -> None:
    assert records.decode(key, json.loads(json.dumps(records.encode(RECORDS[key])))) == RECORDS[key]


def test_there_is_an_example_of_each_record() -> None:
    assert {type(each) for each in RECORDS.values()} == set(records.StateRecord.__args__)


@pytest.mark.parametrize(
    ("key", "raw", "problem"),
    [
        ("news/1", {}, "does not know (its key)"),
        ("sweep/1", {"ends": [1], "done": True, "later": 1}, "does not know (its field 'later')"),
        ("ids", {"ids": ["a"], "later": {}}, "does not know (its field 'later')"),
        ("sweep/1", {"ends": ["x"], "done": True}, "malformed for this version of the provider: Expected `int`, got"),
        ("boundary/1", {"snapshot": "1:2:", "insert_lsn": 1, "oldest_xid": 1, "filtered": True}, "malformed"),
        ("coverage", {"publications": {}, "tables": {"x": [1]}}, "malformed"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(key: str, raw: dict[str, object], problem: str) -> None:
    with pytest.raises(StateError) as raised:
        records.decode(key, raw)
    assert problem in str(raised.value)


def _holders(record: Any, raw: Any) -> Iterator[dict[str, Any]]:
    """The parts of a raw record that are records themselves: mappings by names of people have no fields."""
    if is_dataclass(record):
        yield raw
        for each in fields(record):
            yield from _holders(getattr(record, each.name), raw.get(each.name))
    elif isinstance(record, Mapping):
        for name, value in record.items():
            yield from _holders(value, raw[str(name)])
    elif isinstance(record, tuple | list):
        for value, found in zip(record, raw, strict=True):
            yield from _holders(value, found)


@pytest.mark.parametrize("key", RECORDS)
def test_a_field_that_is_not_known_is_refused_at_any_depth(key: str) -> None:
    raw = json.loads(json.dumps(records.encode(RECORDS[key])))
    for holder in _holders(RECORDS[key], raw):
        holder["later"] = 1
        with pytest.raises(StateError, match=r"does not know \(its field 'later'\)"):
            records.decode(key, raw)
        del holder["later"]
    assert records.decode(key, raw) == RECORDS[key]


def test_a_record_of_another_version_is_refused_although_nobody_asks_for_it() -> None:
    known = {key: records.encode(each) for key, each in RECORDS.items()}
    PipelineState(dict(known)).check()
    with pytest.raises(StateError, match=r"has a record 'hold/7' that this version does not know \(its key\)"):
        PipelineState({**known, "hold/7": {}}).check()


def test_open_dead_letters_are_told_by_the_name_that_their_table_has_now() -> None:
    now = PinnedTable(replace(_TABLE, oid=7, schema="public", name="now"), "shop.t", "id", 6, 1, 2, 2**33)
    known = PipelineState({})
    known.apply(
        {
            records.table_key(7): now,
            records.letters_key(7, records.by_lane(3)): records.Letters("public.before", 2),
            records.letters_key(7, records.BY_STREAM): records.Letters("public.now", 1),
            records.letters_key(8, records.BY_STREAM): records.Letters("public.gone", 4, 1),
        }
    )
    assert known.open_letters == {"public.gone": {"stream": 3}, "public.now": {"snapshot": 2, "stream": 1}}


def test_a_pipeline_begins_at_the_beginning_of_a_topic_that_was_made_again() -> None:
    known = PipelineState({})
    known.apply({records.start_key("shop.t"): records.StartOffsets("id", (7, 9))})
    assert known.start("shop.t", "id") == [7, 9]
    assert known.start("shop.t", "another") == [0, 0]
    assert known.start("shop.other", "id") is None


def test_a_snapshot_shows_how_far_the_server_was_once_a_part_of_it_is_published() -> None:
    known = PipelineState({})
    for oid, lsn in (1, 300), (2, 200):
        known.apply({records.boundary_key(oid): Boundary(Snapshot(9, 9, ()), lsn, 5, True)})
    assert known.shown == 0
    known.apply({records.progress_key(2, 0): records.Progress(1, 5, False, 0, 1)})
    assert known.shown == 200
