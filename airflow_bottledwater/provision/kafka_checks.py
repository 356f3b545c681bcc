"""What preflight asks Kafka: topics, rights, owners of topics, transactions."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.encoding import names
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.clients import GRANT
from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.kafka.producer import TransactionalProducer
from airflow_bottledwater.kafka.topics import NewTopic, Topics
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.identity import check_cluster, topic_problems


def check_kafka(pipeline: Pipeline, found: Findings, problems: list[str]) -> None:
    topics = Topics(pipeline.kafka)
    brokers = topics.brokers()
    facts = store.facts_topic(found.cluster.database, pipeline.slot)
    service = [names.service_topic(kind, pipeline.topic_prefix) for kind in ("events", "dead_letters")]
    data = {names.topic(t.schema, t.name, pipeline.topic_prefix): t for t in found.tables}
    wanted = [*data, *service, facts, store.CONTROL_TOPIC]
    if len(facts) > names.MAX_TOPIC_LENGTH:
        problems.append(
            f"State topic {facts!r} is longer than Kafka's {names.MAX_TOPIC_LENGTH} characters. Choose a shorter slot name."
        )
    problems += [
        f"Table {data[name].qualified} would be published to {name!r}, which is one of the pipeline's own topics. Set a topic_prefix, or leave it out."
        for name in wanted[len(data) :]
        if name in data
    ]
    problems += _collisions(wanted, topics.names())
    present = topics.describe([name for name in dict.fromkeys(wanted) if len(name) <= names.MAX_TOPIC_LENGTH])
    memory = (facts, store.CONTROL_TOPIC)
    problems += [problem for name in memory if name in present and (problem := store.unfit(present[name]))]
    problems += [
        f"Kafka denies {right} on topic {name!r}. {GRANT}"
        for name, topic in present.items()
        for right, granted in (("Read", topic.may_read or name not in memory), ("Write", topic.may_write))
        if not granted
    ]
    readable = [name for name in memory if name in present and present[name].may_read]
    if facts in readable:
        found.state = read_state(pipeline, facts)
        # nothing of what follows means anything with another cluster's state
        check_cluster(found.state, found.cluster, facts)
        problems += topic_problems(found.state, found.tables, pipeline.topic_prefix)
    missing = [name for name in dict.fromkeys(wanted) if name not in present]
    if not pipeline.create_topics:
        problems += [f"Topic {name!r} does not exist and create_topics is off. Create it." for name in missing]
    elif brokers < pipeline.replication_factor:
        found.warnings.append(
            f"Kafka has {brokers} broker{'s' if brokers > 1 else ''}: topics will have {brokers} cop{'ies' if brokers > 1 else 'y'} instead of {pipeline.replication_factor}, and a lost disk loses data."
        )
    if pipeline.create_topics and missing:
        replication = min(pipeline.replication_factor, brokers)
        asked = [
            store.new_topic(name, replication)
            if name in memory
            else new_topic(pipeline, name, data.get(name), replication)
            for name in missing
        ]
        problems += [
            f"Kafka denies Create on topic {name!r}. {GRANT}"
            if "AUTHORIZATION" in why
            else f"Topic {name!r} cannot be created: {why}"
            for name, why in topics.uncreatable(asked).items()
        ]
    for name, table in data.items():
        if (
            name in present
            and table.keyed
            and "delete" in present[name].cleanup
            and "compact" not in present[name].cleanup
        ):
            found.warnings.append(
                f"Topic {name!r} has cleanup.policy=delete: rows that do not change will expire from it. Set cleanup.policy=compact."
            )
        if name in present and not table.keyed and "compact" in present[name].cleanup:
            problems.append(
                f"Topic {name!r} is compacted, but {table.qualified} has no key: Kafka refuses records without one. Set cleanup.policy=delete."
            )
    if not pipeline.share_topics and store.CONTROL_TOPIC in readable:
        problems += owners_problems(pipeline, found.cluster, list(data))
    problems += _transactions(pipeline)


def new_topic(pipeline: Pipeline, name: str, table: Table | None, replication: int) -> NewTopic:
    """A data or service topic to create.

    :param table: whose rows it takes; None for a service topic.
    """
    safe = {"min.insync.replicas": "2"} if replication >= 3 else {}
    forever = {"cleanup.policy": "delete", "retention.ms": str(pipeline.unkeyed_retention_ms)}
    if table is None:
        return NewTopic(name, 1, replication, ({**safe, **forever},))
    policy = {"cleanup.policy": "compact"} if table.keyed else forever
    return NewTopic(name, pipeline.partitions, replication, ({**safe, **policy, **pipeline.topic_config},))


def _collisions(wanted: Sequence[str], present: Sequence[str]) -> list[str]:
    """Topics that Kafka refuses to create because of another one (Topic.hasCollision)."""
    known: dict[str, str] = {}
    problems = []
    for name in [*present, *wanted]:
        other = known.setdefault(name.replace(".", "_"), name)
        if other != name:
            problems.append(
                f"Topic {name!r} collides with topic {other!r}: Kafka does not distinguish dots from underscores. Use another topic_prefix, "
                "or another pipeline with a prefix of its own for one of them."
            )
    return problems


def owners_problems(pipeline: Pipeline, cluster: Cluster, topics: Sequence[str]) -> list[str]:
    """Topics that another pipeline owns: of two, the one with the lower offset in the shared topic."""
    mine = cluster.pipeline(pipeline.slot)
    facts = store.read_facts(pipeline.kafka, store.CONTROL_TOPIC, committed=False)
    problems = []
    for topic in topics:
        # facts come in the order of their offsets; clocks of two hosts would not do
        owner = next((value for key, value in facts.items() if key.startswith(f"owner/{topic}/")), None)
        if owner is not None and owner["pipeline"] != mine:
            problems.append(
                f"Topic {topic!r} belongs to pipeline {owner['pipeline']!r}. Use another topic_prefix, or set share_topics if both may write to it."
            )
    return problems


def _transactions(pipeline: Pipeline) -> list[str]:
    """Whether this principal may use transactions: tried with an id of its own, never one that is at work."""
    attempts = 0

    def waiting(what: str | BaseException) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 30:
            raise Refused(f"Kafka transactions cannot be used: {what}")

    probe = TransactionalProducer(
        pipeline.kafka,
        f"bottledwater-preflight-{pipeline.slot}",
        [],
        transaction_timeout=pipeline.transaction_timeout,
        waiting=waiting,
    )
    try:
        probe.open()
    except (Refused, NewProducerNeeded) as error:
        return [str(error)]
    finally:
        probe.close()
    return []
