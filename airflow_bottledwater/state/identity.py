"""What identifies the objects of a pipeline: a slot belongs to one database of one cluster on one timeline, a table is
known by its oid, and a topic belongs to one table at a time.

Names identify nothing here: a copy of a cluster has the same database and slot names, a renamed table keeps its rows,
and a new table may take the name of an old one. A copy of a cluster's files has its system identifier, too, but another
timeline as soon as it is promoted.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused, SlotError, StateError, TopicGone
from airflow_bottledwater.kafka.clients import altering
from airflow_bottledwater.kafka.topics import Topic, Topics
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, partitions, slot
from airflow_bottledwater.postgres.connect import Connection, Session, connect, session
from airflow_bottledwater.postgres.server import check_primary, identify
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.control_records import OwnerRecord, decode, encode, owner_key, topic_owned
from airflow_bottledwater.state.pinned import Pin, pins
from airflow_bottledwater.state.pipeline_state import PipelineState


def forgetting(pipeline: str) -> str:
    """What to do about a pipeline whose source is gone for good, as a sentence.

    :param pipeline: its whole name.
    """
    return (
        "If its source is gone for good (moved, renamed, upgraded or switched off), delete its saved state with "
        f"'bottledwater drop-slot --forget-cluster {shlex.quote(pipeline)}'."
    )


def check_cluster(known: PipelineState, cluster: Cluster, slot_name: str) -> None:
    """Check that a state topic belongs to this cluster, before anything is claimed, stopped or dropped: the topic's
    name contains only database and slot, which a copy of the cluster has, too.

    :param known: the records of the slot's topic.
    :raises StateError: it is another cluster's; nothing was changed.
    """
    other = known.system_identifier
    if other and other != cluster.system_identifier:
        topic = store.state_topic_name(cluster.database, slot_name)
        theirs = replace(cluster, system_identifier=other).pipeline(slot_name)
        raise StateError(
            f"State topic {topic!r} belongs to the cluster with system identifier {other}; the database of this "
            f"connection is in cluster {cluster.system_identifier} (a copy, a restored dump, or another server). "
            "Nothing was changed.",
            f"Use another slot name for this database, and leave the other pipeline alone. {forgetting(theirs)}",
        )


def check_timeline(record: SlotRecord, cluster: Cluster) -> None:
    """Check that the server is still the one on which the slot was made, before anything is claimed: a server that was
    promoted, or restored up to a moment, is on another timeline.

    :param record: the slot, as the state describes it.
    :raises SlotError: it is another cluster, or on another timeline; nothing was changed.
    """
    if record.system_identifier != cluster.system_identifier:
        raise SlotError(
            f"This is another cluster (system identifier {cluster.system_identifier}) than the one of slot "
            f"{record.name!r} ({record.system_identifier}).",
            "Point the connection at the cluster of the slot; for a copy of it, use another slot name. "
            f"{forgetting(record.pipeline)}",
        )
    if record.timeline != cluster.timeline:
        raise SlotError(
            f"The cluster is on timeline {cluster.timeline}, and slot {record.name!r} was made on {record.timeline}: "
            "this server is a copy of the pipeline's server (a restored backup, a promoted standby), or has taken its "
            "place. In the second case, changes that were streamed may be missing in it.",
            "For a copy, use another slot name, and leave the pipeline alone. If this server has taken the other one's "
            "place: 'bottledwater drop-slot --when always' (refused while the pipeline's job runs), then start again "
            "with a snapshot.",
        )


def check_source(connection: Connection, dsn: str, record: SlotRecord | None) -> None:
    """Check that a new session of a running job leads to the pipeline's server, before what it shows is used: the
    sessions that are open stay with that one, and the address may lead to another one by now.

    :param record: see :func:`check_timeline`; without it, only a standby is noticed.
    :raises Outage: it leads to a standby.
    :raises SlotError: see :func:`check_timeline`.
    """
    check_primary(connection, dsn)
    if record is not None:
        check_timeline(record, identify(connection))


def connect_source(dsn: str, record: SlotRecord | None, *, application: str) -> Session:
    """Open a session in which a running job reads rows; see :func:`check_source` and :func:`connect`."""
    connection = connect(dsn, application=application)
    try:
        check_source(connection, dsn, record)
    except BaseException:
        connection.close()
        raise
    return connection


def check_settings(pipeline: Settings, known: PipelineState) -> None:
    """Check that what is published goes where the pipeline's records are, and is made as they are. Otherwise the same
    key would be in a topic twice, once in each format; and new topics would get what belongs into those that exist.

    :raises StateError: a setting is another one than the one that the pipeline was made with, or its state was copied;
        nothing was changed.
    :raises Outage: Kafka or the source does not answer.
    """
    if known.intent is None:
        return
    if known.slot is None:
        if known.intent.publication != pipeline.publication_name:
            raise StateError(
                f"The creation of slot {pipeline.slot!r} was begun with publication = {known.intent.publication}, and "
                f"the settings say {pipeline.publication_name}. Nothing was changed.",
                "Give the publication of before. For another one, first drop what was begun, so that no publication is "
                "left behind: bottledwater drop-slot --when always.",
            )
        return
    values = {
        "format": pipeline.format,
        "envelope": pipeline.envelope,
        "envelope_schema": pipeline.envelope_schema,
        "topic_prefix": pipeline.topic_prefix,
        "publication": pipeline.publication_name,
        # those that others have made, it does not take over
        **({"create_publication": True} if pipeline.create_publication else {}),
    }
    for name, asked in values.items():
        if asked != (made := getattr(known.intent, name)):
            raise StateError(
                f"Slot {pipeline.slot!r} was made with {name} = {_shown(made)}, and the settings say {_shown(asked)}. "
                "Nothing was changed.",
                "Give the settings with which the pipeline was made (on the command line, best in a file: --config). "
                "For other ones, make another pipeline, with a slot and a topic_prefix of its own.",
            )
    _check_state_topic(pipeline, known.slot, known.intent.state_topic_id)
    _check_topic_options(pipeline, known)


def _shown(value: str | bool) -> str:
    """A setting as files and options have it."""
    return str(value).lower() if isinstance(value, bool) else value or "(none)"


def _check_state_topic(pipeline: Settings, record: SlotRecord, made: str) -> None:
    """Check that the saved state is no copy. One in another Kafka, made by a program that mirrors topics, may have the
    position of a transaction of which records are missing there, or that was aborted.

    :param record: the slot, as the state describes it.
    :param made: Kafka's id of the topic when the pipeline was made; empty if it is not known.
    :raises StateError: it is one; nothing was changed.
    """
    topic = store.state_topic_name(record.database, record.name)
    if made and store.topic_id(pipeline.kafka, topic) != made:
        raise StateError(
            f"State topic {topic!r} of Kafka at {pipeline.kafka.get('bootstrap.servers', '?')} is not the one with "
            f"which slot {record.name!r} was made, but a copy of it: this is another Kafka, to which topics were "
            "mirrored, or the topic was deleted and restored. What the pipeline has published may be missing here. "
            "Nothing was changed.",
            "Point the connection at the Kafka with which the pipeline was made. To go on with this one: 'bottledwater "
            "drop-slot --when always', then start again with a snapshot.",
        )


def _check_topic_options(pipeline: Settings, known: PipelineState) -> None:
    """Check that the options of single tables give each table, by the name that it has today, the topic that they gave
    that name at the last start, or that it has, and its records the same partitions. A table that was dropped has
    nothing more to be published.

    :raises StateError: they give it others; nothing was changed.
    :raises Outage: the source does not answer.
    """
    if known.settings is None:
        return
    options = known.settings.get("table_options", {})
    if options == pipeline.chosen().get("table_options", {}):
        return
    now, before = TableMapping.of(pipeline), TableMapping.of(pipeline.with_(table_options=options))
    with session(pipeline.postgres, "Reading the names of the tables") as connection:
        today = catalog.names(connection, list(known.tables))
    for oid, names in today.items():
        pinned = known.tables[oid]
        if pinned.table.outbox:
            continue  # compared elsewhere
        table = replace(pinned.table, schema=names[0], name=names[1])
        was, asked = before.topic(table), now.topic(table)
        if asked not in (was, pinned.topic):
            raise StateError(
                f"The topic of {table.qualified} is {pinned.topic!r}, and table_options say {asked!r} now. "
                "Nothing was changed.",
                "Set topic back. For another topic, make another pipeline for the table, with a slot of its own; or "
                "drop the slot and start again with a snapshot.",
            )
        chosen_by, chosen = before.options(*names).partition_by, now.options(*names).partition_by
        # with new keys that are accepted, all rows are published again, and each earlier key gets a tombstone
        anew = bool(chosen) and pinned.table.oid in known.accepted
        if chosen not in (chosen_by, pinned.table.partition_by) and not anew:
            raise StateError(*other_partitions(table, chosen))


def other_partitions(table: SourceTable, chosen: Sequence[str]) -> tuple[str, str]:
    """What is said of a table whose records would be in other partitions than its topic has them in, and what to do.

    :param table: as it is recorded.
    :param chosen: the columns that would choose the partitions now.
    """
    return (
        f"The partitions of the records of {table.qualified} are chosen by {choosers(table.partition_by)}, and "
        f"table_options say {choosers(chosen)} now: keys would be in other partitions. Nothing was changed.",
        "Set partition_by back. For other columns, make another pipeline for the table, with a slot and a topic_prefix "
        "of its own; or drop the slot and start again with a snapshot, under another topic_prefix.",
    )


def choosers(columns: Sequence[str]) -> str:
    """Columns that choose partitions, in words."""
    return f"({', '.join(columns)})" if columns else "the whole key"


def topic_of(table: SourceTable, known: PipelineState, mapping: TableMapping) -> str:
    """A table's topic: a renamed table keeps the one that it has."""
    pinned = known.tables.get(table.oid)
    return pinned.topic if pinned else mapping.topic(table)


def via_root(pipeline: Settings, known: PipelineState) -> bool:
    """Whether a partitioned table is published as one, by the state or, for a new pipeline, by the settings.

    :raises StateError: the settings demand another way than the one that the pipeline was made with.
    """
    asked, made = pipeline.partitioned_tables, known.intent.partitioned_tables if known.intent else ""
    if made and asked not in ("auto", made):
        raise StateError(
            f"Slot {pipeline.slot!r} was made with partitioned_tables = {made}, and the settings say {asked}: its "
            "publications and topics are made for the former.",
            f"Set partitioned_tables to {made} or auto to go on. For {asked}, drop the slot (bottledwater drop-slot "
            "--when always) and start again, with a snapshot.",
        )
    return (made or asked) in ("auto", "root")


def check_slot(
    found: slot.SlotState | None,
    record: SlotRecord,
    cluster: Cluster,
    position: Position,
    end_of_wal: int,
    *,
    shown: int = 0,
) -> None:
    """Check that the slot is the one that the state describes, that it is not ahead of P, and that what was published
    is within the server's WAL.

    :param found: the slot as PostgreSQL shows it; None if there is none.
    :param end_of_wal: the server's WAL insert position.
    :param shown: the highest L of a snapshot of which rows are published.
    :raises SlotError: the slot is gone, invalidated, of another cluster, timeline or database, or was moved forward; or
        the server was set back to a moment before P, or before a snapshot.
    """
    way_out = "Make a new slot and a snapshot: 'bottledwater drop-slot --when always', then start again."
    check_timeline(record, cluster)
    if found is None:
        raise SlotError(f"Slot {record.name!r} does not exist any more: changes since {position} are lost.", way_out)
    slot.check(found, record.database, recorded=True)
    if (published := max(position.lsn, shown)) > end_of_wal:
        raise SlotError(
            f"What is published from slot {record.name!r} is of {format_lsn(published)}, beyond the end of the "
            f"server's WAL ({format_lsn(end_of_wal)}): the server was set back to an earlier moment (a restored backup "
            "or file system snapshot), so the topics have changes that it no longer has, and what it commits now would "
            "be taken for known.",
            way_out,
        )
    if found.confirmed > position.lsn:
        raise SlotError(
            f"Slot {record.name!r} is at {format_lsn(found.confirmed)}, ahead of what was published ({position}): "
            "somebody moved it, and the changes between are missing.",
            way_out,
        )


def resolve(
    connection: Connection,
    pipeline: Settings,
    known: PipelineState,
    tables: Sequence[str],
    schemas: Sequence[str] = (),
    *,
    strict: bool = True,
) -> list[int]:
    """The oids of the tables that patterns name, as this pipeline publishes them; see :func:`catalog.resolve`.

    :raises PreflightError: a pattern matches nothing, or is the name of something that is not a permanent table.
    :raises StateError: see :func:`via_root`.
    """
    root = via_root(pipeline, known)
    return catalog.resolve(connection, tables, schemas, via_root=root, strict=strict, followed=known.tables)


def belonging(connection: Connection, known: PipelineState) -> set[int]:
    """The oids of what is below the pipeline's partitioned tables and so belongs to them, also where patterns name it:
    such a table may bear a name that they do not cover any more."""
    return set(partitions.names(connection, [oid for oid, each in known.tables.items() if each.table.partitioned]))


def owned(known: PipelineState, tables: Iterable[SourceTable], mapping: TableMapping) -> dict[int, SourceTable]:
    """The new ones of some tables whose topics hold the rows of other tables: by oid, those. The records of an outbox
    are events, and not the rows of a table: where it is made again, the topics go on with those of the next one.

    :param tables: as they are in the catalog today.
    """
    owners = {pinned.topic: pinned.table for pinned in known.tables.values()}
    found = {table: owners.get(mapping.topic(table)) for table in tables if table.oid not in known.tables}
    return {table.oid: owner for table, owner in found.items() if owner and not (owner.outbox and table.outbox)}


def topic_problems(known: PipelineState, tables: Sequence[SourceTable], mapping: TableMapping) -> list[str]:
    """A message for each table whose topic already holds the rows of another table that had this name before.

    :param tables: the pipeline's tables as they are in the catalog today.
    """
    owners = owned(known, tables, mapping)
    problems = []
    for table in tables:
        if (owner := owners.get(table.oid)) is not None:
            topic = mapping.topic(table)
            problems.append(
                f"Topic {topic!r} holds the rows of another table (oid {owner.oid}), which was called "
                f"{owner.qualified} when the slot was made; the table that has this name today (oid {table.oid}) was "
                "created or renamed since. Two tables in one topic would overwrite and delete each other's rows. "
                "Rename the tables back; or give today's table a topic_prefix in a pipeline of its own; or set "
                "new_tables to add: then the stream gives the topic to the table that bears its name, and removes "
                "from it what that table does not have."
            )
    return problems


#: what is to be done when the events of truncations are lost, as the end of a sentence
SWEEP_TRUNCATED = (
    "bring the topics of tables that were truncated to what these hold, with a live snapshot and --sweep: the rows "
    "that the events deleted have no tombstones."
)


def check_topic(kafka: Mapping[str, str], name: str, found: Topic | None, pin: Pin | None) -> None:
    """Check that a topic is still the one that was pinned: another partition count would move keys, and another id
    means that it was deleted and created anew.

    :param found: the topic as the broker describes it; None if it does not exist.
    :param pin: None for a topic that is not a table's; then only its existence is checked.
    :raises TopicGone: it is a table's, and is missing or another one.
    :raises StateError: it is missing, or has settings under which its records would be refused.
    """
    if found is None and pin is None:
        raise StateError(
            f"Topic {name!r} does not exist any more.",
            "Make it again with one partition: the topic of dead letters with cleanup.policy=compact, any other one "
            "with cleanup.policy=delete and retention.ms=-1; then start again. What it held is lost: if that were "
            f"events, {SWEEP_TRUNCATED}",
        )
    if pin is None:
        return
    if found is None:
        raise TopicGone(
            f"Topic {name!r} does not exist any more.",
            "Deleting topics of a running pipeline loses data. If the table is to go, too, drop it, and start again; "
            "otherwise drop the slot and start again with a snapshot.",
        )
    if found.id != pin.id:
        raise TopicGone(
            f"Topic {name!r} was deleted and made again: its rows are gone.",
            "If the table is to go, too, drop it, and start again; otherwise drop the slot and start again with a "
            "snapshot.",
        )
    if found.partitions != pin.partitions:
        raise StateError(
            f"Topic {name!r} has {found.partitions} partitions, it had {pin.partitions}: keys would move between them.",
            "Drop the slot and start again with a snapshot into a new topic (topic_prefix).",
        )
    if not pin.keyed and "compact" in found.cleanup:
        raise StateError(
            f"Topic {name!r} is compacted now, but its table has no key: Kafka refuses records without one.",
            f"Set it back ({altering(kafka, name, 'cleanup.policy=delete')}), then start again.",
        )


def check_topics(connection: Connection, pipeline: Settings, known: PipelineState) -> set[int]:
    """Check that the topics are still those that were pinned. That of a table that was dropped may be deleted: whoever
    did both has given up what is not published of it. Returns the oids of such tables.

    :param connection: to the pipeline's server, in no transaction.
    :raises StateError: one is not, see :func:`~airflow_bottledwater.state.identity.check_topic`.
    """
    wanted, deleted = pins(known.tables.values()), dict[str, TopicGone]()
    present = Topics(pipeline.kafka).describe(list(wanted), confirm=True)
    for name, pin in wanted.items():
        try:
            check_topic(pipeline.kafka, name, present.get(name), pin)
        except TopicGone as error:
            deleted[name] = error
    of = {oid: deleted[pinned.topic] for oid, pinned in known.tables.items() if pinned.topic in deleted}
    for oid in catalog.names(connection, list(of)) if of else ():
        raise of[oid]
    return set(of)


def refuse_shared(
    pipeline: Settings,
    known: PipelineState,
    topics: Sequence[str],
    what: str,
    whose: str = "keys cannot be told from those that the table lost",
) -> None:
    """Check that nobody else publishes to topics: keys that a table does not have may then be another pipeline's.

    :param known: the state of this one.
    :param what: cannot be done, as the beginning of a sentence.
    :param whose: why it cannot, as the end of one.
    :raises Refused: one is shared.
    :raises Outage: Kafka does not answer.
    """
    if with_whom := shared(pipeline, known, topics):
        topic, others = next(iter(with_whom.items()))
        raise Refused(
            f"{what}: topic {topic!r} is shared with {others}, whose {whose}.",
            "Leave that table out. To have its rows told apart, give the pipeline topics of its own: another "
            "topic_prefix, with a new slot and a snapshot.",
        )


def shared(pipeline: Settings, known: PipelineState, topics: Sequence[str]) -> dict[str, str]:
    """The topics among these that other pipelines publish to, too, and who that is. If this one is not recorded, the
    others may not be, either: the shared state topic has lost its records. One that it has given up, or that it had
    when it was dropped, is its own again if those who have published to it since have not shared it.

    :param known: the state of this one.
    :raises Outage: Kafka does not answer.
    """
    if pipeline.share_topics or not topics:
        return dict.fromkeys(topics, "other pipelines (share_topics)")
    records = control_topic.read(pipeline.kafka)
    name = known.slot.pipeline if known.slot is not None else ""
    forgotten = (
        f"others, perhaps (topic {store.CONTROL_TOPIC!r} does not know any more who writes to it; each pipeline is "
        "recorded again when its job starts)"
    )
    owners, found = Owners(records), {}
    for topic in topics:
        names, last = sorted(set(owners.names(topic))), owners.last(topic)
        if {*names} - {name}:
            found[topic] = f"other pipelines (it is written to by {', '.join(names)})"
        elif not names and (owner_key(topic, name) not in records or last is None or last.shared):
            found[topic] = forgotten
    return found


def own(pipeline: Settings, name: str, topics: Iterable[str], *, shared: bool) -> dict[str, dict[str, Any] | None]:
    """Record this pipeline as one that publishes to topics, unless it is recorded. Returns what was there before,
    by the keys that were written: to be put back if it may not publish to them.

    :param name: the pipeline's.
    :param shared: whether others may write to the topics as well.
    :raises Outage: Kafka does not answer.
    """
    records = control_topic.read(pipeline.kafka)
    owners = Owners(records)

    def is_missing(topic: str) -> bool:
        found = decode(OwnerRecord, records.get(owner_key(topic, name)))
        if found is None or found.dropped or found.shared == shared:
            return found is None or found.dropped
        # written again, it would have a later offset than a record of a pipeline that came after it
        last = owners.last(topic)
        return last is not None and last.pipeline == name

    missing = [owner_key(topic, name) for topic in topics if is_missing(topic)]
    control_topic.write(pipeline.kafka, dict.fromkeys(missing, encode(OwnerRecord(name, time.time(), shared=shared))))
    return {key: records.get(key) for key in missing}


def own_again(pipeline: Settings, known: PipelineState) -> None:
    """Record a pipeline that is about to publish as one of those that publish to its topics, if the shared state topic
    has lost that: otherwise others would take its keys for some that their tables lost. What a job before it has not
    given up any more is given up.

    :param known: its state.
    :raises Outage: Kafka does not answer.
    """
    give_up(pipeline, known)
    if known.slot is not None:
        topics = {pinned.topic for pinned in known.tables.values() if not pinned.table.outbox}
        named = TableMapping.of(pipeline).named_topics
        own(pipeline, known.slot.pipeline, [*sorted(topics), *named], shared=pipeline.share_topics)


def give_up(pipeline: Settings, known: PipelineState) -> None:
    """Let other pipelines take the topics that had rows of tables, and that no table of this one has any more. What
    they hold stays known to be a pipeline's. The state has them: whoever dies before this leaves it to the next job.

    :param known: its state.
    :raises Outage: Kafka does not answer.
    """
    left = known.former.difference(each.topic for each in known.tables.values())
    left.difference_update(TableMapping.of(pipeline).named_topics)
    if known.slot is None or not left:
        return
    records, name = control_topic.read(pipeline.kafka), known.slot.pipeline
    found = {key: decode(OwnerRecord, records.get(key)) for key in (owner_key(topic, name) for topic in sorted(left))}
    given = {
        key: replace(each, at=time.time(), dropped=True) for key, each in found.items() if each and not each.dropped
    }
    control_topic.write(pipeline.kafka, {key: encode(each) for key, each in given.items()})


class Owners:
    """The pipelines that publish to topics.

    :param records: those of the shared state topic. They come in the order of their offsets; the times in them are by
        the clocks of different hosts.
    """

    def __init__(self, records: store.RawRecords) -> None:
        #: by topic, as they are decoded if they are asked for: there is one for each topic of each pipeline
        self._raw: dict[str, list[dict[str, Any]]] = {}
        for key, raw in records.items():
            if topic := topic_owned(key):
                self._raw.setdefault(topic, []).append(raw)

    def names(self, topic: str) -> list[str]:
        """Their names; the first one owns the topic: the one whose record has the lowest offset."""
        return [each.pipeline for each in self._of(topic) if not each.dropped]

    def last(self, topic: str) -> OwnerRecord | None:
        """The last record of a pipeline that publishes to a topic, or has published to it until it was dropped; None if
        there was none. Unless it was shared, this pipeline was sure that all records of the topic are those of
        pipelines."""
        return next(reversed(self._of(topic)), None)

    def _of(self, topic: str) -> list[OwnerRecord]:
        decoded = (decode(OwnerRecord, raw) for raw in self._raw.get(topic, ()))
        return [each for each in decoded if each is not None]
