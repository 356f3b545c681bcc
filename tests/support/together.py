"""A consumer that puts source transactions together from all topics, by the records of their ends."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_bottledwater.encoding.outbox_message import chooses
from airflow_bottledwater.model.lsn import POSITION
from tests.support.forms import decoders
from tests.support.history import DELETE, MOVE, TRUNCATE, Change
from tests.support.outboxes import KINDS, by_topic, has_outbox
from tests.support.topics import Flow, Message, read, read_all

_EVENTS, _LETTERS = "_bottledwater_events", "_bottledwater_dead_letters"


@dataclass(slots=True)
class Together:
    """A source transaction as a consumer has put it together.

    :param end: the value of the record of its end.
    :param records: those of all topics that belong to it, by topic.
    """

    end: Mapping[str, Any]
    records: dict[str, list[Message]] = field(default_factory=lambda: defaultdict(list))


def put_together(flow: Flow, tables: Sequence[str], others: Sequence[str] = ()) -> list[Together]:
    """All source transactions, in the order of their ends; each of them has what its end says of these topics, and
    nothing else.

    :param others: other topics, behind the prefix.
    """
    names = [flow.topic(name) for name in (*tables, *others, _EVENTS, _LETTERS)]
    ends = read(flow.kafka, flow.topic(flow.pipeline.transaction_topic))
    found = {end.key: Together(end.value) for end in ends}
    assert len(found) == len(ends), "a transaction has two ends"
    assert [*found] == sorted(found), "the ends are not in the order of the commits"
    of_rows = names[: len(tables)]
    read_topics = read_all(flow.kafka, of_rows, decoders=decoders(flow.pipeline)) if of_rows else {}
    for topic, records in (read_topics | read_all(flow.kafka, names[len(tables) :])).items():
        for record in records:
            position = record.pos or (record.value or {}).get("pos", "")
            if not POSITION.fullmatch(position) or not int(position[:16], 16) or record.op == "n":
                continue  # a row of a snapshot, or of no transaction
            assert position[:16] in found, f"{topic} has {position}, whose transaction has no end"
            found[position[:16]].records[topic].append(record)
    for name, each in found.items():
        counts = {topic: len(records) for topic, records in each.records.items()}
        told = {topic: count for topic, count in each.end["topics"].items() if topic in names}
        assert told == counts, f"{name} has {counts}, its end says {each.end}"
        assert each.end["count"] == sum(each.end["topics"].values())
        assert each.end["transaction"] == name
        assert {record.xid for records in each.records.values() for record in records if record.xid} <= {
            str(each.end["xid"])
        }
    return [*found.values()]


def plain_topics(flow: Flow) -> list[str]:
    """The topics of messages that describe no records."""
    return sorted({topic for topic in flow.pipeline.messages.values() if not chooses(topic)})


def check_ends(
    flow: Flow, tables: Sequence[str], log: Sequence[Change], superseded: int, others: Collection[str] = ()
) -> None:
    """Compare the transactions that a consumer puts together with what was committed.

    :param log: what the writers committed.
    :param superseded: how many versions were left out.
    :param others: more tables, of which not all that was committed is published.
    """
    left = {flow.topic(table) for table in others}
    committed: dict[int, Counter[str]] = defaultdict(Counter)
    topics = plain_topics(flow)
    for xid, n in flow.execute("SELECT xid, count(*) FROM checker_messages WHERE transactional GROUP BY xid"):
        committed[xid].update({flow.topic(name): n for name in topics})
    if has_outbox(flow):
        for xid, counted in by_topic(flow).items():
            committed[xid].update(counted)
        topics = [*topics, *(f"outbox.{kind}" for kind in KINDS)]
    # an envelope has a tombstone behind the event of each deletion
    deleted = 1 + (flow.pipeline.envelope != "none")
    topic_of = functools.cache(flow.topic)
    for change in log:
        topic = topic_of(_EVENTS if change.op == TRUNCATE else change.table)
        committed[change.xid][topic] += {MOVE: deleted + 1, DELETE: deleted}.get(change.op, 1)
    missing = 0
    for each in put_together(flow, [*tables, *sorted(others)], topics):
        counts = Counter({topic: len(records) for topic, records in each.records.items()})
        expected = committed[each.end["xid"]]
        assert counts <= expected, f"{each.end}, of {expected}"
        # what the snapshot has shown is left out, by table
        missing += sum(expected[topic] - count for topic, count in counts.items() if topic not in left)
    # of a key change, all records are left out
    assert missing <= (deleted + 1) * superseded


def check_messages(flow: Flow, oldest_xid: int) -> None:
    """Compare the topic of logical messages with what was committed: each of a transaction is there once, with its
    transaction, and no other; each of none is there at most once, and certainly if the transaction that has written it
    was committed.

    :param oldest_xid: the first transaction that has certainly written behind the slot's consistent point.
    """
    log = flow.execute("SELECT n, xid, transactional FROM checker_messages")
    (topic,) = plain_topics(flow)
    found = flow.read(topic)
    assert [message.pos for message in found] == sorted(message.pos for message in found)
    numbers = [message.value for message in found]
    assert len(set(numbers)) == len(numbers), "a message comes twice"
    of_transactions = {(message.value, int(message.xid)) for message in found if message.op == "m"}
    assert of_transactions <= {(n, xid) for n, xid, own in log if own}
    assert {(n, xid) for n, xid, own in log if own and xid >= oldest_xid} <= of_transactions
    assert {n for n, xid, own in log if not own and xid >= oldest_xid} <= {m.value for m in found if m.op == "n"}
    assert not any(message.xid for message in found if message.op == "n")
