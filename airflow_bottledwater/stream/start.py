"""Starts a stream: claims the slot, and compares the state with the slot, the publications and the topics."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage, PreflightError, Refused, StateError, StopRequested, TakenOver
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.server import check_primary, end_of_wal, identify
from airflow_bottledwater.provision import kafka_checks
from airflow_bottledwater.provision.create import make_named
from airflow_bottledwater.state import coverage, options, saved, schemas, store
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import check_slot, check_topics, own_again
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import POSITION, live_key, stream_id
from airflow_bottledwater.state.schemas import Settled

log = logging.getLogger(__name__)

#: the end of a fingerprint where PostgreSQL sends logical messages
_MESSAGES = ":messages"


@dataclass(frozen=True, slots=True)
class Start:
    """A stream whose slot is claimed, ready to run.

    :param prefix: the prefix of the slot's transactional ids.
    :param position: P, or A if nothing was streamed yet.
    :param schemas: what a registry that has lost schemas leaves behind.
    """

    cluster: Cluster
    job: Job
    prefix: str
    state_topic: str
    state: PipelineState
    position: Position
    schemas: Settled = field(default_factory=Settled)


def begin(pipeline: Settings, stopped: threading.Event | None = None) -> Start:
    """Claim the slot, and check that the stream can continue at the position in the state.

    :param stopped: ends a wait for Kafka.
    :raises StopRequested: it was set meanwhile.
    :raises StateError: the snapshot is not complete, records are missing, a topic is not the one that was pinned, or
        changes may be missing from the stream.
    :raises PreflightError: the options of single tables were changed, and have problems.
    :raises SlotError: the slot is not the one that the state describes.
    :raises Refused: P is inside a transaction that PostgreSQL would send differently now; or the registry has lost the
        id of a key.
    """
    with session(pipeline.postgres, "Starting the stream") as connection:
        check_primary(connection, pipeline.postgres)
        cluster = identify(connection)
        claimed = Claim(pipeline, cluster, "stream", Backoff(pipeline.outage_timeout, stopped))
        try:
            return _check(pipeline, connection, cluster, claimed)
        except (StopRequested, TakenOver):
            raise
        except Exception as error:
            _report(pipeline, cluster, claimed, error)
            raise
        finally:
            claimed.close()


def _check(pipeline: Settings, connection: Connection, cluster: Cluster, claimed: Claim) -> Start:
    """Compare the state with the slot, the publications, the topics and the registry, and write what has changed."""
    known = claimed.state
    record = known.slot
    assert record is not None, "the claim has seen it"
    if not known.complete:
        raise StateError(
            f"The snapshot of slot {pipeline.slot!r} is not complete.",
            "Run the snapshot (it resumes), then the stream.",
        )
    position = known.resume_at
    found, end = slot.state(connection, record.name), end_of_wal(connection)
    check_slot(found, record, cluster, position, end, shown=known.shown)
    _check_fingerprint(pipeline, known, cluster)
    if more := coverage.followed(connection, known):
        claimed.write(more)
    if gone := check_topics(connection, pipeline, known):
        _let_go(pipeline, cluster, claimed, gone)
        known = claimed.state
    own_again(pipeline, known)
    options.check(connection, pipeline, known)
    before = {
        name: (known.settings or {}).get(name, SETTINGS[name].default)
        for name in ("transaction_topic", "messages", "ddl_topic")
    }
    if set(TableMapping.of(pipeline).named_topics) - set(TableMapping.of(pipeline.with_(**before)).named_topics):
        _check_names(pipeline, known, claimed.topic)
        make_named(pipeline, cluster)
    if changed := saved.changed(pipeline, known):
        claimed.write(changed)
    settled = schemas.settle(pipeline, connection, claimed)
    claimed.record_ids([stream_id(claimed.prefix)])
    if again := snapshots.failed_required(known):
        claimed.write({live_key(each): progress for each, progress in again.items()})
    snapshots.ask_for_recorded(pipeline, cluster.pipeline(pipeline.slot), claimed.state)
    return Start(cluster, claimed.job, claimed.prefix, claimed.topic, claimed.state, position, settled)


def _let_go(pipeline: Settings, cluster: Cluster, claimed: Claim, oids: Collection[int]) -> None:
    """Stop following tables that were dropped and whose topics were deleted. What is not published of them is left out,
    and counted as changes of any table that is not followed.

    :param oids: theirs.
    """
    # compiled code, a hundred megabytes: a driver that lets go of nothing does without it
    from airflow_bottledwater.tables import writer
    from airflow_bottledwater.tables.plan import Do, Step

    known = claimed.state
    why = "was dropped, and its topic was deleted, so that its changes that are not published yet are left out"
    steps = tuple(Step(oid, known.tables[oid].table.qualified, "", why, Do.STOP) for oid in sorted(oids))
    prepared = writer.PreparedSteps(steps, dropped=frozenset(oids))
    changed = writer.records(pipeline, prepared, known)
    after = known.copy()
    after.apply(changed)
    if (reached := known.reached) is not None and reached.ordinal:
        # of the transaction that P is inside of, PostgreSQL sends the same as before
        changed[POSITION] = replace(reached, fingerprint=fingerprint(pipeline, after, cluster))
    claimed.write(changed)
    for step in steps:
        log.warning("%s is not followed any more: it %s.", step.table, step.why)


def _check_names(pipeline: Settings, known: PipelineState, state_topic: str) -> None:
    """
    :raises PreflightError: a topic that the settings name since the last start is one that has another purpose.
    """
    tables = known.tables.values()
    data = {pinned.topic: pinned.table for pinned in tables if not pinned.table.outbox}
    outboxes = {pinned.topic: pinned.table for pinned in tables if pinned.table.outbox}
    memory = (state_topic, store.CONTROL_TOPIC)
    if problems := kafka_checks.name_problems(TableMapping.of(pipeline), data, outboxes, memory):
        raise PreflightError(problems)


def _report(pipeline: Settings, cluster: Cluster, claimed: Claim, error: Exception) -> None:
    """Write the last status of a job that fails before it streams: that of the job before it, which may have been
    stopped on request, says nothing of a pipeline that is meant to run."""
    controller = Controller(pipeline, cluster, claimed.job)
    controller.begin_at(claimed.state.resume_at, claimed.state)
    with contextlib.suppress(Outage):
        controller.follow(read_status(pipeline, controller.name))
    controller.finish("failed", error, permanent=not transient(error))


def _check_fingerprint(pipeline: Settings, known: PipelineState, cluster: Cluster) -> None:
    """Check that the server would send the same changes again, if P is inside a transaction: only then its ordinal
    means the same.

    :raises Refused: it might not.
    """
    stored, today = known.reached, fingerprint(pipeline, known, cluster)
    if stored is None or not stored.ordinal:
        return
    before = stored.fingerprint or today
    if before != today and before.removesuffix(_MESSAGES) == today.removesuffix(_MESSAGES):
        raise Refused(
            "The stream stopped inside a large transaction, and since then the settings messages or ddl_topic were "
            f"{'set' if pipeline.sends_messages else 'taken back'}: the transaction's changes would be counted "
            "otherwise.",
            "Set it as it was, and run the stream until it has passed that transaction (a bounded run is enough); then "
            "change it.",
        )
    if before != today:
        raise Refused(
            "The stream stopped inside a large transaction, and since then the tables or the server's version "
            "changed: it cannot be continued there.",
            "Drop the slot (bottledwater drop-slot --when always) and start again with a snapshot.",
        )


def fingerprint(pipeline: Settings, known: PipelineState, cluster: Cluster) -> str:
    """Identifies what decides which changes a transaction has: PostgreSQL's major version, the tables, and whether
    logical messages are sent. If it differs, ordinals inside a transaction have another meaning."""
    tables = ",".join(map(str, sorted(known.tables)))
    return f"{cluster.version // 10000}:{tables}{_MESSAGES if pipeline.sends_messages else ''}"
