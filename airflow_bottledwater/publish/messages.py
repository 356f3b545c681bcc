"""Logical messages (``pg_logical_emit_message``) as records: the prefix is the key, and the content the value; or the
record that the content describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from airflow_bottledwater.encoding import kernels, outbox, outbox_message, wire
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.encoding.outbox_message import Described, NoRecord
from airflow_bottledwater.kafka.publisher import NO_RECORDS, Records
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.chosen import ChosenTopics
from airflow_bottledwater.publish.reject import Rejection


class _NamedTopic(NamedTuple):
    """The topic of messages that name one; empty if it cannot be, for a reason."""

    topic: str
    why: str = ""


class Messages:
    """Makes records of a batch's messages. The topics that they choose are made, and taken into the session, between
    two transactions (:meth:`prepare`).

    :param chosen: those topics.
    """

    def __init__(self, chosen: ChosenTopics) -> None:
        self._chosen, self._session = chosen, chosen.session
        #: by the rule's topic and what a message names
        self._routes: dict[tuple[str, bytes], _NamedTopic] = {}

    def prepare(self, batch: Batch) -> None:
        """Make the topics that messages of a batch choose, where they are missing, and take them into the session.

        :raises Refused: Kafka denies it.
        """
        tables = {version.topic: version.table for version in batch.versions if version.table.outbox}
        if not any(outbox_message.chooses(topic) for topic in tables):
            return
        # names that cannot be are not kept: there may be ever others
        self._routes = {place: route for place, route in self._routes.items() if route.topic}
        more: dict[tuple[str, bytes], _NamedTopic] = {}
        for _, rule, message in _messages(batch):
            if outbox_message.chooses(rule):
                try:
                    named = outbox_message.described(message.content).topic
                except NoRecord:
                    continue  # it is rejected where the others become records
                if (rule, named) not in self._routes and (rule, named) not in more:
                    more[rule, named] = self._route(rule, named)
        for rule, table in tables.items():
            refused = self._chosen.take(
                (each.topic for (of, _), each in more.items() if of == rule and each.topic), table
            )
            for place, each in more.items():
                if each.topic in refused:
                    more[place] = _NamedTopic("", refused[each.topic])
        self._routes |= more

    def _route(self, rule: str, named: bytes) -> _NamedTopic:
        """The route of messages, before anybody is asked whether its topic can be."""
        try:
            topic = outbox.topic_of(rule, named)
        except ValueError as error:
            return _NamedTopic("", f"the topic that it names {error}")
        return _NamedTopic("", why) if (why := self._chosen.problem(topic)) else _NamedTopic(topic)

    def records(self, batch: Batch, headers: int) -> tuple[Records, list[Rejection]]:
        """The records of a batch's messages, and the messages that cannot be published.

        :param batch: one that was prepared, or a part of it.
        :param headers: see :class:`~airflow_bottledwater.kafka.publisher.Records`.
        """
        rows, made, data, rejections = list[int](), list[tuple[int, ...]](), bytearray(), list[Rejection]()
        spread: dict[tuple[str, bytes], int] = {}
        for row, rule, message in _messages(batch):
            try:
                topic, its = self._record(rule, message)
            except NoRecord as error:
                rejections.append(Rejection(row, str(error)))
                continue
            key, value = its.key or b"", its.value or b""
            if (topic, key) not in spread:
                hashed = kernels.murmur2(np.frombuffer(bytearray(key or b"\0"), dtype=np.uint8), 0, len(key))
                spread[topic, key] = int(hashed) % self._session.partitions[topic]
            at, parts = len(data), (-1 if its.key is None else len(key), -1 if its.value is None else len(value))
            made.append((at, *parts, len(its.headers), self._session.index[topic], spread[topic, key]))
            rows.append(row)
            data += key + value + its.headers
        if not made:
            return NO_RECORDS, rejections
        table, changes = np.zeros(len(rows), dtype=RECORD), batch.changes[rows]
        for name, numbers in zip(_PLACES, np.transpose(made), strict=True):
            table[name] = numbers
        table["value"] = table["key"] + np.maximum(table["key_length"], 0)
        table["headers"] = table["value"] + np.maximum(table["value_length"], 0)
        table["event"] = np.where(changes["xid"] > 0, wire.EVENT_MESSAGE, wire.EVENT_MESSAGE_AT_ONCE)
        table["row"], table["flags"] = rows, changes["xid"] << wire.FLAG_XID_SHIFT
        for name in ("lsn", "ordinal", "time"):
            table[name] = changes[name]
        return Records(table, np.frombuffer(data or bytearray(1), dtype=np.uint8), headers), rejections

    def _record(self, rule: str, message: pgoutput.LogicalMessage) -> tuple[str, Described]:
        """The topic and the record of a message.

        :raises NoRecord: it cannot be published.
        """
        if not outbox_message.chooses(rule):
            return rule, Described(b"", message.prefix.encode(), message.content, b"")
        try:
            found = outbox_message.described(message.content)
        except NoRecord as error:
            raise NoRecord(f"the content of the message {error}") from None
        route = self._routes[rule, found.topic]
        if not route.topic:
            raise NoRecord(route.why)
        return route.topic, found


_PLACES = "key", "key_length", "value_length", "headers_length", "topic", "partition"


def _messages(batch: Batch) -> Iterator[tuple[int, str, pgoutput.LogicalMessage]]:
    """The messages of a batch, with the numbers of their changes and the topics of the rules for their prefixes."""
    rows = np.flatnonzero(batch.changes["kind"] == pgoutput.LOGICAL)
    places = batch.changes[rows][["offset", "length", "relation"]].tolist()
    for row, (offset, length, relation) in zip(rows.tolist(), places, strict=True):
        message = pgoutput.message(bytes(batch.data[offset : offset + length]))
        yield row, batch.versions[relation].topic, message
