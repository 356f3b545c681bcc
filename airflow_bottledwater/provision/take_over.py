"""Takes over a slot that another program has read, such as a connector of Debezium, from where that has stopped, and
without a snapshot: at the user's word that everything before is in the topics, or need not be."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from airflow_bottledwater.encoding import types, wire
from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused, SlotError, SlotInUse, StateError
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.relation import HASHED, ColumnType, SourceTable
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import coverage, publication, slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.create import assume

log = logging.getLogger(__name__)

#: records of a partition, before its end, among which the last one is looked for: some of them may be no rows
_LAST = 5
#: what JSON has for types of which all programs write the same bytes
_ALIKE: dict[int, type] = {
    wire.OP_BOOL: bool,
    **dict.fromkeys((wire.OP_INT2, wire.OP_INT4, wire.OP_INT8), int),
    **dict.fromkeys((wire.OP_TEXT, wire.OP_UUID, wire.OP_ENUM), str),
}


def take_over(pipeline: Settings) -> SlotRecord:
    """Write the state of a pipeline whose snapshot is complete, and whose stream begins at the slot's confirmed
    position.

    :raises PreflightError: the source, the broker or the registry is not ready; nothing was changed.
    :raises StateError: the slot is this pipeline's already.
    :raises SlotError: there is no such slot, it is not one of pgoutput, of another database or invalidated, or the
        publications did not exist at its position.
    :raises SlotInUse: somebody reads from it.
    :raises Refused: the topics have other records than the pipeline would write.
    """
    # the publications are the other program's: the state must not say that this pipeline has made them
    pipeline = pipeline.with_(create_publication=False)
    findings = preflight.run(pipeline.with_(adopt_slot=True), adopts_topics=True)
    if findings.state.slot is not None:
        raise StateError(f"Slot {pipeline.slot!r} is this pipeline's already.", "Start the stream.")
    with session(pipeline.postgres, f"Taking slot {pipeline.slot!r} over") as connection:
        present = slot.existing(
            connection,
            pipeline.slot,
            "Check its name: it is the connector's slot.name. Without one, start with a snapshot.",
        )
        slot.check(present, findings.cluster.database)
        if present.active_pid is not None:
            raise SlotInUse(
                f"Slot {pipeline.slot!r} is in use by process {present.active_pid}.", "Stop the connector first."
            )
        _check_publications(connection, pipeline, findings.tables)
        _check_topics(pipeline, findings.tables)
        position = Position(present.confirmed, 0)
        record = assume(pipeline, connection, findings, present.confirmed, position, anew=True)
    log.warning(
        "Slot %r is taken over at %s. Whether everything before it is in the topics is not known; what the other "
        "program has published behind it is published again. bottledwater verify says which rows are missing.",
        pipeline.slot,
        format_lsn(present.confirmed),
    )
    return record


def _check_publications(connection: Connection, pipeline: Settings, tables: Sequence[SourceTable]) -> None:
    """
    :raises SlotError: the slot may have changes from before a publication was made, or had a table.
    """
    names = publication.names(pipeline.publication_name)
    late = coverage.late(connection, names, {table.oid: table.qualified for table in tables}, pipeline.slot)
    if late:
        raise SlotError(
            f"Slot {pipeline.slot!r} may have changes from before {', and from before '.join(late)}: PostgreSQL does "
            "not send them.",
            "Start the connector again, and let it read on until the slot's catalog_xmin (pg_replication_slots) is "
            "newer, which takes new changes or a heartbeat, and the end of transactions that are as old; stop it, "
            "and try again.",
        )


def _check_topics(pipeline: Settings, tables: list[SourceTable]) -> None:
    """Compare the last records of each topic that exists with what the pipeline writes. Their keys must be the same
    bytes: others are other keys, in other partitions, which no later record replaces or deletes. What values have in a
    registry, preflight has compared.

    :raises Refused: a topic has other records.
    """
    mapping, topics, registry = TableMapping.of(pipeline), Topics(pipeline.kafka), Registry.of(pipeline)
    by_topic = {name: table for name, table in mapping.by_topic(tables).items() if not table.outbox}
    present = topics.describe(list(by_topic))
    if not present:
        return
    ends = topics.all_ends({name: topic.partitions for name, topic in present.items()})
    for name in present:
        table = by_topic[name]
        # preflight looks at some records only, and at none where topics are shared
        if table.partition_by and any(ends[name]):
            raise Refused(
                f"Topic {name!r} has records of another program, and the partitions of {table.qualified} are chosen by "
                f"{', '.join(table.partition_by)} (partition_by of table_options), otherwise than that program does: "
                "one key would be in two partitions.",
                "Take partition_by out, or give the pipeline topics of its own (another topic_prefix).",
            )
    with RangeReader(pipeline.kafka) as reader:
        for name in present:
            table = by_topic[name]
            last = {message.partition(): message for message in reader.last(name, ends[name], _LAST)}.values()
            if last and registry is not None:
                subject, keys = f"{name}-key", [message.key() for message in last]
                why = _unlike_framed(registry, subject, dict(mapping.subjects(name, table)).get(subject), keys)
            else:
                around = mapping.around(name, table, "")
                head = around.key_head if around else b""
                found = (unlike(table, mapping.envelope, head, each.key(), each.value()) for each in last)
                why = next(filter(None, found), "")
            if why:
                raise Refused(
                    f"Topic {name!r} has records that the pipeline would not write: {why}.",
                    "Give the pipeline topics of its own (another topic_prefix): consumers then read the old topics to "
                    "their end, and the new ones from their beginning.",
                )


def _unlike_framed(registry: Registry, subject: str, schema: str | None, keys: Sequence[bytes | None]) -> str:
    """What tells the keys of records from those of a table whose schema is in a registry; empty if nothing does.

    :param schema: of the table's keys; None if it has none.
    """
    if schema is None:
        return "they have keys" if any(key is not None for key in keys) else ""
    number = registry.lookup(subject, schema)
    frame = b"" if number is None else bytes([wire.MAGIC]) + number.to_bytes(4, "big")
    if frame and all(key is not None and key.startswith(frame) for key in keys):
        return ""
    return "the schema of their keys is another one (also if only names or defaults in it are)"


def unlike(table: SourceTable, envelope: Envelope | None, head: bytes, key: bytes | None, value: bytes | None) -> str:
    """What tells a record of a topic from those of a table in JSON; empty if nothing does.

    :param envelope: what is around each row.
    :param head: what is in front of each key.
    """
    fields = {column.field for column in table.columns}
    try:
        read: list[Any] = [None if each is None else json.loads(each) for each in (key, value)]
    except ValueError:
        return "they are no JSON"
    wrapped = [isinstance(each, dict) and each.keys() == {"schema", "payload"} for each in read if each is not None]
    with_schema = envelope is not None and envelope.with_schema
    if with_schema != any(wrapped) or (with_schema and not all(wrapped)):
        return f"they have {'no' if with_schema else 'the'} schema with each of them (schemas.enable, envelope_schema)"
    if with_schema:
        read = [each and each["payload"] for each in read]
    if why := _unlike_key(table, head, key, read[0]):
        return why
    if read[1] is None:
        return ""
    enveloped = isinstance(read[1], dict) and {"before", "after", "op"} <= read[1].keys()
    if enveloped != (envelope is not None):
        return f"they have {'' if enveloped else 'not '}Debezium's envelope (before, after)"
    rows = [read[1]["before"], read[1]["after"]] if enveloped else [read[1]]
    if not all(row is None or (isinstance(row, dict) and row.keys() <= fields) for row in rows):
        return "their values have other fields than the table's columns"
    return ""


def _unlike_key(table: SourceTable, head: bytes, key: bytes | None, read: Any) -> str:
    """What tells the bytes of a key from those of a table's keys in JSON; empty if nothing does.

    :param read: its members, without what is in front of them.
    """
    by_name = {column.name: column for column in table.columns}
    columns = [by_name[name] for name in table.key]
    names = [column.field for column in columns]
    if (list(read) if isinstance(read, dict) else []) != names:
        return f"their keys are not the columns {', '.join(names) or '(none)'}, in this order"
    if key is None:
        return ""
    if not key.startswith(head):
        return "the schema with each of their keys is another one (a column's default is part of it)"
    for column in columns:
        if (form := _form(column.type)) is None:
            return f"of their keys' column {column.field}, it is not known in which form it is written"
        if type(read[column.field]) is not form:
            return f"their keys' column {column.field} has another form"
    members = [types.json_key(name) + json.dumps(read[name], ensure_ascii=False).encode() for name in names]
    if key != head + b"{" + b",".join(members) + b"}" + b"}" * bool(head):
        return "their keys are other bytes of the same JSON (spaces, or characters written by their numbers)"
    return ""


def _form(column: ColumnType) -> type | None:
    """What JSON has for a key's column, if all programs write the same bytes for one value."""
    mapping = types.mapping(column)
    return None if mapping.convert is not None or column.form == HASHED else _ALIKE.get(mapping.opcode)
