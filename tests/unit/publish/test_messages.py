"""Logical messages become records: their own, or those that they describe."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from airflow_bottledwater.encoding import kernels, wire
from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.chosen import ChosenTopics
from airflow_bottledwater.publish.messages import Messages
from airflow_bottledwater.publish.reject import Rejection
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.stream.messages import MessageTopics

_RULES = {"plain*": "others", "o*": "events.{topic}.v1", "any": "{topic}"}


class _Session:
    """A session whose topics are only names."""

    def __init__(self) -> None:
        self.pipeline = Settings.of(
            postgres="host=db", format="json", registry={}, topic_prefix="p", messages=_RULES, transaction_topic="ends"
        )
        self.topics = ["p.others", "p.orders", "p._bottledwater_events"]
        self.chosen: set[str] = set()
        self.partitions = dict.fromkeys(self.topics, 1)
        self.backoff = SimpleNamespace()
        self.asked: list[str] = []

    @property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.topics)}

    def include(self, names: Sequence[str]) -> None:
        assert not set(names) & set(self.topics)
        self.topics += names
        self.chosen.update(names)
        self.partitions |= dict.fromkeys(names, 7)

    def make(self, wanted: Sequence[str], table: SourceTable) -> dict[str, str]:
        assert not table.oid
        self.asked += wanted
        return {name: "it belongs to others" for name in wanted if "others" in name}


def _batch(session: _Session, *messages: tuple[str, object, bool]) -> Batch:
    """A batch of messages, each with its prefix, its content and whether it is of a transaction."""
    topics = MessageTopics(TableMapping.of(session.pipeline))
    versions = list[Version]()
    changes, data = np.zeros(len(messages), dtype=CHANGE), b""
    for number, (prefix, said, transactional) in enumerate(messages):
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        message = b"M" + bytes([transactional]) + bytes(8) + prefix.encode() + b"\0" + struct.pack(">I", len(content))
        version = topics(prefix)
        assert version is not None
        if version not in versions:
            versions.append(version)
        xid = 9 if transactional else 0
        place = versions.index(version), 100 + number, 1, xid, 5000 + number, xid << wire.FLAG_XID_SHIFT
        changes[number] = (ord("M"), len(data), len(message) + len(content), *place)
        data += message + content
    found = np.frombuffer(bytearray(data), dtype=np.uint8)
    return Batch(Position(1), Position(10_000), found, changes, tuple(versions))


def _published(*messages: tuple[str, object, bool]) -> tuple[list[dict[str, Any]], list[Rejection], _Session]:
    session = _Session()
    of, batch = Messages(ChosenTopics(cast(PublishSession, session), session.make)), _batch(session, *messages)
    of.prepare(batch)
    records, rejections = of.records(batch, wire.HEADERS)
    return [_read(session, records, i) for i in range(len(records))], rejections, session


def _read(session: _Session, records: Records, i: int) -> dict[str, Any]:
    row, found = records.table[i], dict[str, Any]()
    for part in ("key", "value"):
        at, n = int(row[part]), int(row[f"{part}_length"])
        found[part] = None if n < 0 else bytes(records.data[at : at + n])
    own = bytes(records.data[row["headers"] : row["headers"] + row["headers_length"]])
    numbers = {name: int(row[name]) for name in ("row", "lsn", "ordinal", "time", "partition")}
    return {**found, **numbers, "topic": session.topics[row["topic"]], "event": chr(row["event"]), "own": own}


def test_messages_are_records_of_their_own_or_those_that_they_describe() -> None:
    found, rejections, session = _published(
        ("plain", b"\x00\xff", True),
        ("o", {"topic": "a", "key": "k", "payload": {"n": 1}, "headers": {"h": "é"}}, True),
        ("o2", {"topic": "a", "payload": None}, False),
        ("any", {"topic": "b.c", "key": 7, "payload": ""}, True),
    )
    assert not rejections and session.asked == ["p.events.a.v1", "p.b.c"]
    assert [(each["topic"], each["key"], each["value"]) for each in found] == [
        ("p.others", b"plain", b"\x00\xff"), ("p.events.a.v1", b"k", b'{"n": 1}'), ("p.events.a.v1", None, None),
        ("p.b.c", b"7", b""),
    ]  # fmt: skip
    assert [each["event"] for each in found] == ["m", "m", "n", "m"]
    assert [(each["row"], each["lsn"], each["time"]) for each in found] == [(i, 100 + i, 5000 + i) for i in range(4)]
    assert [each["own"] for each in found] == [b"", b"\0\0\0\2h\0\0\0\0\2\xc3\xa9", b"", b""]
    spread = [kernels.murmur2(np.frombuffer(bytearray(key), dtype=np.uint8), 0, n) for key, n in ((b"k", 1), (b"0", 0))]
    assert [each["partition"] for each in found[:3]] == [0, *(int(hashed) % 7 for hashed in spread)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no JSON", "the content of the message is not the JSON object"),
        ({"topic": "a"}, "the content of the message has no payload"),
        ({"topic": "", "payload": 1}, "the topic that it names is empty"),
        ({"topic": "a/b", "payload": 1}, "has a value with '/'"),
        ({"topic": "é", "payload": 1}, "which no topic's name may have"),
        ({"topic": "x" * 250, "payload": 1}, "more than 249 characters"),
        ({"topic": "x.others", "payload": 1}, "it belongs to others"),
        *(
            ({"topic": topic, "payload": 1}, "not for records of an outbox")
            for topic in ("orders", "others", "ends", "_bottledwater_events", "_bottledwater")
        ),
    ],
)
def test_a_message_that_cannot_be_published_is_rejected_and_the_others_are_not(content: object, said: str) -> None:
    good = {"topic": "a", "payload": 1}
    found, (rejection,), session = _published(("any", good, True), ("any", content, True), ("any", good, False))
    assert [each["row"] for each in found] == [0, 2]
    assert rejection.row == 1 and said in rejection.reason
    assert set(session.asked) <= {"p.a", "p.x.others"}


def test_a_message_has_no_options_of_a_table() -> None:
    """Not even those of a pattern that all names match."""
    session = _Session()
    rules = {"*.*": {"outbox": "x.{a}"}}
    session.pipeline = session.pipeline.with_(table_options=rules)
    of, batch = Messages(ChosenTopics(cast(PublishSession, session), session.make)), _batch(session, ("o", b"1", True))
    of.prepare(batch)
    records, (rejection,) = of.records(batch, wire.HEADERS)
    assert not len(records) and "JSON object" in rejection.reason


@pytest.mark.parametrize("topic", ["{topic}{topic}", "{name}", "a b{topic}", "x" * 61 + "{topic}", "{topic"])
def test_the_topic_of_a_rule_has_one_place_for_what_messages_name(topic: str) -> None:
    with pytest.raises(SettingError, match=r"one \{topic\}"):
        Settings.of(postgres="host=db", format="json", registry={}, messages={"o": topic})
