"""Outboxes for the writers: events by rows and by messages, in the same topics, with a log of their own."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from airflow_bottledwater.encoding.outbox_message import chooses
from tests.support.topics import Flow, Message

OUTBOX, KINDS = "outbox", ("order", "bill")
#: what a pipeline is to have for them
OPTIONS: dict[str, Any] = {OUTBOX: {"outbox": "outbox.{kind}", "outbox_key": "aggregate", "partitions": 2}}
MESSAGES = {OUTBOX: "outbox.{topic}"}
SCHEMA = (
    f"CREATE TABLE {OUTBOX} (kind text, aggregate bigint, payload bigint)",
    "CREATE TABLE checker_events (n bigint, xid bigint, kind text, aggregate bigint)",
)
_LOG = " INSERT INTO checker_events SELECT n, pg_current_xact_id()::text::bigint, '{kind}', {aggregate} FROM told"
_BY_ROW = (
    f"WITH told AS (INSERT INTO {OUTBOX} VALUES ('{{kind}}', {{aggregate}}, nextval('checker_n'))"
    " RETURNING payload AS n)" + _LOG
)
_BY_MESSAGE = (
    f"WITH next AS (SELECT nextval('checker_n') AS n), told AS MATERIALIZED (SELECT n, pg_logical_emit_message("
    f"{{transactional}}, '{OUTBOX}', json_build_object('topic', '{{kind}}', 'key', {{aggregate}}, 'payload', n)::text)"
    " AS lsn FROM next)" + _LOG + " WHERE lsn > '0/0'"
)


def has_outbox(flow: Flow) -> bool:
    """Whether the pipeline has the outboxes."""
    return any(chooses(topic) for topic in flow.pipeline.messages.values())


def events(dice: random.Random, aggregate: int) -> Iterator[str]:
    """Statements that tell some events of an aggregate."""
    for _ in range(dice.randrange(4)):
        yield dice.choice((_BY_ROW, _BY_MESSAGE)).format(
            kind=dice.choice(KINDS), aggregate=aggregate, transactional=True
        )


def by_topic(flow: Flow) -> dict[int, Counter[str]]:
    """How many records of each topic the events of a transaction are."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for xid, kind, n in flow.execute("SELECT xid, kind, count(*) FROM checker_events GROUP BY xid, kind"):
        found[xid][flow.topic(f"outbox.{kind}")] += n
    return found


def check_events(flow: Flow, oldest_xid: int) -> None:
    """Compare the topics of outboxes with what was committed: each event is there once, with its transaction, and those
    of an aggregate are in the order of the commits.

    :param oldest_xid: the first transaction that has certainly written behind the slot's consistent point.
    """
    log = {n: (xid, kind, str(key)) for n, xid, kind, key in flow.execute("SELECT * FROM checker_events")}
    found = {kind: flow.read(f"outbox.{kind}") for kind in KINDS}
    numbers = [message.value for some in found.values() for message in some]
    assert len(set(numbers)) == len(numbers), "an event comes twice"
    assert {n for n, (xid, _, _) in log.items() if xid >= oldest_xid} <= set(numbers), "an event is lost"
    for kind, some in found.items():
        by_key: dict[str, list[Message]] = defaultdict(list)
        for message in sorted(some, key=lambda each: (each.partition, each.offset)):
            assert log.get(message.value) == (int(message.xid), kind, message.key), f"nobody has told {message}"
            by_key[message.key].append(message)
        for events_of in by_key.values():
            assert len({each.partition for each in events_of}) == 1
            places = [each.pos for each in events_of]
            assert places == sorted(set(places)), "an aggregate's events are out of order"
            of_transaction: dict[str, int] = {}
            for each in events_of:
                assert of_transaction.get(each.xid, 0) < each.value, "a transaction's events are out of order"
                of_transaction[each.xid] = each.value
