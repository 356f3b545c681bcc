"""Preflight: finds everything that is known to go wrong later, before anything is changed."""

from __future__ import annotations

import logging

import psycopg

from airflow_bottledwater.encoding import unheld
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import (
    Outage,
    PreflightError,
    Refused,
    SchemaRefused,
    StateError,
)
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import ddl
from airflow_bottledwater.postgres.connect import Connection, connect, session
from airflow_bottledwater.postgres.server import identify, is_standby
from airflow_bottledwater.provision.array_checks import check_arrays
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.provision.kafka_checks import check_kafka, read_saved_state
from airflow_bottledwater.provision.publication_checks import check_publications
from airflow_bottledwater.provision.source_checks import (
    check_server,
    check_session,
    check_sessions,
    check_slot,
    check_standbys,
    check_tables,
    check_wal_level,
)
from airflow_bottledwater.state import options, schemas
from airflow_bottledwater.state.identity import check_settings, topic_of, via_root
from airflow_bottledwater.state.pipeline_state import PipelineState

log = logging.getLogger(__name__)

OLDEST_VERSION = 140000


def run(pipeline: Settings, *, adopts_topics: bool = False) -> Findings:
    """Check source, broker and registry; changes nothing. Warnings are logged.

    :param adopts_topics: see :class:`Findings`.
    :raises PreflightError: there are problems; the error has all that were found, also before a server was away: they
        stay when it is back.
    :raises SlotInUse: the slot is still being created.
    :raises Outage: a server is not available, and no problem was found before.
    :raises Refused: a server denies access, and no problem was found before.
    """
    problems: list[str] = []
    try:
        found = _check(pipeline, problems, adopts_topics)
    except (Outage, Refused) as error:
        if not problems:
            raise
        raise PreflightError([*problems, str(error)]) from error
    if problems:
        raise PreflightError(list(dict.fromkeys(problems)))
    for warning in found.warnings:
        log.warning("%s", warning)
    found.notes += unheld.notes(found.tables, json=pipeline.record_format.holds_all)
    if pipeline.envelope_schema and pipeline.record_format.as_json:
        found.notes += unheld.misread_by_connect(found.tables)
    for note in found.notes:
        log.info("%s", note)
    return found


def _check(pipeline: Settings, problems: list[str], adopts_topics: bool) -> Findings:
    """
    :param problems: what is found is appended.
    :raises PreflightError: there is one without whose remedy the rest cannot be checked.
    :raises SlotInUse: the slot is still being created.
    :raises Outage: a server is not available.
    """
    with session(pipeline.postgres, "Preflight") as connection:
        if denied := check_session(connection):
            raise PreflightError(denied)
        cluster = _identify(connection)
        found = Findings(cluster, adopts_topics=adopts_topics)
        if cluster.version < OLDEST_VERSION:
            raise PreflightError(
                [
                    f"PostgreSQL {cluster.version // 10000} is too old: version 14 is the first that can read a table "
                    "by ranges of its blocks. Upgrade the server."
                ]
            )
        problems += check_server(connection, found)
        if is_standby(connection):
            # much of what follows cannot be checked on a standby
            raise PreflightError(["The source is a standby. Connect to the primary.", *problems])
        try:
            # first, since it says how partitioned tables are published
            read_saved_state(pipeline, found)
            check_settings(pipeline, found.state)
            found.via_root = via_root(pipeline, found.state)
        except StateError as error:
            raise PreflightError([*problems, str(error)]) from None
        except Refused:
            pass  # the checks of Kafka meet it again, and report it
        if (held_up := check_standbys(connection, pipeline.slot)) is not None:
            # a pipeline that exists goes on with a problem in its status: Patroni's strict mode sets * by itself while
            # no standby can be a synchronous one
            (problems if found.state.slot is None else found.warnings).append(str(held_up))
        try:
            options.check_hash_key(pipeline, found.state)
        except Refused as error:
            problems.append(str(error))
        if pipeline.ddl_topic and not ddl.installed(connection):
            problems.append(f"Database {cluster.database!r}: {' '.join(ddl.MISSING)}")
        problems += check_sessions(connection, pipeline, found)
        problems += check_tables(connection, pipeline, found)
        stops = TableMapping.of(pipeline).stops
        for table in found.tables:
            if table.oid not in found.state.tables:
                # with the policy log such rows become dead letters
                (problems if stops(table) else found.warnings).extend(check_arrays(connection, [table]))
        try:
            check_kafka(pipeline, found, problems)
        except Refused as error:
            problems.append(str(error))
        # after Kafka, since the checks of slot and publications depend on the saved state
        problems += check_slot(connection, pipeline, found)
        problems += check_publications(connection, pipeline, found)
    problems += _replication(pipeline, problems)
    problems += _registry(pipeline, found)
    return found


def _identify(connection: Connection) -> Cluster:
    """
    :raises PreflightError: wal_level is not logical, and the server tells no place in its WAL for that reason.
    """
    try:
        return identify(connection)
    except psycopg.errors.ObjectNotInPrerequisiteState:
        if level := check_wal_level(connection):
            raise PreflightError(level) from None
        raise


def _replication(pipeline: Settings, problems: list[str]) -> list[str]:
    """
    :param problems: what was found before: it can be why there is no answer now (no walsender is free).
    """
    try:
        connection = connect(pipeline.postgres, replication=True, application="bottledwater preflight")
    except Refused as error:
        return [f"PostgreSQL refuses a replication connection: {error}"]
    except Outage:
        if problems:
            return []
        raise
    try:
        connection.execute("IDENTIFY_SYSTEM")
    finally:
        connection.close()
    return []


def _registry(pipeline: Settings, found: Findings) -> list[str]:
    registry, mapping = Registry.of(pipeline), TableMapping.of(pipeline)
    if registry is None:
        return []
    problems: list[str] = []
    new: list[tuple[str, str]] = []
    known: list[tuple[SourceTable, tuple[str, str]]] = []

    def tell(table: SourceTable, error: Refused) -> None:
        aside = isinstance(error, SchemaRefused) and _goes_on(mapping, found.state, table)
        (found.warnings if aside else problems).append(str(error))

    for table in found.tables:
        if table.oid in found.state.held:
            continue  # it may be set aside for this reason, and the others are to go on
        try:
            subjects = mapping.subjects(topic_of(table, found.state, mapping), table)
        except SchemaRefused as error:
            tell(table, error)
            continue
        if (before := found.state.tables.get(table.oid)) is None:
            new += subjects
            continue
        try:
            schemas.check_published(registry, pipeline, before.topic, table, found.state.versions(table.oid))
        except SchemaRefused as error:
            tell(table, error)
            subjects = subjects[:-1]  # the registry would say the same of it
        known += [(table, subject) for subject in subjects]
    # tables whose new keys are accepted get the ids of today
    pinned = {table.oid for table in found.tables} & found.state.tables.keys() - found.state.accepted
    problems += schemas.key_problems(pipeline, (found.state.tables[oid] for oid in sorted(pinned)))
    for (table, _), answer in zip(known, registry.check_all([subject for _, subject in known]), strict=True):
        if isinstance(answer, Refused):
            tell(table, answer)
    return problems + registry.refused(new)


def _goes_on(mapping: TableMapping, known: PipelineState, table: SourceTable) -> bool:
    """Whether a stream goes on with all other tables where the registry refuses a schema of this one."""
    if table.oid not in known.completed:
        return False  # the snapshot that reads its rows ends
    pinned = known.tables[table.oid]
    try:
        pinned.check_forms(table)
    except Refused:
        return False  # a setting gives its key another form, with which no stream starts
    try:
        pinned.check_key(table)
    except Refused:
        return True  # it is taken up with its new key as soon as the registry lets it
    return mapping.policy(table) != "exit"
