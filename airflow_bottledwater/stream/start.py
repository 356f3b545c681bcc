"""Starts a stream: claims the slot, and compares the state with the slot, the publications and the topics."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Refused, StateError
from airflow_bottledwater.model.below import Below
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.postgres import catalog, slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.partitions import Partition
from airflow_bottledwater.postgres.server import end_of_wal, identify
from airflow_bottledwater.provision import succession
from airflow_bottledwater.provision.take_in import new_tables, take_in
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import coverage, saved, schemas, snapshots
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import check_slot, check_topics, shared
from airflow_bottledwater.state.pinned import Pin, pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LiveProgress, StateRecord, below_key, live_key, stream_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """A stream whose slot is claimed, ready to run.

    :param prefix: the prefix of the slot's transactional ids.
    :param position: P, or A if nothing was streamed yet.
    :param not_taken: the oids of tables that were created since, and could not be taken in.
    :param lost_schemas: the ids of schemas of dropped tables that the registry does not know any more.
    """

    cluster: Cluster
    job: Job
    prefix: str
    state_topic: str
    state: PipelineState
    position: Position
    not_taken: frozenset[int] = frozenset()
    lost_schemas: frozenset[int] = frozenset()

    @property
    def topics(self) -> dict[str, Pin]:
        """The data topics as they were pinned."""
        return pins(self.state.tables.values())

    @property
    def fingerprint(self) -> str:
        """Identifies what decides which changes a transaction has: PostgreSQL's major version and the tables. If it differs, ordinals
        inside a transaction have another meaning."""
        return fingerprint(self.state, self.cluster)


def begin(pipeline: Pipeline) -> Start:
    """Take in new tables, claim the slot, and check that the stream can continue at the position in the state.

    :raises StateError: the snapshot is not complete, records are missing, a topic is not the one that was pinned, or changes may be
        missing from the stream.
    :raises SlotError: the slot is not the one that the state describes.
    :raises Refused: P is inside a transaction that PostgreSQL would send differently now; or the registry has lost the id of a key.
    """
    with session(pipeline.postgres, "Starting the stream") as connection:
        cluster = identify(connection)
        claimed, not_taken = _claim(pipeline, connection, cluster)
        try:
            known = claimed.state
            record = known.slot
            if record is None:
                raise StateError(
                    f"The state topic {claimed.topic!r} does not know slot {pipeline.slot!r}.",
                    "Create it first; if its records were lost, drop the slot and start again with a snapshot.",
                )
            if not known.complete:
                raise StateError(
                    f"The snapshot of slot {pipeline.slot!r} is not complete.",
                    "Run the snapshot (it resumes), then the stream.",
                )
            position = known.position or Position(record.consistent_point)
            check_slot(slot.state(connection, record.name), record, cluster, position, end_of_wal(connection))
            _check_fingerprint(known, cluster)
            coverage.check(connection, pipeline, known)
            if more := coverage.followed(connection, known):
                claimed.write(more)
            if new := coverage.unread(coverage.attached(connection, pipeline, known), known):
                claimed.write(_reading(new))
            if moved := _moved(connection, pipeline, known):
                claimed.write(moved)
            check_topics(pipeline, known)
            saved.remember(pipeline, claimed)
            lost = schemas.settle(pipeline, connection, claimed)
            claimed.record_ids([stream_id(claimed.prefix)])
            if again := snapshots.owed(known):
                claimed.write({live_key(each): progress for each, progress in again.items()})
            snapshots.ask_for_recorded(pipeline, cluster.pipeline(pipeline.slot), claimed.state)
            return Start(cluster, claimed.job, claimed.prefix, claimed.topic, claimed.state, position, not_taken, lost)
        finally:
            claimed.close()


def _claim(pipeline: Pipeline, connection: Connection, cluster: Cluster) -> tuple[Claim, frozenset[int]]:
    """The claim, when new tables were taken in; and the oids of those that could not be."""
    claimed = Claim(pipeline, cluster, "stream", Backoff(pipeline.outage_timeout))
    try:
        new = new_tables(connection, pipeline, claimed.state)
        succession.note(connection, pipeline, claimed, new)
    except BaseException:
        claimed.close()
        raise
    heirs, reached = claimed.state.heirs, claimed.state.position
    due = {oid: heir for oid, heir in heirs.items() if reached is not None and reached.lsn >= heir.lsn}
    new = {oid: name for oid, name in new.items() if oid not in heirs}
    if not new and not due:
        return claimed, frozenset()
    claimed.close()
    # each of these claims the slot, too
    not_taken = take_in(connection, pipeline, new) | succession.take_up(pipeline, due)
    return Claim(pipeline, cluster, "stream", Backoff(pipeline.outage_timeout)), not_taken


def _reading(attached: dict[int, list[Partition]]) -> dict[str, StateRecord]:
    """The records of live snapshots of partitions that were attached with rows, one for each of their tables."""
    records: dict[str, StateRecord] = {}
    for oid, parts in attached.items():
        log.info("Attached with rows that are to be read: %s.", ", ".join(part.qualified for part in parts))
        progress = LiveProgress((oid,), parts=tuple(part.oid for part in parts), owed=True)
        records[live_key(uuid.uuid4().hex[:12])] = progress
    return records


def _moved(connection: Connection, pipeline: Pipeline, known: PipelineState) -> dict[str, StateRecord | None]:
    """What is recorded of tables that were attached below another table of the pipeline, or detached from it: the topics of the latter lack
    what was committed meanwhile, and a live snapshot brings them to what the tables hold."""
    changes: dict[str, StateRecord | None] = {}
    below = coverage.below(connection, known)
    for oid in coverage.moved(below, known):
        pinned, changes[below_key(oid)] = known.tables[oid], None
        name, topic = pinned.table.qualified, pinned.topic
        if oid in below:
            changes[below_key(oid)] = Below(below[oid])
            log.warning(
                "%s is a partition of %s now: its changes are published as those of that table. Its own topic %s gets none, and is brought "
                "to the table again when it is detached.",
                name, below[oid], topic,
            )  # fmt: skip
        elif not pinned.table.keyed:
            log.warning(
                "%s was detached from another table: topic %s lacks what was committed meanwhile, and cannot be brought to the table again, "
                "which has no key.",
                name, topic,
            )  # fmt: skip
        elif catalog.names(connection, [oid]):
            log.info("%s was detached from another table: its rows are read again.", name)
            # the keys of another pipeline are not removed
            progress = LiveProgress((oid,), sweep=not shared(pipeline, [topic]), owed=True)
            changes[live_key(uuid.uuid4().hex[:12])] = progress
    return changes


def _check_fingerprint(known: PipelineState, cluster: Cluster) -> None:
    """Check that the server would send the same changes again, if P is inside a transaction: only then its ordinal means the same.

    :raises Refused: it might not.
    """
    stored, today = known.reached, fingerprint(known, cluster)
    if stored is not None and stored.ordinal and (stored.fingerprint or today) != today:
        raise Refused(
            "The stream stopped inside a large transaction, and since then the tables or the server's version changed: it cannot be "
            "continued there.",
            "Drop the slot (bottledwater drop-slot --when always) and start again with a snapshot.",
        )


def fingerprint(known: PipelineState, cluster: Cluster) -> str:
    """See :attr:`Start.fingerprint`."""
    return f"{cluster.version // 10000}:{','.join(map(str, sorted(known.tables)))}"
