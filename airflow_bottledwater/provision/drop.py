"""Drops a pipeline's slot and publications, and deletes its saved state."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import names
from airflow_bottledwater.errors import DOCS, BottledWaterError, Refused, SettingError, SlotError, StateError
from airflow_bottledwater.jobs import requests, snapshots
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import WHOLE_NAME, Cluster, parts
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.postgres import publication, slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.server import exists, identify
from airflow_bottledwater.provision.beside import refuse_alive
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.claim import Claim, read_own, read_state
from airflow_bottledwater.state.control_records import (
    OwnerRecord,
    StatusRecord,
    decode,
    encode,
    is_below,
    owner_key,
    request_key,
    status_key,
    stopped_key,
    table_requests_prefix,
    topic_owned,
    untold_key,
    verified_key,
)
from airflow_bottledwater.state.letters import are_open
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import CLAIM, IDS, Letters, letters_of

log = logging.getLogger(__name__)

#: what to do about a job that is alive: that of another server's pipeline, and that of the pipeline which is dropped
_LEAVE = (
    "Leave it alone, and use another slot name for this database. If its own source is gone for good, first end its "
    "job: mark its task in Airflow, or end its command."
)
_END = "It was not dropped. Retire the pipeline, whose DAG then drops the slot, or stop it first."


def forget(pipeline: Settings, name: str) -> str:
    """Delete the state of a pipeline whose source is gone for good: its server was switched off, or its database was
    moved, renamed or upgraded; returns what was done, in sentences. No database is changed.

    :param pipeline: the settings of any pipeline of the same Kafka, with a connection to a server that answers.
    :param name: the whole name of the pipeline that is gone, so that the caller confirms whose state is deleted.
    :raises SettingError: it is no whole name.
    :raises StateError: the pipeline has no state, or it is alive, or it is that of this connection, or the connection
        cannot be asked.
    """
    system_identifier, database, slot_name = parts(name)
    if not (system_identifier and database and slot_name):
        raise SettingError("forget_cluster", name, WHOLE_NAME)
    pipeline, other = pipeline.with_(slot=slot_name), Cluster(system_identifier, 0, database, 0)
    if _is_there(pipeline, other, name):
        raise StateError(
            f"The source of pipeline {name!r} is not gone: the connection leads to its server, which has a database "
            f"{database!r}. Its slot would be left behind.",
            "Use 'bottledwater drop-slot --when always', with a connection to that database.",
        )
    topic = store.state_topic_name(database, slot_name)
    known = read_state(pipeline, topic)
    # an attempt that died has deleted its state already, but not its status; the topic may be its successor's by now
    taken = known.system_identifier not in (system_identifier, "")
    if known.system_identifier != system_identifier and read_status(pipeline, name) is None:
        raise StateError(
            f"Pipeline {name!r} has no saved state that could be deleted: state topic {topic!r} belongs to cluster "
            f"{known.system_identifier or '(none)'}.",
            f"The name is that of a pipeline of this Kafka: {WHOLE_NAME}.",
        )
    refuse_alive(pipeline, name, None if taken else known.claim, _LEAVE)
    kept: dict[str, Letters] = {}
    if taken:
        _forget_shared(pipeline, PipelineState({}), name)
        control_topic.write(pipeline.kafka, {status_key(name): None})
    else:
        if known.settings is not None:
            # what counts is how this pipeline was run, not the one whose settings are given
            used = {key: known.settings.get(key, SETTINGS[key].default) for key in ("share_topics", "skip_snapshot")}
            pipeline = pipeline.with_(**used)
        claim = Claim(pipeline, other, "drop", Backoff(pipeline.outage_timeout))
        try:
            kept = kept_letters(pipeline, claim.state, name)
            _forget(pipeline, claim, name, kept)
        finally:
            claim.close()
    said = (
        f"Deleted the saved state of pipeline {name!r}. No database was changed. Where its slot and publications are "
        "left (pg_upgrade, a renamed database, a source that is there after all), drop them before a pipeline of that "
        f"slot starts; until then the slot keeps WAL: SELECT pg_drop_replication_slot('{slot_name}'). See "
        f"{DOCS}operations.html#upgrades."
    )
    if count := sum(each.open for each in kept.values()):
        said += f" {are_open(count)}: a pipeline of this slot name in a database {database!r} can settle them."
    return said


def _is_there(pipeline: Settings, source: Cluster, name: str) -> bool:
    """Whether the server of the connection has the database of a pipeline.

    :raises StateError: the server does not answer: that of a pipeline may be down for a while, and not be gone.
    """
    try:
        with session(pipeline.postgres, "Looking for the database") as connection:
            here = identify(connection).system_identifier == source.system_identifier
            return here and exists(connection, source.database)
    except BottledWaterError as error:
        raise StateError(
            f"Whether the source of pipeline {name!r} is gone is not known, since the connection's server cannot be "
            f"asked: {error}",
            "Give the connection (-d) of a server that answers: that of the new one, for example. If the source is "
            "only away, wait for it: its pipeline can go on where it was.",
        ) from error


def _forget(pipeline: Settings, claim: Claim, owner: str, kept: Mapping[str, Letters]) -> None:
    """Delete a pipeline's records from both state topics, except for the claim and the transactional ids, so that an
    old job stays fenced, and for the topics that it has published to. By the state and the status, an attempt after one
    that died goes on; so they are deleted last.

    :param kept: the counts of dead letters that stay.
    """
    _forget_shared(pipeline, claim.state, owner)
    claim.write({**{key: None for key in claim.state.raw if key not in (CLAIM, IDS)}, **kept})
    control_topic.write(pipeline.kafka, {status_key(owner): None})


def _forget_shared(pipeline: Settings, known: PipelineState, owner: str) -> None:
    """Give up a pipeline's topics, and delete its requests: all that the shared state topic has but for the status."""
    shared = control_topic.read(pipeline.kafka)
    # nobody owns these topics any more, but what they hold is known to be a pipeline's: the next one may sweep it,
    # unless they were shared. Those of tables are in the state, too: the shared topic may have lost its records
    owned = {key: decode(OwnerRecord, raw) for key, raw in shared.items() if topic_owned(key, owner)}
    missing = {owner_key(pinned.topic, owner) for pinned in known.tables.values() if not pinned.table.outbox}
    dropped = {
        key: encode(OwnerRecord(owner, time.time(), dropped=True, shared=pipeline.share_topics or found.shared))
        for key, record in sorted({**dict.fromkeys(missing), **owned}.items())
        # one that is given up already stays before those of pipelines that came after it
        if not (found := record or OwnerRecord(owner)).dropped
    }
    # a request that no job has answered would be carried out by the next pipeline of this name
    asked = [request_key(owner), *(key for key in shared if is_below(table_requests_prefix(owner), key))]
    # runs that were asked for before the pipeline was stopped may wait still: that stays, unless it was started since
    if (status := decode(StatusRecord, shared.get(status_key(owner)))) is not None and status.wanted:
        asked.append(stopped_key(owner))
    control_topic.write(pipeline.kafka, {**dropped, **dict.fromkeys([verified_key(owner), untold_key(owner), *asked])})
    snapshots.forget_all(pipeline, owner)


def keeps(when: str, shared: Mapping[str, Any], name: str, claim: Job | None) -> bool:
    """Whether a slot is kept.

    :param when: see :func:`drop`.
    :param shared: the records of the shared topic.
    :param name: the pipeline's.
    :param claim: the last one on the slot.
    """
    if when != "retired":
        return when == "never"
    if (status := decode(StatusRecord, shared.get(status_key(name)))) is not None:
        return not status.retired
    # it may have been retired before its first job has reported, and made anew since
    last = requests.stop_since(shared, name, None)
    anew = last is not None and claim is not None and claim.kind != "drop" and claim.started > (last.at or 0.0)
    return last is None or not last.retire or anew


def kept_letters(pipeline: Settings, known: PipelineState, name: str) -> dict[str, Letters]:
    """The counts that stay when the slot is dropped: of open dead letters for which no new snapshot makes up, since it
    reads no outbox, replaces nothing without a key, and where it sweeps no topic, may leave what they have deleted.

    :param known: as it is before the slot is dropped.
    :param name: the pipeline's: the next one of this slot may be of another cluster.
    """
    found = {}
    for key, each in known.letters.items():
        pinned = known.tables.get(letters_of(key)[0])
        replaced = pinned is not None and pinned.table.keyed and not (pipeline.share_topics or pipeline.skip_snapshot)
        if each.open and not replaced:
            # the settings may have the next topic_prefix already
            now = "" if known.intent is None else names.service_topic("dead_letters", known.intent.topic_prefix)
            found[key] = replace(each, topic=each.topic or now, pipeline=each.pipeline or name)
    return found


def drop(pipeline: Settings, *, when: str = "retired", alive: bool = True) -> str:
    """Drop slot and publications, and delete the slot's saved state, but for the counts of dead letters that no new
    snapshot makes up for; returns a sentence that says what was done. The publications are those that the saved state
    names; they are kept if ``create_publication`` is off or was, when the pipeline was made, or if another pipeline of
    the database has them.

    :param when: ``retired`` (only if the stream was stopped for good), ``always`` or ``never``.
    :param alive: whether the slot of a job that is alive is dropped, too, which ends the job.
    :raises StateError: the saved state is another cluster's, or the pipeline's job is alive although it must not be, or
        the slot is not there or was made on another timeline; nothing was changed.
    :raises SlotError: the slot belongs to another application or database, or was not created by this pipeline.
    """
    with session(pipeline.postgres, f"Dropping slot {pipeline.slot!r}") as connection:
        cluster = identify(connection)
        present = slot.state(connection, pipeline.slot)
        known = read_own(pipeline, cluster)
        if keeps(when, control_topic.read(pipeline.kafka), cluster.pipeline(pipeline.slot), known.claim):
            if present is None:
                return f"There is no slot {pipeline.slot!r}."
            return (
                f"Kept: {slot.retained(present)}, which has the changes that are not yet published. Drop it with "
                "'bottledwater drop-slot --when always', or with DropReplicationSlotOperator(when='always')."
            )
        if present is not None and (present.plugin != slot.PLUGIN or present.database != cluster.database):
            slot.check(present, cluster.database, recorded=known.slot is not None)
        if present is not None and known.slot is None and known.intent is None:
            raise SlotError(
                f"Slot {pipeline.slot!r} was not created by this pipeline: its saved state does not name it. It was "
                "not dropped.",
                f"If nobody needs it, drop it by hand: SELECT pg_drop_replication_slot('{pipeline.slot}').",
            )
        if present is None or (known.slot is not None and known.slot.timeline != cluster.timeline):
            # a copy of the cluster's files has its system identifier; the job of the original is alive
            refuse_alive(pipeline, cluster.pipeline(pipeline.slot), known.claim, _LEAVE)
        elif not alive:
            refuse_alive(pipeline, cluster.pipeline(pipeline.slot), known.claim, _END)
        if not known.raw:
            return _drop(pipeline, connection, cluster, known)
        claim = Claim(pipeline, cluster, "drop", Backoff(pipeline.outage_timeout))
        try:
            done = _drop(pipeline, connection, cluster, claim.state)
            name = cluster.pipeline(pipeline.slot)
            _forget(pipeline, claim, name, kept_letters(pipeline, claim.state, name))
        finally:
            claim.close()
        return done


def _drop(pipeline: Settings, connection: Connection, cluster: Cluster, known: PipelineState) -> str:
    intent = known.intent if pipeline.create_publication else None
    ours = intent.publication if intent is not None and intent.create_publication else None
    # asked before anything is dropped, since Kafka may not answer
    kept = "" if ours is None else _needed_by(pipeline, connection, cluster, ours)
    # the slot first: what it keeps fills the server's disk
    done = [f"slot {pipeline.slot!r}"] if slot.drop(connection, pipeline.slot) else []
    foreign: list[str] = []
    if ours is not None and not kept:
        dropped, foreign = publication.drop(connection, ours)
        done += [f"publication {name!r}" for name in dropped]
    said = f"Dropped {', '.join(done)}." if done else f"There is no slot {pipeline.slot!r}."
    for name in foreign:
        said += f" Kept publication {name!r}, which belongs to another role by now: its owner can drop it."
    return said + (f" Kept publication {ours!r}, which {kept}." if kept else "")


def _needed_by(pipeline: Settings, connection: Connection, cluster: Cluster, name: str) -> str:
    """Which other slot of the database needs a publication, as the end of a sentence; empty if none does: somebody
    streams with it now, as a pipeline whose state is in another Kafka, or a pipeline does by its saved state. Without
    it, that would stop for good, and need a snapshot. Of a slot whose state this role may not read, the shared state
    topic tells whether it is a pipeline's."""
    for other in slot.streaming(connection, publication.names(name)):
        if other != pipeline.slot:
            return f"slot {other!r} needs"
    others = [s.name for s in slot.states(connection) if s.database == cluster.database and s.name != pipeline.slot]
    for other in others:
        try:
            # another pipeline's open transaction is not waited for
            intent = read_state(pipeline, store.state_topic_name(cluster.database, other), committed=False).intent
        except Refused as error:
            if any(key.endswith(f"/{cluster.pipeline(other)}") for key in control_topic.read(pipeline.kafka)):
                return f"slot {other!r} may need. {error.what} If it does not, drop the publication by hand"
            continue
        if intent is not None and intent.publication == name:
            return f"slot {other!r} needs"
    return ""
