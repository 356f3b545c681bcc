"""Takes over a slot that another program has read, such as a connector of Debezium, from where that has stopped, and
without a snapshot: at the user's word that everything before is in the topics, or need not be."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused, SlotError, SlotInUse, StateError
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import coverage, publication, slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.create import assume

log = logging.getLogger(__name__)

#: records of a partition, before its end, among which the last one is looked for: some of them may be no rows
_LAST = 5


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
    findings = preflight.run(pipeline.with_(adopt_slot=True, create_publication=False), adopts_topics=True)
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
        record = assume(pipeline, connection, findings, present.confirmed, Position(present.confirmed, 0))
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
    """Compare the last record of each topic that exists with what the pipeline writes; where there is a registry,
    it has compared the schemas.

    :raises Refused: a topic has other records.
    """
    mapping, topics = TableMapping.of(pipeline), Topics(pipeline.kafka)
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
    if pipeline.record_format.uses_registry:
        return
    with RangeReader(pipeline.kafka) as reader:
        for name in present:
            last = {message.partition(): message for message in reader.last(name, ends[name], _LAST)}
            for message in last.values():
                if why := unlike(by_topic[name], mapping.envelope, message.key(), message.value()):
                    raise Refused(
                        f"Topic {name!r} has records that the pipeline would not write: {why}.",
                        "Give the pipeline topics of its own (another topic_prefix): consumers then read the old "
                        "topics to their end, and the new ones from their beginning.",
                    )


def unlike(table: SourceTable, envelope: Envelope | None, key: bytes | None, value: bytes | None) -> str:
    """What tells a record of a topic from those of a table in JSON; empty if nothing does.

    :param envelope: what is around each row.
    """
    fields = {column.field for column in table.columns}
    of_key = {column.field for column in table.columns if column.name in table.key}
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
    if (read[0].keys() if isinstance(read[0], dict) else set()) != of_key:
        return f"their keys are not the columns {', '.join(sorted(of_key)) or '(none)'}"
    if read[1] is None:
        return ""
    enveloped = isinstance(read[1], dict) and {"before", "after", "op"} <= read[1].keys()
    if enveloped != (envelope is not None):
        return f"they have {'' if enveloped else 'not '}Debezium's envelope (before, after)"
    rows = [read[1]["before"], read[1]["after"]] if enveloped else [read[1]]
    if not all(row is None or (isinstance(row, dict) and row.keys() <= fields) for row in rows):
        return "their values have other fields than the table's columns"
    return ""
