"""Finds the tables that cannot be published or read as they are, before anything is changed for any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Refused, SchemaRefused
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision import kafka_checks
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.provision.publication_checks import check_publications
from airflow_bottledwater.provision.source_checks import check_tables
from airflow_bottledwater.state.identity import shared, via_root
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.schemas import check_published
from airflow_bottledwater.tables import new_rows
from airflow_bottledwater.tables.plan import PINNING, Step, Unfit

#: what checks tables by their topics; returns what is wrong
Check = Callable[[dict[str, SourceTable]], list[str]]


def unfit(
    connection: Connection,
    pipeline: Settings,
    cluster: Cluster,
    known: PipelineState,
    steps: Sequence[Step],
    tables: Mapping[int, SourceTable],
) -> dict[int, Unfit]:
    """Why the tables of some steps cannot be published or read, by oid.

    :param tables: as they are today, by oid.
    """
    found: dict[int, Unfit] = {}
    left = {step.topic: step for step in steps if step.do in PINNING}
    if not left:
        return found

    def by_topic() -> dict[str, SourceTable]:
        return {topic: tables[step.oid] for topic, step in left.items()}

    def leave_out(problems: Mapping[str, Sequence[str]]) -> None:
        for topic, of_table in problems.items():
            found[left.pop(topic).oid] = _unfit(of_table)

    each = ((topic, _not_now(connection, pipeline, known, table)) for topic, table in by_topic().items())
    leave_out({topic: [why] for topic, why in each if why})
    leave_out(_blame(_source(connection, pipeline, cluster, known), by_topic()))
    leave_out(_not_swept(pipeline, known, [topic for topic, step in left.items() if step.known]))
    leave_out(_blame(_kafka(pipeline, cluster, known), by_topic()))
    leave_out(_blame(_registry(pipeline, known), by_topic()))
    return found


def _unfit(problems: Sequence[str]) -> Unfit:
    what, _, remedy = " ".join(problems).partition(". ")
    return Unfit(f"cannot be followed: {what.rstrip('.')}", remedy)


def refused(error: BottledWaterError, *, lasts: bool = False) -> Unfit:
    """An error as the reason why a table cannot be followed now.

    :param lasts: see :class:`~airflow_bottledwater.tables.plan.Unfit`.
    :raises CredentialsRefused: the error is that, which is none of a table.
    """
    if isinstance(error, CredentialsRefused):
        raise error
    waits = "has to wait" if transient(error) else "cannot be followed"
    remedy = f"{error.remedy} It is tried again when the stream starts again.".strip() if lasts else error.remedy
    return Unfit(f"{waits}: {error.what.rstrip('.')}", remedy, lasts)


def _blame(check: Check, by_topic: dict[str, SourceTable]) -> dict[str, list[str]]:
    """By topic, the problems that a check has with a table: of all together, and if there are some, of one half after
    the other.

    :raises CredentialsRefused: no table is to blame.
    """
    if not by_topic:
        return {}
    try:
        problems = check(by_topic)
    except CredentialsRefused:
        raise
    except Refused as error:
        problems = [str(error)]
    if not problems or len(by_topic) == 1:
        return dict.fromkeys(by_topic, problems) if problems else {}
    each, half = list(by_topic.items()), len(by_topic) // 2
    return _blame(check, dict(each[:half])) | _blame(check, dict(each[half:]))


def _not_now(connection: Connection, pipeline: Settings, known: PipelineState, table: SourceTable) -> str:
    """Why a table cannot be taken in while the stream runs, and what can be done; empty if it can be."""
    if table.oid in known.tables:
        return ""
    if table.outbox:
        return (
            "it is an outbox, of which only rows are published that are inserted when it is followed. Stop the stream, "
            "and run create_slot again (or start the command again), which takes it in."
        )
    if table.keyed:
        return ""
    if not pipeline.allow_unkeyed:
        return f"{table.key_problem or 'it has no key'}. Give it a primary key, or leave it out."
    if table.partitioned or new_rows.too_large(connection, table):
        return str(new_rows.unread("partitioned" if table.partitioned else f"larger than {new_rows.LARGEST >> 20} MiB"))
    return ""


def _source(connection: Connection, pipeline: Settings, cluster: Cluster, known: PipelineState) -> Check:
    # thousands of tables may be in them
    there = publication.existing(connection, pipeline.publication_name)

    def check(by_topic: dict[str, SourceTable]) -> list[str]:
        found = Findings(cluster, adding=frozenset(table.oid for table in by_topic.values()), state=known)
        found.via_root = via_root(pipeline, known)
        problems = check_tables(connection, pipeline, found)
        if found.adding - {table.oid for table in found.tables}:
            return ["it was dropped"]
        return problems + check_publications(connection, pipeline, found, there)

    return check


def _not_swept(pipeline: Settings, known: PipelineState, topics: Sequence[str]) -> dict[str, list[str]]:
    """By topic, why it cannot be swept, as it has to be, and what can be done. Nobody is recorded as the owner of one
    that is made for a table that was renamed, which has no records."""
    if not (theirs := shared(pipeline, known, topics)):
        return {}
    kafka = Topics(pipeline.kafka)
    filled = kafka.filled({name: each.partitions for name, each in kafka.describe([*theirs]).items()})
    return {
        topic: [
            f"topic {topic!r} has to be swept, and is shared with {theirs[topic]}. Give the pipeline topics of its own: "
            "another topic_prefix, with a new slot and a snapshot."
        ]
        for topic in filled
    }


def _kafka(pipeline: Settings, cluster: Cluster, known: PipelineState) -> Check:
    return lambda by_topic: kafka_checks.check_topics(pipeline, cluster, known, by_topic)


def _registry(pipeline: Settings, known: PipelineState) -> Check:
    registry, mapping = Registry.of(pipeline), TableMapping.of(pipeline)
    if registry is None:
        return lambda _: []
    # also of a table whose name, and with it whose topic, another one has now
    owners = {pinned.topic: oid for oid, pinned in known.tables.items()}

    def check(by_topic: dict[str, SourceTable]) -> list[str]:
        subjects: list[tuple[str, str]] = []
        for topic, table in by_topic.items():
            try:
                subjects += mapping.subjects(topic, table)
                if topic in owners:
                    check_published(registry, pipeline, topic, table, known.versions(owners[topic]))
            except SchemaRefused as error:
                return [str(error)]
        return registry.refused(subjects)

    return check
