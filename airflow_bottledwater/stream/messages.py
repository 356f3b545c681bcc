"""Logical messages (``pg_logical_emit_message``), as records: the prefix is the key, and the content the value."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from airflow_bottledwater.encoding import kernels, wire
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import ddl, pgoutput
from airflow_bottledwater.postgres.server import OWN_PREFIX
from airflow_bottledwater.publish.batch import Batch

#: what a batch and a dead letter have in place of a table: text and bytea of src/include/catalog/pg_type.dat
_MESSAGE = SourceTable(
    0,
    "logical",
    "message",
    "d",
    ("prefix",),
    (
        Column("prefix", ColumnType(25, -1, 25, -1, "b", "text")),
        Column("content", ColumnType(17, -1, 17, -1, "b", "bytea")),
    ),
)


class MessageTopics:
    """Which messages are published, and as what.

    :param mapping: the pipeline's.
    """

    def __init__(self, mapping: TableMapping) -> None:
        self._mapping = mapping
        self._versions: dict[str, Version] = {}

    def __call__(self, prefix: str) -> Version | None:
        """The version of messages with a prefix; None if they are not published."""
        if prefix == OWN_PREFIX:
            return None
        if not (topic := self._mapping.ddl_topic if prefix == ddl.PREFIX else self._mapping.message_topic(prefix)):
            return None
        return self._versions.setdefault(topic, Version(_MESSAGE, topic))


def message_records(batch: Batch, topics: Mapping[str, int], partitions: Mapping[str, int], headers: int) -> Records:
    """The records of a batch's logical messages.

    :param topics: the numbers of the topics.
    :param partitions: how many partitions each topic has.
    :param headers: see :class:`~airflow_bottledwater.kafka.publisher.Records`.
    """
    rows = np.flatnonzero(batch.changes["kind"] == pgoutput.LOGICAL)
    changes, table, data = batch.changes[rows], np.zeros(len(rows), dtype=RECORD), bytearray()
    spread: dict[tuple[str, bytes], int] = {}
    made = []
    for offset, length, relation in changes[["offset", "length", "relation"]].tolist():
        message = pgoutput.message(bytes(batch.data[offset : offset + length]))
        topic, key = batch.versions[relation].topic, message.prefix.encode()
        if (topic, key) not in spread:
            hashed = kernels.murmur2(np.frombuffer(bytearray(key or b"\0"), dtype=np.uint8), 0, len(key))
            spread[topic, key] = int(hashed) % partitions[topic]
        made.append((len(data), len(key), len(message.content), topics[topic], spread[topic, key]))
        data += key + message.content
    if made:
        table["key"], table["key_length"], table["value_length"], table["topic"], table["partition"] = np.transpose(
            made
        )
    table["value"] = table["key"] + table["key_length"]
    table["event"] = np.where(changes["xid"] > 0, wire.EVENT_MESSAGE, wire.EVENT_MESSAGE_AT_ONCE)
    table["row"], table["flags"] = rows, changes["xid"] << wire.FLAG_XID_SHIFT
    for name in ("lsn", "ordinal", "time"):
        table[name] = changes[name]
    return Records(table, np.frombuffer(data or bytearray(1), dtype=np.uint8), headers)
