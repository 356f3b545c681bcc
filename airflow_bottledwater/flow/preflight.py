"""Preflight: everything that can be known to go wrong, said before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_bottledwater.encoding import avro, names
from airflow_bottledwater.errors import BottledWaterError, PreflightError, Refused, SlotError, SlotInUse, StateError
from airflow_bottledwater.flow import coverage
from airflow_bottledwater.flow import facts as f
from airflow_bottledwater.flow.claim import read_state
from airflow_bottledwater.flow.identity import check_cluster, topic_problems
from airflow_bottledwater.kafka import state
from airflow_bottledwater.kafka.publisher import NewProducerNeeded, Publisher
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import GRANT, NewTopic, Topics
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.postgres import catalog, publication, slot
from airflow_bottledwater.postgres.connect import Connection, connect, identify, session
from airflow_bottledwater.settings import Pipeline

log = logging.getLogger(__name__)

OLDEST_VERSION = 140000


@dataclass(slots=True)
class Findings:
    """What preflight saw.

    :param tables: the tables of the pipeline.
    :param warnings: what works, but should be known.
    """

    cluster: Cluster
    tables: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    state: f.State = field(default_factory=f.State)


def run(pipeline: Pipeline) -> Findings:
    """Check source, broker and registry; changes nothing.

    :raises PreflightError: with every problem that was found.
    :raises SlotInUse: the slot is still being created.
    :raises Outage: a server is away.
    """
    problems: list[str] = []
    with session(pipeline.postgres, "Preflight") as connection:
        cluster = identify(connection)
        found = Findings(cluster)
        if cluster.version < OLDEST_VERSION:
            raise PreflightError(
                [f"PostgreSQL {cluster.version // 10000} is too old: 14 is the oldest that can be read in ctid ranges."]
            )
        problems += _server(connection, found)
        if _standby(connection):
            # much of what follows cannot be asked there
            raise PreflightError(["The source is a standby. Connect to the primary.", *problems])
        problems += _tables(connection, pipeline, found)
        try:
            _kafka(pipeline, found, problems)
        except StateError as error:
            raise PreflightError([*problems, str(error)]) from None
        except Refused as error:
            problems.append(str(error))
        # with a slot of ours in the state, the check of slots and publications is about that one
        problems += _slot(connection, pipeline, found)
        problems += _publications(connection, pipeline, found)
        try:
            coverage.check(connection, pipeline, found.state)
        except StateError as error:
            problems.append(str(error))
    problems += _replication(pipeline)
    problems += _registry(pipeline, found.tables)
    if problems:
        raise PreflightError(list(dict.fromkeys(problems)))
    for warning in found.warnings:
        log.warning("%s", warning)
    return found


def _setting(connection: Connection, name: str) -> str:
    row = connection.execute("SELECT setting FROM pg_settings WHERE name = %s", (name,)).fetchone()
    return row[0] if row else ""


def _standby(connection: Connection) -> bool:
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def _server(connection: Connection, found: Findings) -> list[str]:
    problems = []
    if _setting(connection, "wal_level") != "logical":
        problems.append(
            "wal_level is "
            + _setting(connection, "wal_level")
            + ": set wal_level = logical and restart PostgreSQL (rds.logical_replication = 1 on RDS, cloudsql.logical_decoding = on)."
        )
    if _setting(connection, "server_encoding") == "SQL_ASCII":
        problems.append(
            f"Database {found.cluster.database!r} has the encoding SQL_ASCII: what the bytes of its texts mean is not known, and records are "
            "UTF-8. Copy it into a database with an encoding (pg_dump, then createdb --encoding)."
        )
    row = connection.execute(
        "SELECT rolsuper OR rolreplication OR pg_has_role(current_user, oid, 'usage') AND rolname LIKE 'rds_replication', rolname FROM pg_roles"
        " WHERE rolname = current_user"
    ).fetchone()
    managed = connection.execute(
        "SELECT count(*) FROM pg_roles WHERE rolname IN ('rds_replication', 'rds_superuser') AND pg_has_role(current_user, oid, 'member')"
    ).fetchone()
    if row and not row[0] and not (managed and managed[0]):
        problems.append(f"Role {row[1]!r} may not replicate: ALTER ROLE … REPLICATION (GRANT rds_replication on RDS).")
    if _setting(connection, "max_slot_wal_keep_size") == "-1":
        found.warnings.append(
            "max_slot_wal_keep_size is unlimited: while the stream is stopped, its slot keeps WAL without bound and can fill the "
            "server's disk. Watch the slot's lag (ReplicationSlotLagSensor), or set a limit, beyond which the slot is lost."
        )
    return problems


def _tables(connection: Connection, pipeline: Pipeline, found: Findings) -> list[str]:
    problems: list[str] = []
    try:
        oids = catalog.resolve(connection, pipeline.tables, pipeline.schemas)
    except PreflightError as error:
        return list(error.problems)
    found.tables = catalog.load(connection, oids, forms=pipeline.forms)
    for table in found.tables:
        if not table.keyed and not pipeline.allow_unkeyed:
            problems.append(
                f"Table {table.qualified} cannot be keyed: {table.key_problem}. Give it a primary key, leave it out, or set "
                "allow_unkeyed (its messages then have no key, and updates and deletes are not sent)."
            )
        if pipeline.output_format == "avro":
            try:
                avro.value_schema(table)
            except Refused as error:
                problems.append(str(error))
    problems += [
        f"SELECT on {name} is not granted (or USAGE on its schema). GRANT SELECT ON {name} TO the role of the connection."
        for name in catalog.unselectable(connection, found.tables)
    ]
    problems += [
        f"Table {name} has a row-level policy that would hide rows from this role. Use a role with BYPASSRLS, or leave it out."
        for name in catalog.filtered_by_policy(connection, found.tables)
    ]
    problems += [
        f"Column {column!r} of table {name} is made of type {kind}, which has no binary send function: PostgreSQL's stream would end at "
        "its first row. Give the type one (ALTER TYPE … SET (SEND = …)), change the column's type, or leave the table out."
        for name, column, kind in catalog.unsendable(connection, found.tables)
    ]
    by_topic: dict[str, Table] = {}
    for table in found.tables:
        topic = names.topic(table.schema, table.name, pipeline.topic_prefix)
        other = by_topic.setdefault(topic, table)
        if other is not table:
            problems.append(
                f"Tables {other.qualified} and {table.qualified} both become topic {topic!r}. Rename one, or leave it out."
            )
        if len(topic) > names.MAX_TOPIC_LENGTH:
            problems.append(
                f"Topic {topic!r} is longer than Kafka's {names.MAX_TOPIC_LENGTH} characters. Shorten topic_prefix."
            )
    problems += _locks(connection, found.tables)
    return problems


def _locks(connection: Connection, tables: Sequence[Table]) -> list[str]:
    """The holder locks every table in one transaction; the lock table is sized by max_locks_per_transaction."""
    size = int(_setting(connection, "max_locks_per_transaction")) * (
        int(_setting(connection, "max_connections")) + int(_setting(connection, "max_prepared_transactions"))
    )
    # reading a table locks its indexes too
    row = connection.execute(
        "SELECT count(*) FROM pg_index WHERE indrelid = ANY (%s::oid[])", ([t.oid for t in tables],)
    ).fetchone()
    needed = len(tables) + (row[0] if row else 0)
    if needed > size * 0.9:
        return [
            f"The snapshot locks {needed} tables and indexes at once, but the lock table has room for {size} (max_locks_per_transaction x "
            f"(max_connections + max_prepared_transactions)). Raise max_locks_per_transaction to at least {needed * 2 * int(_setting(connection, 'max_locks_per_transaction')) // size + 1}, "
            "or make several pipelines."
        ]
    return []


def _slot(connection: Connection, pipeline: Pipeline, found: Findings) -> list[str]:
    present = slot.state(connection, pipeline.slot)
    record = found.state.slot
    intent = found.state.facts.get(f.INTENT)
    if present is None:
        used = connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone()
        walsenders = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'"
        ).fetchone()
        problems = []
        if used and used[0] >= int(_setting(connection, "max_replication_slots")):
            problems.append(
                f"All {used[0]} replication slots are in use. Raise max_replication_slots, or drop one that nobody needs."
            )
        if walsenders and walsenders[0] >= int(_setting(connection, "max_wal_senders")):
            problems.append(f"All {walsenders[0]} walsenders are in use. Raise max_wal_senders.")
        if record is not None:
            problems.append(
                f"Slot {pipeline.slot!r} is gone, but its state says that it was at {found.state.position or 'its start'}: changes since "
                "then are lost. 'bottledwater drop-slot --when always' forgets it; then start again with a snapshot."
            )
        return problems
    try:
        slot.check(present, found.cluster.database)
    except SlotInUse:
        raise  # it passes by waiting
    except SlotError as error:
        return [str(error)]
    if record is None and intent is None:
        if not pipeline.adopt_slot:
            return [
                f"Slot {pipeline.slot!r} exists, but our records do not name it: what it has already given away is unknown. Choose another "
                "slot name, drop it, or set adopt_slot (a snapshot follows). Were its records lost while the topics were not: see "
                "--assume-snapshot-complete."
            ]
        if present.active_pid is not None:
            return [f"Slot {pipeline.slot!r} is in use by process {present.active_pid}. Stop its client first."]
    return []


def _publications(connection: Connection, pipeline: Pipeline, found: Findings) -> list[str]:
    problems: list[str] = []
    intent = found.state.facts.get(f.INTENT, {})
    covered: set[int] = set()
    mine = {t.oid for t in found.tables} | set(found.state.tables)
    missing = []
    for name in publication.names(pipeline.publication_name):
        present = publication.read(connection, name)
        if present is None:
            missing.append(name)
            continue
        covered |= set(present.tables)
        problems += publication.problems(present, found.tables)
        besides = catalog.load(connection, [oid for oid in present.tables if oid not in mine])
        if present.all_tables:
            keyless = [t for t in catalog.load(connection, list(present.tables)) if not t.identifiable]
            if keyless and (present.updates or present.deletes):
                problems.append(
                    f"Publication {name!r} is FOR ALL TABLES, and {', '.join(t.qualified for t in keyless[:5])} have no key: UPDATE and DELETE "
                    "on them fail for the application. Publish a list of tables."
                )
            else:
                found.warnings.append(
                    f"Publication {name!r} is FOR ALL TABLES: UPDATE and DELETE would fail on a table that is made without a key."
                )
        problems += publication.others_problems(present, besides)
        if pipeline.create_publication and intent.get("publication") != pipeline.publication_name:
            problems.append(
                f"Publication {name!r} exists and is not ours. Choose another name (publication), or set create_publication to false to use it."
            )
    if not pipeline.create_publication:
        if missing:
            problems.append(
                f"Publication {missing[0]!r} does not exist and create_publication is off. Both are needed, the second may be empty: "
                + "; ".join(publication.statements(pipeline.publication_name, found.tables))
            )
        else:
            problems += [
                f"Table {t.qualified} is not in publication {pipeline.publication_name!r}. Add it, or leave it out."
                for t in found.tables
                if t.oid not in covered
            ]
            found.warnings += _left_out(connection, pipeline, found.tables)
    else:
        row = connection.execute("SELECT has_database_privilege(current_database(), 'CREATE')").fetchone()
        owned = connection.execute(
            "SELECT c.oid FROM pg_class c WHERE c.oid = ANY (%s::oid[]) AND NOT pg_has_role(c.relowner, 'USAGE')",
            ([t.oid for t in found.tables],),
        ).fetchall()
        if missing and row and not row[0]:
            problems.append(
                "This role may not make publications (no CREATE on the database). Let a DBA make them and set create_publication to false: "
                + "; ".join(publication.statements(pipeline.publication_name, found.tables))
            )
        elif others := {oid for (oid,) in owned if missing or oid not in covered}:
            problems.append(
                "Only its owner may publish a table, and this role does not own "
                + ", ".join(t.qualified for t in found.tables if t.oid in others)
                + ". Let the owner make the publications and set create_publication to false: "
                + "; ".join(publication.statements(pipeline.publication_name, found.tables))
            )
    return problems


def _left_out(connection: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> list[str]:
    """What happens to a table and is not published: pgoutput sends what any of its publications sends."""
    both = [
        p
        for name in publication.names(pipeline.publication_name)
        if (p := publication.read(connection, name)) is not None
    ]
    warnings = []
    for table in tables:
        of = [p for p in both if table.oid in p.tables]
        sent = {
            "insert": any(p.inserts for p in of),
            "update": any(p.updates for p in of) or not table.identifiable,
            "delete": any(p.deletes for p in of) or not table.keyed,
            "truncate": any(p.truncates for p in of),
        }
        if of and not all(sent.values()):
            warnings.append(
                f"Publication {of[0].name!r} does not send {', '.join(k for k, v in sent.items() if not v)} of {table.qualified}: its topic "
                "will differ from the table. ALTER PUBLICATION … SET (publish = …)."
            )
    return warnings


def _kafka(pipeline: Pipeline, found: Findings, problems: list[str]) -> None:
    topics = Topics(pipeline.kafka)
    brokers = topics.brokers()
    facts = state.facts_topic(found.cluster.database, pipeline.slot)
    service = [names.service_topic(kind, pipeline.topic_prefix) for kind in ("events", "dead_letters")]
    data = {names.topic(t.schema, t.name, pipeline.topic_prefix): t for t in found.tables}
    wanted = [*data, *service, facts, state.CONTROL_TOPIC]
    if len(facts) > names.MAX_TOPIC_LENGTH:
        problems.append(
            f"State topic {facts!r} is longer than Kafka's {names.MAX_TOPIC_LENGTH} characters. Choose a shorter slot name."
        )
    problems += [
        f"Table {data[name].qualified} would become {name!r}, which is one of our own topics. Set a topic_prefix, or leave it out."
        for name in wanted[len(data) :]
        if name in data
    ]
    problems += _collisions(wanted, topics.names())
    present = topics.describe([name for name in dict.fromkeys(wanted) if len(name) <= names.MAX_TOPIC_LENGTH])
    memory = (facts, state.CONTROL_TOPIC)
    problems += [problem for name in memory if name in present and (problem := state.unfit(present[name]))]
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
            state.new_topic(name, replication)
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
                f"Topic {name!r} has cleanup.policy=delete: rows that do not change will expire from it. Set compact."
            )
        if name in present and not table.keyed and "compact" in present[name].cleanup:
            problems.append(
                f"Topic {name!r} is compacted, but {table.qualified} has no key: Kafka refuses records without one. Set cleanup.policy=delete."
            )
    if not pipeline.share_topics and state.CONTROL_TOPIC in readable:
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
                f"Topic {name!r} collides with topic {other!r}: Kafka does not tell dots from underscores. Use another topic_prefix, "
                "or another pipeline with a prefix of its own for one of them."
            )
    return problems


def pipeline_name(cluster: Cluster, slot_name: str) -> str:
    """What names a pipeline in the shared topic."""
    return f"{cluster.system_identifier}/{cluster.database}/{slot_name}"


def owners_problems(pipeline: Pipeline, cluster: Cluster, topics: Sequence[str]) -> list[str]:
    """Topics that another pipeline owns: of two, the one with the lower offset in the shared topic."""
    mine = pipeline_name(cluster, pipeline.slot)
    facts = state.read_facts(pipeline.kafka, state.CONTROL_TOPIC, committed=False)
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
            raise Refused(f"Kafka transactions do not work: {what}")

    probe = Publisher(
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


def _replication(pipeline: Pipeline) -> list[str]:
    try:
        connection = connect(pipeline.postgres, replication=True, application="bottledwater preflight")
    except Refused as error:
        return [f"A replication connection is refused: {error}"]
    try:
        connection.execute("IDENTIFY_SYSTEM")
    finally:
        connection.close()
    return []


def _registry(pipeline: Pipeline, tables: Sequence[Table]) -> list[str]:
    if pipeline.output_format != "avro":
        return []
    problems = []
    registry = Registry(pipeline.registry)
    registry.ping()
    for table in tables:
        topic = names.topic(table.schema, table.name, pipeline.topic_prefix)
        try:
            if table.keyed:
                registry.check(f"{topic}-key", avro.key_schema(table))
            registry.check(f"{topic}-value", avro.value_schema(table))
        except Refused as error:
            problems.append(str(error))
    return problems


def report(error: BottledWaterError) -> list[str]:
    """An error's sentences, one a problem."""
    return error.problems if isinstance(error, PreflightError) else [str(error)]
