"""Which logical messages (``pg_logical_emit_message``) are published, and to which topics."""

from __future__ import annotations

from dataclasses import replace

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.outbox_message import chooses
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import ddl
from airflow_bottledwater.postgres.server import OWN_PREFIX

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
#: the same for messages that describe records, whose keys are their own
_DESCRIPTION = replace(_MESSAGE, key=(), outbox=True)


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
        return self._versions.setdefault(topic, Version(_DESCRIPTION if chooses(topic) else _MESSAGE, topic))
