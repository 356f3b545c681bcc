"""What preflight asks the source: the server, the tables, the slot."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.encoding import avro, names
from airflow_bottledwater.errors import PreflightError, Refused, SlotError, SlotInUse
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.postgres import catalog, slot
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.settings import Pipeline


def _setting(connection: Connection, name: str) -> str:
    row = connection.execute("SELECT setting FROM pg_settings WHERE name = %s", (name,)).fetchone()
    return row[0] if row else ""


def is_standby(connection: Connection) -> bool:
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def check_server(connection: Connection, found: Findings) -> list[str]:
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


def check_tables(connection: Connection, pipeline: Pipeline, found: Findings) -> list[str]:
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


def check_slot(connection: Connection, pipeline: Pipeline, found: Findings) -> list[str]:
    present = slot.state(connection, pipeline.slot)
    record = found.state.slot
    intent = found.state.intent
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
