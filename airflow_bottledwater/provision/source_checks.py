"""Preflight's checks of the source: the server, the tables, the slot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import psycopg
from psycopg import sql

from airflow_bottledwater.encoding import names, types
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import DOCS, PreflightError, Refused, SlotError, SlotInUse
from airflow_bottledwater.model.relation import ColumnType, SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, partitions, publication, slot
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.server import is_standby
from airflow_bottledwater.postgres.storage import generated, some, stored_apart, undecoded, unknown
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.publish.row_query import equality
from airflow_bottledwater.state import options, outboxes
from airflow_bottledwater.state.identity import belonging, check_timeline, owned, topic_of

#: PostgreSQL's own functions that the pipeline calls: everybody may, unless an administrator has revoked it
FUNCTIONS = (
    "pg_blocking_pids", "pg_collation_actual_version", "pg_column_size", "pg_control_checkpoint",
    "pg_control_system", "pg_current_snapshot", "pg_current_wal_flush_lsn", "pg_current_wal_insert_lsn",
    "pg_current_wal_lsn", "pg_current_xact_id", "pg_database_collation_actual_version", "pg_drop_replication_slot",
    "pg_export_snapshot", "pg_get_expr", "pg_get_partition_constraintdef", "pg_get_publication_tables",
    "pg_get_userbyid", "pg_has_role", "pg_is_in_recovery", "pg_logical_emit_message",
    "pg_logical_slot_peek_binary_changes", "pg_partition_ancestors", "pg_partition_tree", "pg_relation_filenode",
    "pg_relation_size", "pg_replication_slot_advance", "pg_snapshot_xmax", "pg_snapshot_xmin", "pg_table_size",
    "pg_terminate_backend", "pg_wal_lsn_diff", "pg_walfile_name",
)  # fmt: skip
#: PostgreSQL's own catalogs and views that it reads, but for those of the metrics, which can do without: as above
RELATIONS = (
    "pg_am", "pg_amop", "pg_attribute", "pg_cast", "pg_class", "pg_collation", "pg_constraint", "pg_database",
    "pg_depend", "pg_enum", "pg_event_trigger", "pg_extension", "pg_index", "pg_inherits", "pg_locks", "pg_namespace",
    "pg_opclass", "pg_operator",
    "pg_prepared_xacts", "pg_proc", "pg_publication", "pg_publication_namespace", "pg_publication_rel", "pg_range",
    "pg_replication_slots", "pg_roles", "pg_settings", "pg_stat_activity", "pg_type",
)  # fmt: skip
#: the newest major version that the tests run on
_TESTED = 18
#: sessions that a snapshot needs besides those of its lanes, and that a stream needs: see :func:`check_sessions`
_SNAPSHOT_SESSIONS, _STREAM_SESSIONS = 3, 4


def _setting(connection: Connection, name: str) -> str:
    row = connection.execute("SELECT setting FROM pg_settings WHERE name = %s", (name,)).fetchone()
    return row[0] if row else ""


def _role(connection: Connection) -> str:
    """The role of the connection, quoted for SQL if need be."""
    row = connection.execute("SELECT quote_ident(current_user)").fetchone()
    return row[0] if row else ""


def _grants(connection: Connection, tables: Sequence[SourceTable]) -> dict[int, str]:
    """By table oid, the statements that let the connection's role read the table."""
    rows = connection.execute(
        "SELECT c.oid, format('GRANT USAGE ON SCHEMA %%1$I TO %%3$I; GRANT SELECT ON %%1$I.%%2$I TO %%3$I;', nspname, "
        "relname, current_user) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = ANY "
        "(%s::oid[])",
        ([t.oid for t in tables],),
    ).fetchall()
    return dict(rows)


def _converting(kind: ColumnType) -> set[str]:
    """The schemas of the functions by which values of a type are converted."""
    of_extension = {kind.schema} if kind.form == "geojson" else set[str]()
    return of_extension.union(*(_converting(each) for each in kind.inside))


def _unusable(connection: Connection, tables: Sequence[SourceTable]) -> dict[int, str]:
    """The tables whose rows cannot be converted, or looked up by their keys where a large value was left unchanged,
    since this role may not use the schema of a function, an operator or a type: by oid, the schemas, quoted."""
    of_keys = {table.oid: [column for column in table.columns if column.name in table.key] for table in tables}
    needed = {table.oid: set[str]().union(*(_converting(column.type) for column in table.columns)) for table in tables}
    schemas = {column.type.schema for key in of_keys.values() for column in key}.union(*needed.values())
    barred: dict[str, str] = dict(
        connection.execute(
            "SELECT nspname, quote_ident(nspname) FROM pg_namespace WHERE nspname = ANY (%s) AND NOT "
            "has_schema_privilege(oid, 'USAGE')",
            (sorted(schemas),),
        ).fetchall()
    )
    for table in tables:
        key = of_keys[table.oid]
        if table.identity == "f" or barred.keys().isdisjoint(column.type.schema for column in key):
            continue
        if stored_apart(connection, table):
            for each in equality(connection, table.oid, key).values():
                needed[table.oid] |= {each.schema, *(each.collation or ())[:1]}
            needed[table.oid] |= {column.type.schema for column in key if column.type.oid != column.type.base_oid}
    found = {oid: ", ".join(barred[each] for each in sorted(names & barred.keys())) for oid, names in needed.items()}
    return {oid: names for oid, names in found.items() if names}


def unreadable(connection: Connection, tables: Sequence[SourceTable]) -> dict[int, str]:
    """The tables of which this role cannot read all rows: by oid, why, and what can be done."""
    unusable = _unusable(connection, tables)
    found = {
        table.oid: f"USAGE on schema {unusable[table.oid]}, with types of {table.qualified}, is not granted, so that "
        "its rows cannot be converted, or looked up by their keys. As the owner, run: GRANT USAGE ON SCHEMA "
        f"{unusable[table.oid]} TO {_role(connection)};"
        for table in tables
        if table.oid in unusable
    }
    if filtered := set(catalog.filtered_by_policy(connection, tables)):
        role = _role(connection)
        found |= {
            table.oid: f"Table {table.qualified} has a row-level policy that would hide rows from role {role}. As an "
            f"administrator, run: ALTER ROLE {role} BYPASSRLS; or leave the table out."
            for table in tables
            if table.qualified in filtered
        }
    if denied := set(catalog.unselectable(connection, tables)):
        grants = _grants(connection, [table for table in tables if table.qualified in denied])
        found |= {
            table.oid: f"SELECT on {table.qualified} is not granted (or USAGE on its schema). As the owner, run: "
            f"{grants[table.oid]}"
            for table in tables
            if table.oid in grants
        }
    return found


def check_session(connection: Connection) -> list[str]:
    """Check what every transaction of the pipeline needs: without it, nothing else can be asked."""
    problems = []
    role = _role(connection)
    executable = (
        "SELECT 'pg_catalog.' || oid::regprocedure FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace "
        "AND proname = ANY (%s) AND NOT has_function_privilege(oid, 'EXECUTE') ORDER BY 1"
    )
    readable = (
        "SELECT 'pg_catalog.' || relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace "
        "AND relname = ANY (%s) AND NOT has_table_privilege(oid, 'SELECT') ORDER BY 1"
    )
    for query, needed, verb, right in (
        (executable, FUNCTIONS, "execute", "EXECUTE ON FUNCTION"),
        (readable, RELATIONS, "read", "SELECT ON"),
    ):
        if names := ", ".join(row[0] for row in connection.execute(query, (list(needed),))):
            problems.append(
                f"Role {role} may not {verb} {names}. As a superuser, run: GRANT {right} {names} TO {role};"
            )
    if not problems and not is_standby(connection) and _setting(connection, "transaction_read_only") == "on":
        problems.append(
            f"default_transaction_read_only is on for role {_role(connection)}: publications cannot be made, and no "
            f"transaction can get an id. As an administrator, run: ALTER ROLE {_role(connection)} SET "
            "default_transaction_read_only = off; or take the setting out of the database, the server or the "
            "connection's options."
        )
    return problems


def check_wal_level(connection: Connection) -> list[str]:
    """Check that the WAL has what logical decoding needs. Asked with no function that needs it itself: on Aurora,
    those that tell a place in the WAL do."""
    level = _setting(connection, "wal_level")
    # PostgreSQL 19 adds it to the WAL of replica while there is a logical slot (effective_wal_level)
    if level == "logical" or (level == "replica" and _setting(connection, "effective_wal_level")):
        return []
    return [
        f"wal_level is {level}: set wal_level = logical and restart PostgreSQL (RDS and Aurora: "
        "rds.logical_replication = 1; Cloud SQL: cloudsql.logical_decoding = on; Azure: the server parameter "
        "wal_level)."
    ]


def check_server(connection: Connection, found: Findings) -> list[str]:
    problems = check_wal_level(connection)
    if _setting(connection, "server_encoding") == "SQL_ASCII":
        problems.append(
            f"Database {found.cluster.database!r} has the encoding SQL_ASCII: the character set of its texts is not "
            "known, so they cannot be converted to UTF-8. Copy it into a database with an encoding (pg_dump, then "
            "createdb --encoding)."
        )
    row = connection.execute(
        "SELECT rolsuper OR rolreplication OR pg_has_role(current_user, oid, 'usage') AND rolname LIKE "
        "'rds_replication', quote_ident(rolname) FROM pg_roles WHERE rolname = current_user"
    ).fetchone()
    managed = connection.execute(
        "SELECT count(*) FROM pg_roles WHERE rolname IN ('rds_replication', 'rds_superuser') AND "
        "pg_has_role(current_user, oid, 'member')"
    ).fetchone()
    if row and not row[0] and not (managed and managed[0]):
        problems.append(
            f"Role {row[1]} may not replicate. As an administrator, run: ALTER ROLE {row[1]} REPLICATION; (on RDS and "
            f"Aurora: GRANT rds_replication TO {row[1]};)."
        )
    if found.cluster.version // 10000 > _TESTED:
        found.warnings.append(
            f"PostgreSQL {found.cluster.version // 10000} is newer than version {_TESTED}, the last one that the "
            "pipeline was tested with. Verify the topics (bottledwater verify), or upgrade bottledwater."
        )
    if publication.forgets_writers(found.cluster.version):
        found.warnings.append(
            f"PostgreSQL {found.cluster.version // 10000}.{found.cluster.version % 10000} may send no changes of a "
            "table that is added to a publication, or gets another row filter there, while transactions write to it. "
            "The pipeline waits for their ends. Upgrade to the last minor release; until then, whoever else alters its "
            "publications has to lock the table first, in the same transaction: LOCK TABLE … IN SHARE ROW EXCLUSIVE "
            "MODE."
        )
    if publication.repeats_invalidations(found.cluster.version):
        found.warnings.append(
            f"PostgreSQL {found.cluster.version // 10000}.{found.cluster.version % 10000} may fail to decode its WAL "
            "('invalid memory alloc request size') if much DDL commits while transactions run, also of temporary "
            "tables; then the stream cannot go on. Upgrade to the last minor release before."
        )
    if _setting(connection, "max_slot_wal_keep_size") == "-1":
        found.warnings.append(
            "max_slot_wal_keep_size is unlimited: while the stream is stopped, its slot keeps WAL without bound and "
            "can fill the server's disk. Watch the slot's lag (ReplicationSlotLagSensor), or set a limit; beyond it "
            "PostgreSQL invalidates the slot, and the pipeline has to start again with a snapshot."
        )
    if _setting(connection, "idle_replication_slot_timeout") not in ("", "0"):  # since PostgreSQL 18
        found.warnings.append(
            "idle_replication_slot_timeout is set: a checkpoint invalidates the slot if no stream has read from it for "
            "so long, and the pipeline has to start again with a snapshot. Set it to 0, or to more than a stream is "
            "ever stopped, also between two bounded runs."
        )
    return problems


def check_standbys(connection: Connection, name: str) -> Refused | None:
    """Check that the stream of a slot is no synchronous standby: commits would wait for Kafka, and a stream that has to
    read a value again would wait for a commit that waits for itself."""
    wanted = _setting(connection, "synchronous_standby_names")
    taken = {(quoted or plain).lower() for quoted, plain in re.findall(r'"([^"]+)"|([^\s,()"]+)', wanted)}
    # the connection string may have a name for all sessions
    own = [slot.application(name)[:63], connection.info.parameter_status("application_name") or ""]
    if taken.isdisjoint({"*", *(each.lower() for each in own)}):
        return None
    return Refused(
        f"synchronous_standby_names is {wanted!r}, which takes the stream for a synchronous standby.",
        "Then each commit may wait until its changes are in Kafka. Name the physical standbys in it (ALTER SYSTEM SET "
        "synchronous_standby_names = …, and a reload), instead of * and of the stream's own name.",
    )


def check_sessions(connection: Connection, pipeline: Settings, found: Findings) -> list[str]:
    """Check that the role, and the database, may have as many sessions as the pipeline needs at a time.

    A snapshot has one for each lane, one that does its work, one that holds its snapshot, and at times one that looks
    at locks; a stream has one that receives, one that looks at the tables, one that reads values again, and at times
    one that looks at the catalog or at the slot. What can wait, as metrics, is not counted.
    """
    needed = _STREAM_SESSIONS
    if not (found.state.complete or pipeline.skip_snapshot):
        needed = max(needed, pipeline.lanes + _SNAPSHOT_SESSIONS)
    rows = connection.execute(
        "SELECT 'ROLE', quote_ident(rolname), rolconnlimit FROM pg_roles WHERE rolname = session_user AND NOT rolsuper "
        "UNION ALL SELECT 'DATABASE', quote_ident(datname), datconnlimit FROM pg_database, pg_roles "
        "WHERE datname = current_database() AND rolname = session_user AND NOT rolsuper"
    ).fetchall()
    return [
        f"{kind.capitalize()} {name} may have {limit} sessions at a time, and the pipeline needs {needed}. As an "
        f"administrator, run: ALTER {kind} {name} CONNECTION LIMIT {needed}; or take the limit away (-1)"
        + (", or set fewer lanes." if needed > _STREAM_SESSIONS else ".")
        for kind, name, limit in rows
        if 0 <= limit < needed
    ]


#: forms in which values of a key cannot be told apart: how they are published, and what to do instead
_ROUNDED = {
    "double": ("as the nearest double (numeric)", "numeric to decimal or string"),
    "geojson": ("as GeoJSON, which is rounded (json_geometries)", "json_geometries to ewkb"),
    "name": ("as the name that an object has when it is read (regs)", "regs to number"),
}


def _rounded_keys(table: SourceTable) -> list[str]:
    """What is said of columns of a table's key that the settings publish in a form which does not tell rows apart."""
    forms = [(column, types.rounding_form(column.type)) for column in table.columns if column.name in table.key]
    return [
        f"Column {column.name!r} is in the key of {table.qualified}, and would be published {_ROUNDED[form][0]}: a row "
        f"could have another one's key, or not the one of before. Set {_ROUNDED[form][1]}; or give the table another "
        "key (primary key, or option key of table_options), or leave it out."
        for column, form in forms
        if form
    ]


def check_tables(connection: Connection, pipeline: Settings, found: Findings) -> list[str]:
    problems, mapping = list[str](), TableMapping.of(pipeline)
    try:
        oids = sorted(found.adding)
        if not oids:
            oids = _named(connection, pipeline, found)
            oids = sorted(set(oids) - belonging(connection, found.state))
    except PreflightError as error:
        return list(error.problems)
    found.tables = catalog.load(connection, oids, mapping)
    problems += options.problems(connection, pipeline, oids, None if found.adding else found.state.tables)
    _leave_to_stream(pipeline, found)
    exposed = options.exposed(
        pipeline, found.state, (each for each in found.tables if each.oid not in found.state.tables)
    )
    found.warnings += exposed.values()
    found.tables = [table for table in found.tables if table.oid not in exposed]
    problems += _check_partitions(connection, found)
    read = [*found.tables, *found.parts]
    for table in found.tables:
        # of a key that the options name, they say what is wrong
        asked = mapping.options(table.schema, table.name).key
        if not (table.keyed or table.outbox or pipeline.allow_unkeyed or asked):
            problems.append(
                f"Table {table.qualified} cannot be keyed: {table.key_problem}. Give it a primary key, leave it out, "
                "or set allow_unkeyed (its messages then have no key, deletes are not sent, and updates only with "
                "REPLICA IDENTITY FULL)."
            )
        problems += _rounded_keys(table)
        try:
            mapping.subjects(topic_of(table, found.state, mapping), table)
        except Refused as error:
            problems.append(str(error))
    problems += outboxes.turned(pipeline, found.state, found.tables)
    if not found.adding:
        _warn_of_patterns(connection, pipeline, found)
        _warn_of_outboxes(connection, found)
        _warn_of_children(connection, pipeline, found)
        _warn_of_generated(connection, found)
    problems += unreadable(connection, read).values()
    problems += _check_undecoded(connection, found)
    problems += [
        f"Column {column!r} of table {name} is made of type {kind}, which has no binary send function: replication "
        "would fail at the table's first row. Give the type one (ALTER TYPE … SET (SEND = …)), change the column's "
        "type, or leave the table out."
        for name, column, kind in catalog.unsendable(connection, found.tables)
    ]
    by_topic: dict[str, SourceTable] = {}
    for table in found.tables:
        topic = topic_of(table, found.state, mapping)
        other = by_topic.setdefault(topic, table)
        if other is not table:
            problems.append(
                f"Tables {other.qualified} and {table.qualified} both become topic {topic!r}. Rename one, leave it "
                "out, or give it another topic in table_options."
            )
        if len(topic) > names.MAX_TOPIC_LENGTH:
            problems.append(names.length_problem(topic))
    problems += _locks(connection, read)
    return problems


def _named(connection: Connection, pipeline: Settings, found: Findings) -> list[int]:
    """The tables that the settings name. Of a new pipeline, it is noted what patterns do not take."""
    tables, schemas = pipeline.tables, pipeline.schemas
    oids = catalog.resolve(connection, tables, schemas, via_root=found.via_root, followed=found.state.tables)
    if not found.state.tables and (left := catalog.brought(connection, tables, schemas, oids)):
        found.notes.append(
            f"Tables that belong to extensions are left out ({some(left)}): they are taken by their own names only."
        )
    return oids


def elsewhere(connection: Connection, pipeline: Settings, tables: Mapping[int, SourceTable]) -> dict[int, str]:
    """The tables among these whose rows are in tables that inherit from them, and that neither are followed nor are
    left out on purpose: by oid, what is wrong, and what can be done.

    :param tables: the followed ones.
    """
    children = catalog.inherited(connection, tables, pipeline.tables, pipeline.schemas)
    found = {parent: _not_followed(tables[parent], of) for parent, of in children.items()}
    return {parent: said for parent, said in found.items() if said}


def _not_followed(parent: SourceTable, children: Mapping[str, catalog.Child]) -> str:
    """What is wrong with a table some of whose children are not followed, and what can be done; empty if all are meant
    to be as they are.

    :param children: see :func:`airflow_bottledwater.postgres.catalog.inherited`.
    """
    left = {name: child for name, child in children.items() if not child.meant}
    if not left:
        return ""
    said = (
        f"Rows of {parent.qualified} may be in {len(left)} tables that inherit from it, and that the pipeline does not "
        f"follow ({some(list(left))}). "
    )
    if unfit := [name for name, child in left.items() if not child.fit]:
        said += (
            f"{some(unfit)} cannot be followed (a foreign table, an unlogged one until it is SET LOGGED, one that is "
            "not stored as heap, a chunk of a hypertable with compression): leave such tables out on purpose, with a "
            "pattern behind '!'. "
        )
    if len(unfit) < len(left):
        said += (
            f"Name {'the others' if unfit else 'them'} as well (patterns cover later ones, too, but none that "
            "belongs to an extension): each gets a topic of its own. Or make it a partitioned table "
            "(PARTITION BY), which has one topic; or leave them out on purpose, with a pattern behind '!'."
        )
    return said.rstrip()


def _warn_of_outboxes(connection: Connection, found: Findings) -> None:
    """Say which outboxes have rows that will not be published, since they are inserted before they are followed."""
    for table in found.tables:
        if not table.outbox or table.oid in found.state.tables:
            continue
        rows = sql.SQL("SELECT FROM ONLY {} LIMIT 1").format(sql.Identifier(table.schema, table.name))
        try:
            with connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '1s'")
                filled = connection.execute(rows).fetchone() is not None
        except psycopg.Error:
            continue  # that it is locked or may not be read is found elsewhere
        if filled:
            found.warnings.append(
                f"Outbox {table.qualified} has rows: they are not published, since it is not known whether somebody "
                "else has done that. Rows that are to be published have to be inserted again, behind create_slot."
            )


def _warn_of_patterns(connection: Connection, pipeline: Settings, found: Findings) -> None:
    """Say which patterns leave nothing out."""
    found.warnings += [
        f"{pattern!r} leaves nothing out: no table matches it. Check the name and its schema; upper and lower case "
        "count."
        for pattern in catalog.idle(connection, pipeline.tables, pipeline.schemas)
    ]


def _warn_of_children(connection: Connection, pipeline: Settings, found: Findings) -> None:
    """Say which tables have rows in the topics of tables that inherit from them, or in none."""
    followed = {table.oid: table for table in found.tables}
    for parent, children in catalog.inherited(connection, followed, pipeline.tables, pipeline.schemas).items():
        found.warnings.append(
            _not_followed(followed[parent], children)
            or f"Rows of {followed[parent].qualified} may be in {len(children)} tables that inherit from it: they are "
            "not in its topic, but in topics of those tables."
        )


def _warn_of_generated(connection: Connection, found: Findings) -> None:
    """Say which columns are not published, since PostgreSQL computes them: before version 18 it does not send those of
    a change, and virtual ones never."""
    columns = generated(connection, [table.oid for table in found.tables])
    with_some = [table for table in found.tables if table.oid in columns]
    if said := [f"{table.qualified} ({', '.join(columns[table.oid])})" for table in with_some]:
        found.warnings.append(
            f"Generated columns are not published: {', '.join(said[:5])}{', …' if len(said) > 5 else ''}. Let "
            "consumers compute them from the other columns."
        )


def _leave_to_stream(pipeline: Settings, found: Findings) -> None:
    """Leave those tables to the stream that bear the names of others: it gives them their topics, behind the last
    changes of these. And those that others have published, on a server that forgets who was writing to them then: it
    begins behind these. And new ones as long as it is inside of a transaction."""
    if found.adding or pipeline.new_tables != "add" or not found.state.complete:
        return
    owners = owned(found.state, found.tables, TableMapping.of(pipeline))
    late = not pipeline.create_publication and publication.forgets_writers(found.cluster.version)
    inside = found.state.position is not None and found.state.position.ordinal
    left = dict[int, str]()
    for table in (each for each in found.tables if each.oid not in found.state.tables):
        if table.oid in owners:
            left[table.oid] = "bears the name of another table: the stream gives it that one's topic."
        elif late and table.keyed and not table.outbox:
            left[table.oid] = (
                "is taken in by the stream, behind the transactions that wrote to it when it was published."
            )
        elif inside and table.keyed and not table.outbox:
            left[table.oid] = "is taken in by the stream, behind the transaction that is published in part."
    found.warnings += [f"{table.qualified} {left[table.oid]}" for table in found.tables if table.oid in left]
    found.left = frozenset(left)
    found.tables = [table for table in found.tables if table.oid not in left]


def _check_partitions(connection: Connection, found: Findings) -> list[str]:
    """Check what is below the tables that are published as one, and put it into ``found``."""
    problems = []
    below = partitions.below(connection, [table.oid for table in found.tables if table.partitioned])
    for table in found.tables:
        parts = below.get(table.oid, [])
        late = [each for each in parts if each.decoded is False] if _goes_on(found, table.oid) else []
        found.warnings += partitions.unfit(table, late)
        problems += partitions.unfit(table, [each for each in parts if each not in late])
        problems += partitions.mismatches(table, parts)
        if table.partitioned:
            found.parts += partitions.parts(table, parts)
    return problems


def _goes_on(found: Findings, oid: int) -> bool:
    """Whether a table is followed already: what becomes of it later is a problem in the status, and its pipeline goes
    on."""
    return oid in found.state.tables and oid not in found.adding


def _check_undecoded(connection: Connection, found: Findings) -> list[str]:
    """Check that the tables' changes are decoded, or warn of those that are followed already."""
    oids = [table.oid for table in found.tables]
    found.warnings += undecoded(connection, [oid for oid in oids if _goes_on(found, oid)]).values()
    found.warnings = list(dict.fromkeys([*found.warnings, *unknown(connection)]))
    return list(undecoded(connection, [oid for oid in oids if not _goes_on(found, oid)]).values())


def _locks(connection: Connection, tables: Sequence[SourceTable]) -> list[str]:
    """Check that the server's lock table, whose size depends on max_locks_per_transaction, has room for the snapshot:
    its holder locks every table in one transaction."""
    size = int(_setting(connection, "max_locks_per_transaction")) * (
        int(_setting(connection, "max_connections")) + int(_setting(connection, "max_prepared_transactions"))
    )
    # reading a table also locks its indexes
    row = connection.execute(
        "SELECT count(*) FROM pg_index WHERE indrelid = ANY (%s::oid[])", ([t.oid for t in tables],)
    ).fetchone()
    needed = len(tables) + (row[0] if row else 0)
    if needed > size * 0.9:
        return [
            f"The snapshot locks {needed} tables and indexes at once, but the lock table has room for {size} "
            "(max_locks_per_transaction x (max_connections + max_prepared_transactions)). Raise "
            "max_locks_per_transaction to at least "
            f"{needed * 2 * int(_setting(connection, 'max_locks_per_transaction')) // size + 1}, or make several "
            "pipelines."
        ]
    return []


def check_slot(connection: Connection, pipeline: Settings, found: Findings) -> list[str]:
    present = slot.state(connection, pipeline.slot)
    record = found.state.slot
    intent = found.state.intent
    if record is not None:
        try:
            check_timeline(record, found.cluster)
        except SlotError as error:
            return [str(error)]
    if present is None:
        used = connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone()
        walsenders = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'"
        ).fetchone()
        problems = []
        if used and used[0] >= int(_setting(connection, "max_replication_slots")):
            problems.append(
                f"All {used[0]} replication slots are in use. Raise max_replication_slots, or drop one that nobody "
                "needs."
            )
        if walsenders and walsenders[0] >= int(_setting(connection, "max_wal_senders")):
            problems.append(f"All {walsenders[0]} walsenders are in use. Raise max_wal_senders.")
        if record is not None:
            problems.append(
                f"Slot {pipeline.slot!r} is gone, but its state says that it was at "
                f"{found.state.position or 'its start'}: changes since then are lost. Delete the saved state "
                "('bottledwater drop-slot --when always', which is refused while the pipeline's job runs), then start "
                "again with a snapshot. If this server is a copy of the pipeline's server (a restored backup), use "
                "another slot name instead, and leave the pipeline alone."
            )
        return problems
    try:
        slot.check(present, found.cluster.database, recorded=record is not None)
    except SlotInUse:
        raise  # waiting helps, so it is not a problem to be reported
    except SlotError as error:
        return [str(error)]
    if record is None and intent is None:
        if not pipeline.adopt_slot:
            return [
                f"Slot {pipeline.slot!r} exists, but was not created by this pipeline: which changes were already "
                "consumed from it is unknown. Choose another slot name, drop the slot, or set adopt_slot (a new "
                "snapshot follows). If this pipeline did create it, and its saved state was lost or the database was "
                f"renamed since, see {DOCS}operations.html#state-topics-and-lost-state."
            ]
        if present.active_pid is not None:
            return [f"Slot {pipeline.slot!r} is in use by process {present.active_pid}. Stop its client first."]
    return []
