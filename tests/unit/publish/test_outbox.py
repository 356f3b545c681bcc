"""The rows of outboxes become records: the compiled way, compared with a readable one."""

from __future__ import annotations

import random
import re
import struct
import uuid
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from airflow_bottledwater.encoding import kernels, layout, outbox, wire
from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.chosen import ChosenTopics
from airflow_bottledwater.publish.outbox import Outbox
from airflow_bottledwater.publish.reject import Rejection
from airflow_bottledwater.publish.session import PublishSession
from tests.support.blocks import headers_of
from tests.support.wire import plain, table

_OIDS = {"kind": 25, "key": 20, "at": 21, "id": 2950, "body": 3802, "raw": 17, "rest": 1700}
_RULE = {
    "outbox": "events.{kind}", "outbox_key": "key", "outbox_payload": "body",
    "outbox_headers": {"id": "id", "at": "when", "raw": "raw"},
}  # fmt: skip
TABLE = replace(table(*((name, plain(oid)) for name, oid in _OIDS.items())), outbox=True)


class _Session:
    """A session whose topics are only names."""

    def __init__(self, rule: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"topic_prefix": "p", "table_options": {"t*": rule}}
        self.pipeline = Settings.of(postgres="host=db", format="json", registry={}, **settings)
        self.topics = ["p.other", "p._bottledwater_events", "_bottledwater.db.slot"]
        self.chosen: set[str] = set()
        self.backoff = SimpleNamespace()
        self.asked: list[str] = []

    @property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.topics)}

    @property
    def partitions(self) -> dict[str, int]:
        return dict.fromkeys(self.topics, 7)

    def include(self, names: Sequence[str]) -> None:
        assert not set(names) & set(self.topics)
        self.topics += names
        self.chosen.update(names)

    def make(self, wanted: Sequence[str], table: SourceTable) -> dict[str, str]:
        self.asked += wanted
        return {name: "it belongs to others" for name in wanted if "others" in name}


def _outbox(rule: dict[str, Any] = _RULE) -> tuple[Outbox, _Session]:
    session = _Session(rule)
    return Outbox(ChosenTopics(cast(PublishSession, session), session.make)), session


def _batch(messages: Sequence[bytes], of: SourceTable = TABLE, route: str = "p.events.{kind}") -> Batch:
    changes, at = np.zeros(len(messages), dtype=CHANGE), 0
    for number, message in enumerate(messages):
        changes[number] = (message[0], at, len(message), 0, 100 + number, 1, 9, 5000 + number, 9 << wire.FLAG_XID_SHIFT)
        at += len(message)
    data = np.frombuffer(bytearray(b"".join(messages) or b"\0"), dtype=np.uint8)
    return Batch(Position(1), Position(10_000), data, changes, (Version(of, route),))


def _row(*values: bytes | None, kind: str = "I") -> bytes:
    fields = [Field("n") if value is None else Field("b", value) for value in values]
    return RowMessage(kind, 1, "", None, fields).encode()


def _headers(records: Records, i: int) -> list[tuple[str, bytes | None]]:
    row = records.table[i]
    return headers_of(bytes(records.data[row["headers"] : row["headers"] + row["headers_length"]]))


def _part(records: Records, i: int, part: str) -> bytes | None:
    row = records.table[i]
    at, n = int(row[part]), int(row[f"{part}_length"])
    return None if n < 0 else bytes(records.data[at : at + n])


def _published(of: Outbox, batch: Batch) -> tuple[Records, list[Rejection]]:
    of.prepare(batch)
    return of.records(batch, wire.HEADERS)


@pytest.mark.parametrize("seed", range(20))
def test_records_have_what_their_rows_say(seed: int) -> None:
    dice, messages, expected = random.Random(seed), [], []
    for _ in range(dice.randrange(1, 700)):
        kind, n, at = dice.choice(["a", "b.c", "long-" * 9]), dice.randrange(-(2**63), 2**63), dice.randrange(-9, 9)
        id, body, raw = uuid.UUID(int=dice.getrandbits(128)), dice.randbytes(dice.randrange(900)), dice.randbytes(3)
        key = None if dice.random() < 0.1 else struct.pack(">q", n)
        value = None if dice.random() < 0.1 else b"\1" + body
        row = (kind.encode(), key, struct.pack(">h", at), id.bytes, value, raw if at else None, b"any")
        messages.append(_row(*row))
        headers = [("id", str(id).encode()), ("when", str(at).encode()), ("raw", raw if at else None)]
        expected.append((f"p.events.{kind}", key and str(n).encode(), None if value is None else body, headers))
    batch = _batch(messages)
    of, session = _outbox()
    records, rejections = _published(of, batch)
    assert not rejections and len(records) == len(messages)
    assert sorted(session.asked) == sorted({topic for topic, *_ in expected})
    for i, (topic, key, value, headers) in enumerate(expected):
        row = records.table[i]
        assert (_part(records, i, "key"), _part(records, i, "value")) == (key, value)
        assert session.topics[row["topic"]] == topic and _headers(records, i) == headers
        text = np.frombuffer(bytearray(key or b"\0"), dtype=np.uint8)
        assert row["partition"] == kernels.murmur2(text, 0, len(key or b"")) % 7
        assert (row["row"], row["lsn"], row["ordinal"], row["time"], row["event"]) == (
            i,
            100 + i,
            1,
            5000 + i,
            ord("c"),
        )
    assert records.sizes().min() >= records.table["headers_length"].min()
    # a part of it needs no topic that is not there
    part, _ = of.records(batch.leading(len(batch) // 2 or 1), 0)
    assert len(part) == (len(batch) // 2 or 1)


_GOOD = (b"a", struct.pack(">q", 1), struct.pack(">h", 1), bytes(16), b"\1{}", b"", b"")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({0: None}, "column 'kind', which chooses the topic, is empty"),
        ({0: b""}, "is empty"),
        ({0: b"a/b"}, "has a value with '/'"),
        ({0: b"\xff"}, "which no topic's name may have"),
        ({0: b"x" * 250}, "more than 249 characters"),
        ({0: b"others"}, "it belongs to others"),
        ({3: bytes(3)}, "layout of its type"),
        ({1: bytes(3)}, "layout of its type"),
        ({4: b"\2{}"}, "layout of its type"),
    ],
)
def test_a_row_that_cannot_be_a_record_is_rejected_and_the_others_are_not(row: dict[int, Any], said: str) -> None:
    bad = [row.get(i, value) for i, value in enumerate(_GOOD)]
    records, rejections = _published(_outbox()[0], _batch([_row(*_GOOD), *[_row(*bad)] * 600, _row(*_GOOD)]))
    assert [each.row for each in rejections] == list(range(1, 601))
    assert all(said in each.reason for each in rejections)
    assert records.table["row"].tolist() == [0, 601]


def test_values_that_cannot_be_are_not_kept() -> None:
    """There may be ever others: what is looked up for each row would grow with them."""
    of, _ = _outbox()
    for n in range(3):
        bad = [_row(b"%d/%d" % (n, i), *_GOOD[1:]) for i in range(300)]
        records, rejections = _published(of, _batch([*bad, _row(*_GOOD), *bad]))
        assert (len(records), len(rejections)) == (1, 600)
        assert len(of._routes) == 301
    _published(of, _batch([_row(*_GOOD)]))
    assert [route.topic for route in of._routes] == ["p.events.a"]


def test_a_renamed_outbox_keeps_its_topics() -> None:
    """Also if the options give its new name others, which another column chooses."""
    of, session = _outbox({**_RULE, "outbox": "{table}.{key}"})
    records, rejections = _published(of, _batch([_row(*_GOOD)], replace(TABLE, name="t_old")))
    assert not rejections and len(records) == 1 and session.asked == ["p.events.a"]


@pytest.mark.parametrize("value", [b"other", b"_bottledwater_events", b"_bottledwater.db.slot", b"_bottledwater"])
def test_a_row_never_writes_to_a_topic_that_is_somebody_elses(value: bytes) -> None:
    of, session = _outbox()
    records, rejections = _published(of, _batch([_row(value, *_GOOD[1:])], route="p.{kind}"))
    assert not len(records) and "not for records of an outbox" in rejections[0].reason and not session.asked


def test_only_inserts_are_records() -> None:
    deleted = RowMessage("D", 1, "K", [Field("b", b"a")] + [Field("n")] * 6, None).encode()
    records, (rejection,) = _published(_outbox()[0], _batch([_row(*_GOOD, kind="U"), deleted, _row(*_GOOD)]))
    assert records.table["row"].tolist() == [2]
    assert rejection.row == 0 and "was updated" in rejection.reason


def test_rows_of_a_table_without_the_columns_are_rejected() -> None:
    less = replace(TABLE, columns=tuple(column for column in TABLE.columns if column.name != "body"))
    records, (rejection,) = _published(_outbox()[0], _batch([_row(*_GOOD[:4], *_GOOD[5:])], less))
    assert not len(records) and "no column 'body'" in rejection.reason


@pytest.mark.parametrize(
    ("route", "value", "topic"),
    [
        ("events.{kind}.v1", b"a", "events.a.v1"),
        ("events", b"whatever it is", "events"),
        ("{kind}", b"..", ".."),
    ],
)
def test_topics_of_a_route_match_its_pattern(route: str, value: bytes, topic: str) -> None:
    assert outbox.topic_of(route, value) == topic
    assert re.fullmatch(outbox.pattern_of(route), topic)


def test_an_outbox_has_its_schema_and_table_in_its_topics() -> None:
    mapping = TableMapping(prefix="p", rules={"*": Table(outbox="{schema}.{table}.{kind}")})
    assert mapping.topic(TABLE) == mapping.route(TABLE) == "p.public.t.{kind}"
    assert not mapping.subjects("p.t", TABLE) and not TABLE.keyed and TABLE.identifiable


@pytest.mark.parametrize("value", ["{a}{b}", "x{", "{}", "a b", "x{a}y{b}"])
def test_a_route_has_one_column(value: str) -> None:
    with pytest.raises(SettingError, match=re.escape("one {column}")):
        Table(outbox=value)


def test_several_parts_may_be_of_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is needed for each of them: nothing is written behind the buffer."""
    behind = []

    def output(records: int, errors: int, size: int) -> layout.Output:
        data = np.full(size + (2 << 20), 0xAB, dtype=np.uint8)
        behind.append(data[size:])
        arrays = np.zeros(records, dtype=layout.RECORD), np.zeros(errors, dtype=layout.ERROR)
        return layout.Output(*arrays, data[:size])

    body = b"\1" + b"x" * 300_000
    row = [*_GOOD[:4], body, *_GOOD[5:]]
    of, _ = _outbox({**_RULE, "outbox_key": "body", "outbox_headers": {"body": "again", "kind": "kind"}})
    monkeypatch.setattr(layout, "output", output)
    # of one row, so that whatever is written lies in the first buffer or behind it
    records, rejections = _published(of, _batch([_row(*row)]))
    assert len(behind) == 1 and (behind[0] == 0xAB).all()
    assert not rejections and len(records) == 1
    assert _part(records, 0, "key") == _part(records, 0, "value") == body[1:]
    assert _headers(records, 0) == [("again", body[1:]), ("kind", b"a")]


@pytest.mark.parametrize("column", [0, 1, 4, 5])
def test_what_was_not_sent_is_not_another_rows(column: int) -> None:
    """An update that brings a row into a row filter is sent as an insert, without the large values that it left as
    they were."""
    fields = [Field("b", value) for value in _GOOD]
    fields[column] = Field("u")
    lacking = RowMessage("I", 1, "", None, fields).encode()
    records, (rejection,) = _published(_outbox()[0], _batch([_row(*_GOOD), lacking, _row(*_GOOD)]))
    assert records.table["row"].tolist() == [0, 2]
    assert rejection.row == 1 and "was not sent" in rejection.reason
