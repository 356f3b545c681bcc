"""The forms of records, drawn at random, and what a consumer makes of each: rows, and what was there before them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from tests.support.compare import Schemas
from tests.support.history import Before
from tests.support.options import draw_options
from tests.support.protobuf_messages import ProtobufMessages
from tests.support.topics import Flow, Message

#: gives a pipeline its form, by a seed (``tests/support/fixtures.py``), and some of these tables their identity
Draw = Callable[[Flow, int, Sequence[str]], None]
#: what ``source.snapshot`` says of a row of the stream, of a snapshot, and of one that was read again
_STREAM, _SNAPSHOT, _LIVE = "false", "true", "incremental"
#: settings, and whether they need a registry
FORMS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({}, False),
    ({"before": "header"}, False),
    ({"before": "header"}, True),
    ({"envelope": "debezium"}, False),
    ({"envelope": "debezium", "envelope_schema": True}, False),
    ({"envelope": "debezium"}, True),
    ({"format": "json-schema"}, True),
    ({"format": "protobuf", "before": "header"}, True),
)


def draw_form(seed: int, flow: Flow, registry: Callable[[], SchemaRegistry], tables: Iterable[str]) -> None:
    """Give a pipeline that is not made yet one of :data:`FORMS`, by the seed, and some of its tables, which exist, an
    identity that has the whole old row; and the tables options (:func:`tests.support.options.draw_options`).

    :param registry: gives it, if it is needed.
    """
    dice = random.Random(f"forms {seed}")
    settings, registered = FORMS[seed % len(FORMS)]
    if registered:
        flow.registry = registry()
        settings = {"format": "avro", "registry": {"url": flow.registry.url}, **settings}
    flow.change(**settings)
    parted = {name for (name,) in flow.execute("SELECT relname FROM pg_class WHERE relkind = 'p'")}
    for table in tables:
        if dice.random() < 0.5 and table not in parted:
            flow.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    draw_options(seed, flow, tables)


def decoders(pipeline: Settings) -> tuple[Callable[[bytes], Any], Callable[[bytes], Any]]:
    """How keys, and values, of tables' topics are read."""
    if pipeline.format == "avro":
        schemas = Schemas(pipeline.registry)
        return schemas.decode, schemas.decode
    if pipeline.format == "json-schema":
        return _framed_json, _framed_json
    if pipeline.format == "protobuf":
        messages = ProtobufMessages(pipeline.registry)
        return messages.decode, messages.decode
    if pipeline.envelope_schema:
        return _payload, _payload
    return json.loads, json.loads


def _framed_json(data: bytes) -> Any:
    assert data[:1] == b"\0"
    return json.loads(data[5:])


def _payload(data: bytes) -> Any:
    found = json.loads(data)
    assert found.keys() == {"schema", "payload"}
    return found["payload"]


def before(row: Mapping[str, Any] | None) -> Before | None:
    """What an old row tells."""
    if row is None:
        return None
    large = row.get("large")  # of a key that was swept, nothing else may be told
    return Before(row["id"], row.get("version"), int(large.partition(":")[0]) if large else 0)


def unwrapped(found: Sequence[Message], table: str, *, committed: bool) -> list[Message]:
    """Records with envelopes as such without them: a change of a key is a tombstone and an update again, and a deletion
    one record, its tombstone, at an offset that has no gap for the other.

    :param found: the records of a table's topic, per partition in their order.
    :param committed: otherwise the tombstone of a deletion may be missing.
    """
    kept = list[Message]()
    deleted: dict[int, Message] = {}  # the last deletion of each partition, until its tombstone comes
    fewer: dict[int, int] = {}
    # the row under its new key may be in another partition, and come first
    moved = {message.pos for message in found if message.value is not None and message.value["op"] == "d"}
    for message in found:
        event = deleted.pop(message.partition, None)
        if message.value is None:
            assert event is not None, f"a tombstone without an event: {message}"
            same = replace(event, value=None, offset=message.offset, toast=message.toast)
            assert same == message and message.offset == event.offset + 1, f"{event} has the tombstone {message}"
            fewer[message.partition] = fewer.get(message.partition, 0) + 1
            continue
        assert event is None or not committed, f"{event} has no tombstone"
        _check_event(message, table)
        value, op = message.value["after"], message.op
        if message.value["op"] == "d":
            deleted[message.partition] = message
        elif op == "c" and message.pos in moved:
            op = "u"  # it is under its new key
        kept.append(
            replace(
                message, value=value, op=op, before=message.value["before"],
                offset=message.offset - fewer.get(message.partition, 0),
            )
        )  # fmt: skip
    assert not deleted or not committed, f"{deleted} have no tombstones"
    return kept


def _check_event(message: Message, table: str) -> None:
    """What an event says besides its rows is what its headers say."""
    event, source = message.value, message.value["source"]
    place = (source["schema"], source["table"], source["connector"])
    assert place == ("public", table, "postgresql"), message
    if message.pos:
        position = Position.parse(message.pos)
        assert (event["op"], source["snapshot"]) == (message.op, _STREAM), message
        assert (source["lsn"], source["sequence"]) == (position.lsn, f'["{position.lsn}","{position.ordinal}"]'), (
            message
        )
        assert source["txId"] == int(message.xid) and source["ts_ms"] == message.timestamp, message
    else:
        assert source["snapshot"] == (_LIVE if message.snapshot else _SNAPSHOT), message
        assert event["op"] == ("r" if event["after"] else "d"), message
    assert (event["after"] is None) == (event["op"] == "d"), message
