"""Preflight's checks of Kafka: topics, rights, owners of topics, transactions."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from confluent_kafka import Consumer, Producer

from airflow_bottledwater.encoding import names
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.clients import (
    GRANT,
    altering,
    errors,
    made,
    producer_config,
    reader_config,
    unknown_property,
)
from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.kafka.offsets import has_records
from airflow_bottledwater.kafka.producer import TransactionalProducer
from airflow_bottledwater.kafka.topics import DEFAULT_MAX_BYTES, TOMBSTONES, NewTopic, Topic, Topics
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster, of_source
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.provision.partition_checks import misplaced
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.identity import Owners, check_cluster, forgetting, topic_of, topic_problems
from airflow_bottledwater.state.outboxes import in_the_way
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import encode, id_prefix, id_prefixes, preflight_id

#: seconds for an answer of Kafka
_TIMEOUT = 15.0


def read_saved_state(pipeline: Settings, found: Findings) -> None:
    """Read the pipeline's state into ``found``, if there is one that may be read.

    :raises StateError: the state is another cluster's.
    :raises Refused: Kafka refuses a request.
    """
    state_topic = store.state_topic_name(found.cluster.database, pipeline.slot)
    if len(state_topic) > names.MAX_TOPIC_LENGTH:
        return  # check_kafka says so
    present = Topics(pipeline.kafka).describe([state_topic])
    if state_topic in present and present[state_topic].may_read:
        found.state = read_state(pipeline, state_topic)
        # the checks that follow mean nothing with another cluster's state
        check_cluster(found.state, found.cluster, pipeline.slot)


def check_kafka(pipeline: Settings, found: Findings, problems: list[str]) -> None:
    """Check topics and rights, to which pipeline the topics belong, and whether transactions work.

    :param found: receives warnings.
    :param problems: receives the problems as they are found, so that they are not lost if an error ends the checks.
    :raises Refused: Kafka refuses a request, so that the checks cannot go on.
    """
    topics = Topics(pipeline.kafka)
    replicas = topics.replicas(pipeline.replication_factor)
    check_properties(pipeline.kafka)
    state_topic = store.state_topic_name(found.cluster.database, pipeline.slot)
    memory = (state_topic, store.CONTROL_TOPIC)
    mapping = TableMapping.of(pipeline)
    data, outboxes = (
        {topic_of(table, found.state, mapping): table for table in found.tables if table.outbox == outbox}
        for outbox in (False, True)
    )
    named = mapping.named_topics
    service = (*mapping.service_topics, *named)
    wanted = list(dict.fromkeys([*data, *service, *memory]))
    problems += name_problems(mapping, data, outboxes, memory)
    problems += _collisions([*data, *service, *memory], topics.names())
    present = topics.describe([name for name in wanted if len(name) <= names.MAX_TOPIC_LENGTH])
    problems += [
        f"Kafka denies {right} on topic {name!r}. {GRANT}"
        for name, topic in present.items()
        for right, granted in (("Read", topic.may_read or name not in memory), ("Write", topic.may_write))
        if not granted
    ]
    problems += topic_problems(found.state, found.tables, mapping)
    problems += _missing(pipeline, topics, replicas, {name: data.get(name) for name in wanted if name not in present})
    if pipeline.create_topics and replicas < pipeline.replication_factor:
        found.warnings.append(
            f"Kafka has {replicas} broker{'s' if replicas > 1 else ''}: topics will have {replicas} "
            f"cop{'ies' if replicas > 1 else 'y'} instead of {pipeline.replication_factor}, and a lost disk loses data."
        )
    control = present.get(store.CONTROL_TOPIC)
    known_owners = control is None or control.may_read
    checked = known_owners and not found.adopts_topics
    ours, strange = _ours(pipeline, found.cluster, found.state, data, present, checked=checked)
    problems += strange
    problems += _as_they_are(pipeline, found.state, ours, present)
    limit = present[state_topic].max_bytes if state_topic in present else DEFAULT_MAX_BYTES
    problems += _definitions(pipeline, found.tables, state_topic, limit)
    if not pipeline.share_topics and control is not None and known_owners:
        problems += owners_problems(pipeline, found.cluster, found.state, [*data, *named])
    for prefix in id_prefixes(id_prefix(found.cluster, pipeline.slot), found.state.ids):
        problems += _transactions(pipeline, preflight_id(prefix))


def check_properties(kafka: Mapping[str, str]) -> None:
    """Check that every kind of client takes the user's properties: of a producer, preflight overrides some elsewhere,
    and a consumer is only made where there is something to read.

    :raises Refused: one does not take them.
    :raises Outage: Kafka does not answer.
    """
    made(Consumer, reader_config(kafka)).close()
    try:
        with errors(kafka):
            # properties of topics are only looked at when there is one
            made(Producer, producer_config(kafka)).list_topics(store.CONTROL_TOPIC, timeout=_TIMEOUT)
    except RuntimeError as error:
        raise unknown_property(str(error)) from None


def check_topics(
    pipeline: Settings, cluster: Cluster, known: PipelineState, by_topic: Mapping[str, SourceTable]
) -> list[str]:
    """The problems with the topics of tables that are to be followed by a pipeline that runs.

    :param known: the pipeline's state, as its stream has it.
    :param by_topic: the tables by their topics' names.
    :raises Refused: Kafka refuses a request.
    :raises Outage: Kafka does not answer.
    """
    topics = Topics(pipeline.kafka)
    mapping = TableMapping.of(pipeline)
    own = (*mapping.service_topics, *mapping.named_topics)
    state_topic = store.state_topic_name(cluster.database, pipeline.slot)
    problems = _names(by_topic, (*own, state_topic, store.CONTROL_TOPIC), state_topic)
    if mapping.message_routes or any(rule.outbox for rule in mapping.rules.values()):
        outboxes = {pinned.topic: pinned.table for pinned in known.tables.values() if pinned.table.outbox}
        problems += in_the_way(mapping, outboxes, list(by_topic))
    if too_long := [name for name in by_topic if len(name) > names.MAX_TOPIC_LENGTH]:
        return [names.length_problem(too_long[0])]
    problems += _collisions(list(by_topic), topics.names())
    present = topics.describe(list(by_topic))
    problems += [
        f"Kafka denies Write on topic {name!r}. {GRANT}" for name, topic in present.items() if not topic.may_write
    ]
    missing = {name: table for name, table in by_topic.items() if name not in present}
    problems += _missing(pipeline, topics, topics.replicas(pipeline.replication_factor), missing)
    ours, strange = _ours(pipeline, cluster, known, by_topic, present)
    problems += [*strange, *_as_they_are(pipeline, known, ours, present)]
    return problems + ([] if pipeline.share_topics else owners_problems(pipeline, cluster, known, list(by_topic)))


def name_problems(
    mapping: TableMapping, data: Mapping[str, SourceTable], outboxes: Mapping[str, SourceTable], memory: Sequence[str]
) -> list[str]:
    """Problems with the names of a pipeline's topics, of which each must be for one purpose.

    :param data: the tables by their topics, without ``outboxes``.
    :param memory: the state topic, and the shared one.
    """
    own = (*mapping.service_topics, *mapping.named_topics, *memory)
    problems = _names(data, own, memory[0]) + _named_twice(own, mapping.named_topics)
    return problems + in_the_way(mapping, outboxes, [*data, *own])


def _names(data: Mapping[str, SourceTable], own: Sequence[str], state_topic: str) -> list[str]:
    """Problems with the topics' names.

    :param own: the pipeline's service and state topics.
    """
    problems = [
        f"Table {data[name].qualified} would be published to {name!r}, which is one of the pipeline's own topics. Set "
        "a topic_prefix, or leave it out."
        for name in own
        if name in data
    ]
    if len(state_topic) > names.MAX_TOPIC_LENGTH:
        # a slot's name has no dot
        of_database = len(state_topic.rpartition(".")[0])
        way_out = (
            "Choose a shorter slot name."
            if of_database + 2 <= names.MAX_TOPIC_LENGTH
            else "The database's name alone is too long, since letters other than A-Z take several characters in it: "
            "rename the database."
        )
        problems.append(
            f"State topic {state_topic!r} is longer than Kafka's {names.MAX_TOPIC_LENGTH} characters. {way_out}"
        )
    return problems


def _named_twice(own: Sequence[str], named: Sequence[str]) -> list[str]:
    """Problems with the topics that the settings name, if they are among the pipeline's others.

    :param own: all that are no table's, with these.
    """
    return [
        f"Topic {name!r}, which the settings name, is also another one of the pipeline's own topics. Give it another "
        "name."
        for name in dict.fromkeys(named)
        if own.count(name) > 1
    ]


def _missing(pipeline: Settings, topics: Topics, replicas: int, missing: Mapping[str, SourceTable | None]) -> list[str]:
    """The missing topics that are not, or cannot be, created.

    :param missing: topic → the table whose rows it receives; None for a service or state topic.
    """
    if not pipeline.create_topics:
        return [f"Topic {name!r} does not exist and create_topics is off. Create it." for name in missing]
    asked = [
        store.new_topic(name, replicas) if _of_memory(name) else new_topic(pipeline, name, table, replicas)
        for name, table in missing.items()
    ]
    return [
        f"Kafka denies Create on topic {name!r}. {GRANT}"
        if "AUTHORIZATION" in why
        else f"Topic {name!r} cannot be created: {why}"
        for name, why in topics.uncreatable(asked).items()
    ]


def _as_they_are(
    pipeline: Settings, known: PipelineState, data: Mapping[str, SourceTable], present: Mapping[str, Topic]
) -> list[str]:
    """The problems with the topics of tables, and with the others that exist, as they are."""
    keyed = [name for name, table in data.items() if table.keyed]
    problems = [str(problem) for problem in expiring(pipeline, keyed, present)]
    problems += _policies(pipeline, data, present)
    problems += _partitions(TableMapping.of(pipeline), data, present)
    return problems + misplaced(pipeline, known, data, present)


def _ours(
    pipeline: Settings,
    cluster: Cluster,
    known: PipelineState,
    data: Mapping[str, SourceTable],
    present: Mapping[str, Topic],
    *,
    checked: bool = True,
) -> tuple[dict[str, SourceTable], list[str]]:
    """The tables without those whose topics have records of other programs, and the problems with what the topics have.
    Of those that are left out, nothing else is to be said: what would mend them would harm these programs.

    :param checked: whether it is checked whose records they are.
    """
    unread = {name: table for name, table in data.items() if table.oid not in {*known.boundaries, *known.completed}}
    filled = Topics(pipeline.kafka).filled({name: present[name].partitions for name in unread if name in present})
    if pipeline.share_topics:
        return dict(data), []
    new = {name: data[name] for name in sorted(filled) if data[name].oid not in known.tables}
    unkeyed = {name: table for name, table in new.items() if not table.keyed and not pipeline.skip_snapshot}
    doubled = _doubled(pipeline, unkeyed, present) if checked else {}
    keyed = {name: table for name, table in new.items() if name not in unkeyed}
    foreign = _foreign(pipeline, cluster, keyed) if checked else {}
    swept = [] if pipeline.skip_snapshot else [name for name in sorted(filled - foreign.keys()) if data[name].keyed]
    problems = [
        f"Kafka denies Read on topic {name!r}, which has records: behind the snapshot of {data[name].qualified}, those "
        f"of rows that it does not have any more are removed. {GRANT}"
        for name in swept
        if not present[name].may_read
    ]
    left = {name: table for name, table in data.items() if name not in foreign.keys() | doubled.keys()}
    return left, [*foreign.values(), *doubled.values(), *problems]


def _doubled(pipeline: Settings, filled: Mapping[str, SourceTable], present: Mapping[str, Topic]) -> dict[str, str]:
    """The topics among those of tables without a key that have records, to which a snapshot would add rows that they
    have already, and what is said of each.

    :param filled: the tables whose rows are to be read, by topics in which something is: it may be no record.
    """
    found = {}
    ends = Topics(pipeline.kafka).all_ends({name: present[name].partitions for name in filled}) if filled else {}
    for name, table in filled.items():
        if not present[name].may_read:
            found[name] = (
                f"Kafka denies Read on topic {name!r}: {table.qualified} has no key, and is only read into a topic "
                f"without records. {GRANT}"
            )
        elif has_records(pipeline.kafka, name, ends[name]):
            found[name] = (
                f"Topic {name!r} has records, and {table.qualified} has no key: a snapshot would publish all of its "
                "rows, and nothing would tell them from those that the topic has already. Delete the topic, or take "
                "another topic_prefix; or set skip_snapshot, which publishes only what is changed from now on."
            )
    return found


def _foreign(pipeline: Settings, cluster: Cluster, filled: Mapping[str, SourceTable]) -> dict[str, str]:
    """The topics that have records which no pipeline is known to have published, or whose pipeline shared them with
    other programs, and what is said of each: nobody being recorded as its owner is no proof that a topic is this
    pipeline's, whose snapshot would delete what is not its table's.

    :param filled: the tables that are to be published by topics that have records.
    """
    owners = Owners(control_topic.read(pipeline.kafka) if filled else {})
    found = {}
    for name, table in filled.items():
        last = owners.last(name)
        # what belongs to another pipeline is refused by itself
        if (last is not None and not last.shared) or {*owners.names(name)} - {cluster.pipeline(pipeline.slot)}:
            continue
        whose, lost = (
            "no pipeline is known to have published them",
            f"records in topic {store.CONTROL_TOPIC!r} were lost",
        )
        if last is not None:
            whose = f"pipeline {last.pipeline!r} has shared it with other programs (share_topics)"
            lost = "topic no other program writes to"
        found[name] = (
            f"Topic {name!r} has records, and {whose}: a snapshot of {table.qualified} would delete all keys from it "
            "that the table does not have. Give the table another topic (topic of table_options), or the pipeline "
            "another topic_prefix; or set share_topics, if other programs are to write to it as well: then nothing is "
            f"deleted from it. If they are this table's rows, published by a pipeline whose {lost}, delete topic "
            f"{name!r}: the snapshot publishes the rows again."
        )
    return found


def _policies(pipeline: Settings, data: Mapping[str, SourceTable], present: Mapping[str, Topic]) -> list[str]:
    """The topics that would not keep rows that do not change, and those that do not take records without a key."""
    problems = []
    for name, table in data.items():
        topic = present.get(name)
        config = {} if topic else new_topic(pipeline, name, table, 1).configs[0]
        policy = topic.cleanup if topic else config["cleanup.policy"]
        expires = topic is None and "delete" in policy and config.get("retention.ms") != "-1"
        if table.keyed and expires and not pipeline.allow_expiry:
            problems.append(str(_forgets_rows(pipeline, name, policy, exists=False)))
        if not table.keyed and "compact" in policy:
            problems.append(
                f"Topic {name!r} {'is' if topic else 'would be'} compacted, but {table.qualified} has no key: Kafka "
                "refuses records without one. Set "
                f"cleanup.policy=delete{'' if topic else ' in topic_config, or leave it out there'}."
            )
    return problems


def _partitions(mapping: TableMapping, data: Mapping[str, SourceTable], present: Mapping[str, Topic]) -> list[str]:
    """The topics that have another number of partitions than their tables' options say."""
    return [
        f"Topic {name!r} has {present[name].partitions} partitions, and table_options say {asked} for "
        f"{table.qualified}. Set that number; a key keeps its partition only while the number stays."
        for name, table in data.items()
        if name in present
        and (asked := mapping.options(table.schema, table.name).partitions)
        and asked != present[name].partitions
    ]


def expiring(pipeline: Settings, keyed: Collection[str], present: Mapping[str, Topic]) -> list[Problem]:
    """The topics that would delete what has to stay until it is superseded or settled: rows that do not change, the
    events that supersede rows, dead letters, and the saved state.

    :param keyed: the topics of tables with a key.
    :param present: the topics as they are, at a start or while the pipeline runs.
    """
    mapping = TableMapping.of(pipeline)
    events, letters = mapping.service_topics
    found = [
        problem
        for name, topic in present.items()
        if _of_memory(name) and (problem := store.unfit(pipeline.kafka, topic))
    ]
    topic = present.get(letters)
    if topic is not None and topic.expires and (mapping.writes_letters() or pipeline.skip_position):
        found.append(_forgets(pipeline, topic, "dead letters would expire before anybody has settled them."))
    if pipeline.allow_expiry:
        return found
    found += [
        _forgets_rows(pipeline, name, present[name].cleanup)
        for name in keyed
        if name in present and present[name].expires
    ]
    topic = present.get(events)
    if topic is not None and topic.expires and keyed and pipeline.on_truncate == "event":
        found.append(
            _forgets(
                pipeline,
                topic,
                "the event of a TRUNCATE would expire before the rows that it deletes, which have no tombstones: who "
                "reads their topics later would take them for rows of today.",
                "retention.ms=-1,retention.bytes=-1",
                ", or set allow_expiry if that is meant",
            )
        )
    return found


def _forgets(
    pipeline: Settings, topic: Topic, what: str, mended: str = "cleanup.policy=compact", otherwise: str = ""
) -> Problem:
    return Problem(
        "expiry",
        f"Topic {topic.name!r}",
        f"Has cleanup.policy={topic.cleanup} with a retention: {what}",
        f"Set it: {altering(pipeline.kafka, topic.name, mended)}{otherwise}",
    )


def _forgets_rows(pipeline: Settings, name: str, policy: str, *, exists: bool = True) -> Problem:
    """What is said of a keyed table's topic that deletes rows that do not change."""
    way_out = (
        f"Set it ({altering(pipeline.kafka, name, 'cleanup.policy=compact')})"
        if exists
        else "Leave cleanup.policy out of topic_config"
    )
    return Problem(
        "expiry",
        f"Topic {name!r}",
        f"{'Has' if exists else 'Would get'} cleanup.policy={policy} with a retention: rows that do not change would "
        "be deleted from it.",
        f"{way_out}, or set allow_expiry if that is meant.",
    )


def _definitions(pipeline: Settings, tables: Sequence[SourceTable], state_topic: str, limit: int) -> list[str]:
    """Check that the tables' definitions fit into the state topic, compressed as they are sent.

    :param limit: its max.message.bytes.
    """
    problems = []
    for table in tables:
        record = store.encode(encode(PinnedTable(table, "", "", 1, 0, 0, 0))) or b""
        # lz4, which sends it, compresses less than zlib
        if len(record) <= limit or 2 * (size := len(zlib.compress(record, 1))) <= limit:
            continue
        problems.append(
            f"The definition of {table.qualified} ({len(table.columns)} columns, with their comments; about "
            f"{2 * size:,} bytes compressed) does not fit into state topic {state_topic!r} (max.message.bytes "
            f"{limit:,}). Create the topic with a larger one "
            f"({altering(pipeline.kafka, state_topic, f'max.message.bytes={4 * size}')}), shorten the comments, or "
            "leave the table out."
        )
    return problems


def new_topic(pipeline: Settings, name: str, table: SourceTable | None, replication: int) -> NewTopic:
    """A data or service topic to create. One that deletes by time counts from when a record was appended: by the time
    of its commit, the changes of a stream that was stopped for longer would be deleted at once.

    :param table: the table whose rows it receives; None for a service topic.
    """
    events, letters = TableMapping.of(pipeline).service_topics
    if name == letters:
        # compacted: what is settled goes, and what is not stays however long that takes
        return store.new_topic(name, replication)
    safe = {"min.insync.replicas": "2"} if replication >= 3 else {}
    # the event of a TRUNCATE deletes rows, and has to stay as long as they do
    retention = -1 if name == events else pipeline.unkeyed_retention_ms
    unkeyed = {"cleanup.policy": "delete", "retention.ms": str(retention)}
    policy = {"cleanup.policy": "compact"} if table is not None and table.keyed else unkeyed
    options = None if table is None else TableMapping.of(pipeline).options_of(table)
    own = {**policy, **({} if options is None else {**pipeline.topic_config, **options.topic_config})}
    partitions = 1 if options is None else options.partitions or pipeline.partitions
    wished = dict(TOMBSTONES) if "compact" in own["cleanup.policy"] else {}
    if "delete" in own["cleanup.policy"] and own.get("retention.ms") != "-1":
        # whoever publishes sees the topic as it is, and sends no commit time as timestamp
        wished["message.timestamp.type"] = "LogAppendTime"
    # a broker that does not allow one of those that are not asked for does no harm; one that has min.insync.replicas
    # to itself has its own
    configs: list[dict[str, str]] = []
    for more in ({**wished, **safe}, safe, wished, {}):
        if (config := {**more, **own}) not in configs:
            configs.append(config)
    return NewTopic(name, partitions, replication, tuple(configs))


def _of_memory(name: str) -> bool:
    """Whether a topic is a state topic, or the shared one: these have no prefix."""
    return name == store.CONTROL_TOPIC or name.startswith(f"{store.CONTROL_TOPIC}.")


def _collisions(wanted: Sequence[str], present: Sequence[str]) -> list[str]:
    """Topics whose names collide with that of another one, so that Kafka refuses to create them
    (Topic.hasCollision)."""
    known: dict[str, str] = {}
    problems = []
    for name in [*present, *wanted]:
        other = known.setdefault(name.replace(".", "_"), name)
        if other != name:
            way_out = (
                "Choose another slot name."
                if _of_memory(name)
                else "Use another topic_prefix, or another pipeline with a prefix of its own for one of them."
            )
            problems.append(
                f"Topic {name!r} collides with topic {other!r}: Kafka does not distinguish dots from underscores. "
                + way_out
            )
    return problems


def owners_problems(pipeline: Settings, cluster: Cluster, known: PipelineState, topics: Iterable[str]) -> list[str]:
    """Topics that another pipeline owns: the pipeline whose record has the lowest offset in the shared state topic.

    :param known: the pipeline's state: what it publishes to already was checked when that began. If the shared topic
        has lost its records, another one may be the first to be recorded again.
    """
    mine = cluster.pipeline(pipeline.slot)
    owners = Owners(control_topic.read(pipeline.kafka))
    problems = []
    followed = {pinned.topic for pinned in known.tables.values()}
    for topic in (each for each in topics if each not in followed):
        owner = next(iter(owners.names(topic)), mine)
        if owner != mine:
            # a sweep needs topics that are not shared: those of a source that was moved are not to become so
            use = "Use" if of_source(owner, mine) else f"{forgetting(owner)} If it is not, use"
            problems.append(
                f"Topic {topic!r} belongs to pipeline {owner!r}. {use} another topic_prefix, or set share_topics if "
                "both may write to it."
            )
    return problems


def _transactions(pipeline: Settings, transactional_id: str) -> list[str]:
    """Check that this principal may use transactions.

    :param transactional_id: one that is used for nothing else, since whoever uses it is fenced.
    """
    attempts = 0

    def waiting(what: str | BaseException) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 30:
            raise Refused(f"Kafka transactions cannot be used: {what}")

    probe = TransactionalProducer(
        pipeline.kafka,
        transactional_id,
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
