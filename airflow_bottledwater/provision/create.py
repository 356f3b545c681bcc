"""Creates what a pipeline needs in PostgreSQL, Kafka and the registry (publications, slot, topics, schemas), and
records it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psycopg

from airflow_bottledwater.backoff import Backoff, stoppable
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage, Refused, SlotError, StateError
from airflow_bottledwater.kafka.clients import GRANT
from airflow_bottledwater.kafka.producer import Message
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, coverage, partitions, publication, slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.provision import kafka_checks, preflight
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.state import control_topic, options, records, saved, starts, store
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.control_records import topic_owned
from airflow_bottledwater.state.identity import own, topic_of, topic_problems
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState

log = logging.getLogger(__name__)

#: attempts to create a slot, if DDL runs during each of them
_ATTEMPTS = 5


def create(
    pipeline: Settings,
    *,
    stopped: threading.Event | None = None,
) -> SlotRecord:
    """Create publications and slot, topics and schemas, and record them. Idempotent: what is recorded is checked and
    kept.

    The intent is recorded first, so that after a crash, a slot that it names is used, although it is not recorded
    itself yet.

    :param stopped: ends the creation soon after it is set; a slot that is not finished then is dropped, and the next
        call continues.
    :returns: the record of the slot.
    :raises PreflightError: the source, the broker or the registry is not ready; nothing was changed.
    :raises Refused: tables cannot be added while the stream is inside a transaction; nothing was changed.
    :raises Outage: the slot could not be created in time, or a server is not available.
    :raises SlotError: DDL ran during each attempt, or the slot cannot be used.
    :raises TakenOver: another job has claimed the slot.
    :raises StopRequested: it was asked to stop.
    """
    with stoppable(stopped):
        return _create_or_find(pipeline, stopped)


def _create_or_find(pipeline: Settings, stopped: threading.Event | None) -> SlotRecord:
    findings = preflight.run(pipeline)
    cluster = findings.cluster
    known = findings.state
    wanted = {t.oid: t for t in findings.tables}
    if known.slot is not None and set(wanted) <= set(known.tables):
        log.info(
            "Slot %r exists already; its consistent point is %s.",
            pipeline.slot,
            format_lsn(known.slot.consistent_point),
        )
        return known.slot
    _check_between_transactions(pipeline, known, findings.tables)
    # first: whether it may, only the registry can say, and a schema that nobody uses harms nobody as a slot does
    mapping = TableMapping.of(pipeline)
    _schema_ids(pipeline, {topic_of(t, known, mapping): t for oid, t in wanted.items() if oid not in known.tables})
    backoff = Backoff(pipeline.outage_timeout, stopped)
    claim = Claim(pipeline, cluster, "create", backoff)
    try:
        return _create(pipeline, claim, findings.tables, findings.via_root)
    finally:
        claim.close()


def _check_between_transactions(pipeline: Settings, known: PipelineState, tables: Sequence[SourceTable]) -> None:
    """:raises Refused: tables are added, and the stream is inside a transaction."""
    more = [table.qualified for table in tables if table.oid not in known.tables]
    if more and known.position is not None and known.position.ordinal:
        raise Refused(
            f"The stream of slot {pipeline.slot!r} stopped inside a large transaction, at {known.position}: "
            f"{', '.join(more)} cannot be added there, since the rest of the transaction must be published with the "
            "same tables.",
            "Run the stream first, with the tables as they are, until it has passed that transaction (a bounded run "
            "is enough); then add the table.",
        )


def assume_complete(pipeline: Settings, position: Position) -> SlotRecord:
    """Write new state for a slot whose saved state was lost, by the user's word that everything up to ``position`` is
    in the topics.

    :raises PreflightError: the source, the broker or the registry is not ready; nothing was changed.
    :raises StateError: the saved state is not lost.
    :raises SlotError: the slot does not exist, or is confirmed beyond ``position``.
    """
    findings = preflight.run(
        # slot, publications and topics exist, and only the user can know that they are this pipeline's
        pipeline.with_(adopt_slot=True, create_publication=False, share_topics=True)
    )
    if findings.state.slot is not None:
        raise StateError(
            f"The state topic knows slot {pipeline.slot!r}, at {findings.state.position or 'its start'}.",
            "Start without --assume-snapshot-complete.",
        )
    with session(pipeline.postgres, f"Taking slot {pipeline.slot!r} up") as connection:
        present = slot.existing(
            connection,
            pipeline.slot,
            "Start without --assume-snapshot-complete: a new slot is created, and a snapshot is taken.",
        )
        if present.confirmed > position.lsn:
            raise SlotError(
                f"Slot {pipeline.slot!r} is confirmed up to {format_lsn(present.confirmed)}, and PostgreSQL sends "
                f"nothing before that again; position {position} is older, and the changes between would be missing.",
                "Give the position of the last record in the topics, or drop the slot and start with a snapshot.",
            )
        record = assume(pipeline, connection, findings, present.confirmed, position, anew=False)
    log.warning(
        "Slot %r continues from the given position %s; whether everything before it was published is not checked.",
        pipeline.slot,
        position,
    )
    return record


def assume(
    pipeline: Settings, connection: Connection, found: Findings, confirmed: int, position: Position, *, anew: bool
) -> SlotRecord:
    """Write the state records of a pipeline whose snapshot is complete, and whose stream is at a position.

    :param anew: whether it begins in its topics now. Otherwise some of their records are its own, and from which on is
        not known: to begin at their beginning could take what an earlier server has published for newer.
    """
    cluster, now = found.cluster, time.time()
    with contextlib.closing(Claim(pipeline, cluster, "create", Backoff(pipeline.outage_timeout))) as claim:
        oldest_xid = slot.fresh_xid(connection)
        record = SlotRecord(
            pipeline.slot, cluster.system_identifier, cluster.timeline, cluster.database, confirmed, oldest_xid
        )
        pinned = pin(pipeline, cluster, TableMapping.of(pipeline).by_topic(found.tables), oldest_xid, new=True)
        oids = sorted(p.table.oid for p in pinned)
        claim.write(
            {
                records.COVERAGE: coverage.read(connection, publication.names(pipeline.publication_name), oids),
                records.INTENT: _intent(pipeline, claim, found.via_root),
                records.SAVED_SETTINGS: records.SavedSettings(pipeline.chosen(), TableMapping.of(pipeline).hash_key),
                records.SLOT: record,
                **{records.table_key(p.table.oid): p for p in pinned},
                **(_starts(pipeline, claim, pinned, snapshot=False) if anew else {}),
                **partition_records(connection, found.tables),
                records.COMPLETE: records.Complete(tuple(oids), True, now),
                records.POSITION: records.Reached(position.lsn, position.ordinal, now),
            }
        )
    return record


def _intent(
    pipeline: Settings, claim: Claim, via_root: bool, fingerprint: dict[str, str] | None = None
) -> records.Intent:
    # until there is a slot, preflight has seen that the publications are this pipeline's, or are not there; once there
    # is one, who has made them does not change, whatever is set while tables are added
    of_slot = claim.state.intent if claim.state.slot is not None else None
    return records.Intent(
        pipeline.slot,
        pipeline.publication_name,
        time.time(),
        claim.cluster.system_identifier,
        "root" if via_root else "leaves",
        pipeline.format,
        pipeline.topic_prefix,
        fingerprint,
        pipeline.envelope,
        pipeline.envelope_schema,
        pipeline.create_publication if of_slot is None else of_slot.create_publication,
        store.topic_id(pipeline.kafka, claim.topic),
    )


def partition_records(connection: Connection, tables: Sequence[SourceTable]) -> dict[str, records.Partitions]:
    """The records of the partitions that the stream knows from now on; if there is a snapshot, it writes them
    itself."""
    roots = [table.oid for table in tables if table.partitioned]
    below = partitions.below(connection, roots)
    return {records.partitions_key(oid): records.Partitions(partitions.remembered(below.get(oid, []))) for oid in roots}


def _create(pipeline: Settings, claim: Claim, tables: list[SourceTable], via_root: bool) -> SlotRecord:
    # until now a job may have published: the claim has ended it
    _check_between_transactions(pipeline, claim.state, tables)
    with session(pipeline.postgres, f"Creating slot {pipeline.slot!r}") as connection:
        options.check(connection, pipeline, claim.state)
        # the tables' fingerprint from before the slot is kept: DDL that runs while a creation is interrupted must be
        # noticed
        before = (claim.state.intent and claim.state.intent.fingerprint) or catalog.fingerprint(
            connection, [t.oid for t in tables]
        )
        claim.write({records.INTENT: _intent(pipeline, claim, via_root, before)})
        added = [t for t in tables if t.oid not in claim.state.tables]
        if problems := topic_problems(claim.state, added, TableMapping.of(pipeline)):
            raise Refused(" ".join(problems))
        if pipeline.create_publication:
            publication.create(
                connection,
                pipeline.publication_name,
                tables,
                via_root=via_root,
                timeout=pipeline.create_slot_timeout,
            )
            # the stream begins at a position of before: it sends those who write to the tables now
            name, timeout = pipeline.publication_name, pipeline.create_slot_timeout
            there = publication.existing(connection, name)
            publication.extend(connection, name, there, added, timeout=timeout, alone=True)
        record = claim.state.slot
        if record is None:
            consistent_point = _make_slot(pipeline, connection, claim.cluster, tables, before)
            oldest_xid = slot.fresh_xid(connection)
            record = SlotRecord(
                pipeline.slot,
                claim.cluster.system_identifier,
                claim.cluster.timeline,
                claim.cluster.database,
                consistent_point,
                oldest_xid,
            )
        else:
            # tables are added to a slot that exists: X0 is taken after they were added to the publication
            oldest_xid = slot.fresh_xid(connection)
        by_topic, new = TableMapping.of(pipeline).by_topic(added), claim.state.slot is None
        pinned = pin(pipeline, claim.cluster, by_topic, oldest_xid, new=new)
        values: dict[str, records.StateRecord | None] = {records.table_key(p.table.oid): p for p in pinned}
        values |= _starts(pipeline, claim, pinned, snapshot=not pipeline.skip_snapshot)
        values |= {records.stopped_key(t.oid): None for t in added if t.oid in claim.state.stopped}
        if without := [table for table in added if pipeline.skip_snapshot or table.outbox]:
            completed = sorted({*claim.state.completed, *(t.oid for t in without)})
            values[records.COMPLETE] = records.Complete(tuple(completed), pipeline.skip_snapshot, time.time())
            values |= partition_records(connection, without)
        oids = sorted({*claim.state.tables, *(t.oid for t in tables)})
        covered = coverage.read(connection, publication.names(pipeline.publication_name), oids)
        if claim.state.coverage is not None:
            # for tables that are not new, the earlier record is kept: it shows whether changes are missing
            covered = claim.state.coverage.with_new(covered)
        claim.write({records.SLOT: record, records.COVERAGE: covered, **saved.changed(pipeline, claim.state), **values})
    log.info("Slot %r: consistent point %s.", record.name, format_lsn(record.consistent_point))
    return record


def _starts(
    pipeline: Settings, claim: Claim, pinned: Sequence[PinnedTable], *, snapshot: bool
) -> dict[str, records.StateRecord | None]:
    """Where the pipeline begins in its topics. Consumers are told by an event, unless nothing was ever published.

    :param snapshot: whether a snapshot is to publish again what the topics have.
    """
    known, of_tables = claim.state, [each for each in pinned if not each.table.outbox]
    first = known.slot is None
    if not of_tables and not first:
        return {}
    topics = Topics(pipeline.kafka)
    events, letters = TableMapping.of(pipeline).service_topics
    service = topics.describe([events, letters], confirm=first)
    partitions = {each.topic: each.partitions for each in of_tables}
    ends = topics.all_ends({**partitions, **{name: topic.partitions for name, topic in service.items()}})
    values = starts.new(pipeline, known, {each.topic: each.topic_id for each in of_tables}, ends)
    event = starts.event(claim.cluster.pipeline(pipeline.slot), values, snapshot=snapshot)
    if event and events in service and any(any(ends[topic]) for topic in (*partitions, events)):
        claim.publish(records.stream_id(claim.prefix), [Message(events, b"begin", event)])
    if first:
        values |= {
            records.start_key(name): records.StartOffsets(topic.id, tuple(ends[name]))
            for name, topic in service.items()
        }
    return values


def _make_slot(
    pipeline: Settings, connection: Connection, cluster: Cluster, tables: Sequence[SourceTable], before: dict[str, str]
) -> int:
    """Create the slot, or use one that exists; returns its consistent point. It is created again if DDL or TRUNCATE of
    a published table was committed during its creation: such a slot can be broken, or miss a new column, for ever.

    :param before: the tables' fingerprint from before the creation began.
    :raises SlotError: DDL ran during each attempt, or see :func:`slot.check` and :func:`slot.create`.
    """
    oids = [t.oid for t in tables]
    present = slot.state(connection, pipeline.slot)
    if present is not None:
        slot.check(present, cluster.database)
        if catalog.fingerprint(connection, oids) == before or pipeline.adopt_slot:
            # A slot that is older than the publications would get stuck, which an adopted one may be. Nothing was
            # published from it, so it is moved past every transaction that began before the publications were there.
            slot.wait_visible(connection, slot.fresh_xid(connection), timeout=pipeline.create_slot_timeout)
            point = slot.advance(connection, pipeline.slot)
            log.info("Slot %r exists already and is used from %s on.", pipeline.slot, format_lsn(point))
            return point
        log.warning(
            "Tables were altered while the creation of slot %r was interrupted; the slot is created again.",
            pipeline.slot,
        )
        slot.drop(connection, pipeline.slot)
    for _ in range(_ATTEMPTS):
        before = catalog.fingerprint(connection, oids)
        point = slot.create(
            pipeline.postgres,
            connection,
            pipeline.slot,
            timeout=pipeline.create_slot_timeout,
            waiting=_tell(pipeline.slot),
        )
        try:
            slot.wait_visible(connection, slot.fresh_xid(connection), timeout=pipeline.create_slot_timeout)
        except Outage:
            # nobody may try again, and it would keep WAL
            with contextlib.suppress(psycopg.Error, SlotError):
                slot.drop(connection, pipeline.slot)
            raise
        if catalog.fingerprint(connection, oids) == before:
            return point
        log.warning(
            "A published table was altered or truncated while slot %r was created; the slot is created again.",
            pipeline.slot,
        )
        slot.drop(connection, pipeline.slot)
    raise SlotError(
        f"Published tables were altered or truncated during each of {_ATTEMPTS} attempts to create slot "
        f"{pipeline.slot!r}.",
        "Try again while no DDL runs.",
    )


def _tell(name: str) -> Callable[[list[str]], None]:
    logged: set[str] = set()

    def waiting(blockers: list[str]) -> None:
        if new := set(blockers) - logged:
            logged.update(new)
            log.info("Slot %r waits for running transactions: %s", name, "; ".join(sorted(new)))

    return waiting


def pin(
    pipeline: Settings, cluster: Cluster, by_topic: Mapping[str, SourceTable], oldest_xid: int, *, new: bool
) -> list[PinnedTable]:
    """Create the topics and schemas of tables where they are missing, and record this pipeline as the topics' owner.

    :param by_topic: the tables by their topics' names.
    :param oldest_xid: X0 of the tables.
    :param new: whether the pipeline has published nothing yet. Later, its own topics are not made again: that they are
        missing has to be noticed, since what they held is lost.
    :raises Refused: a topic belongs to another pipeline, or does not exist.
    """
    make_named(pipeline, cluster)
    topics, outboxes = Topics(pipeline.kafka), [table for table in by_topic.values() if table.outbox]
    by_topic = {name: table for name, table in by_topic.items() if not table.outbox}
    if pipeline.create_topics:
        wanted = [*(TableMapping.of(pipeline).service_topics if new else ()), *by_topic]
        present = topics.describe(wanted)
        replication = topics.replicas(pipeline.replication_factor)
        missing = [name for name in wanted if name not in present]
        topics.make(*(kafka_checks.new_topic(pipeline, name, by_topic.get(name), replication) for name in missing))
    present = topics.describe(list(by_topic), confirm=True)
    if missing := sorted(by_topic.keys() - present.keys()):
        raise Refused(f"Kafka does not know topic {missing[0]!r}.", "Create it, or set create_topics.")
    _own(pipeline, cluster, by_topic)
    pinned = [PinnedTable(each, TableMapping.of(pipeline).route(each), "", 1, 0, 0, oldest_xid) for each in outboxes]
    ids = _schema_ids(pipeline, by_topic)
    for name, table in by_topic.items():
        topic = present[name]
        key_id, value_id = ids.get(f"{name}-key", 0), ids.get(f"{name}-value", 0)
        pinned.append(PinnedTable(table, name, topic.id, topic.partitions, key_id, value_id, oldest_xid))
    return pinned


def make_named(pipeline: Settings, cluster: Cluster) -> None:
    """Create the topics that the settings name and that are no table's, where they are missing, and record this
    pipeline as their owner.

    :raises Refused: one belongs to another pipeline, or does not exist.
    """
    if not (names := TableMapping.of(pipeline).named_topics):
        return
    topics = Topics(pipeline.kafka)
    present = topics.describe(names)
    if missing := [name for name in names if name not in present]:
        if not pipeline.create_topics:
            raise Refused(f"Kafka does not know topic {missing[0]!r}.", "Create it, or set create_topics.")
        replication = topics.replicas(pipeline.replication_factor)
        topics.make(*(kafka_checks.new_topic(pipeline, name, None, replication) for name in missing))
        topics.describe(missing, confirm=True)
    _own(pipeline, cluster, names)


def make_chosen(pipeline: Settings, cluster: Cluster, chosen: Sequence[str], table: SourceTable) -> dict[str, str]:
    """Create the topics that rows or messages of an outbox choose, where they are missing, and record this pipeline as
    their owner. Returns why some of them may not be chosen.

    :raises Refused: Kafka denies one, or refuses to create it for a reason that no row has.
    :raises Outage: Kafka does not answer.
    """
    topics, who = Topics(pipeline.kafka), f"a row of {table.qualified}" if table.oid else "a logical message"
    refused = _not_ours(pipeline, cluster, chosen)
    present = topics.describe([name for name in chosen if name not in refused])
    missing = [name for name in chosen if name not in refused and name not in present]
    if not pipeline.create_topics:
        refused |= {name: f"topic {name!r} does not exist, and create_topics is off" for name in missing}
    elif missing:
        replication = topics.replicas(pipeline.replication_factor)
        asked = [kafka_checks.new_topic(pipeline, name, table, replication) for name in missing]
        for name, why in topics.uncreatable(asked).items():
            if not why.startswith("TOPIC_EXCEPTION"):
                raise Refused(f"Topic {name!r}, which {who} chooses, cannot be created: {why}")
            refused[name] = f"topic {name!r} cannot be created: {why}"
        topics.make(*(topic for topic in asked if topic.name not in refused))
        present |= topics.describe([name for name in missing if name not in refused], confirm=True)
    if denied := [name for name, topic in present.items() if not topic.may_write]:
        raise Refused(f"Kafka denies Write on topic {denied[0]!r}, which {who} chooses.", GRANT)
    ours = [name for name in chosen if name not in refused]
    name = cluster.pipeline(pipeline.slot)
    # nothing of them is swept, so nobody has looked whether others have written to them
    before = own(pipeline, name, ours, shared=True)
    # another pipeline may have taken one meanwhile
    theirs = _not_ours(pipeline, cluster, ours)
    control_topic.write(pipeline.kafka, {key: before[key] for key in before if topic_owned(key, name) in theirs})
    return refused | theirs


def _own(pipeline: Settings, cluster: Cluster, topics: Iterable[str]) -> None:
    """Record this pipeline as the owner of topics.

    :raises Refused: another one has taken one meanwhile; who is refused is not left behind as one that publishes to
        them, for which the owner would be refused what cannot be done in shared topics.
    """
    before = own(pipeline, cluster.pipeline(pipeline.slot), topics, shared=pipeline.share_topics)
    if problems := _owned_by_others(pipeline, cluster, topics):
        control_topic.write(pipeline.kafka, before)
        raise Refused(" ".join(problems))


def _not_ours(pipeline: Settings, cluster: Cluster, topics: Sequence[str]) -> dict[str, str]:
    """Which of some topics belong to other pipelines, each with what is said of it."""
    if not _owned_by_others(pipeline, cluster, topics):
        return {}
    return {name: problem for name in topics for problem in _owned_by_others(pipeline, cluster, [name])}


def _owned_by_others(pipeline: Settings, cluster: Cluster, topics: Iterable[str]) -> list[str]:
    return [] if pipeline.share_topics else kafka_checks.owners_problems(pipeline, cluster, PipelineState(), topics)


def _schema_ids(pipeline: Settings, by_topic: Mapping[str, SourceTable]) -> dict[str, int]:
    """The registry's ids of the tables' schemas, by subject; empty if the format needs no registry."""
    registry, mapping = Registry.of(pipeline), TableMapping.of(pipeline)
    if registry is None:
        return {}
    schemas = [each for name, table in by_topic.items() for each in mapping.subjects(name, table)]
    ids = registry.register_all(schemas)
    return {subject: number for (subject, _), number in zip(schemas, ids, strict=True)}
