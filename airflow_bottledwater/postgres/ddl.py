"""Event triggers that write each DDL statement into the WAL, as a logical message of its transaction. They are all that
is made on the server, on request only, and they never let the application's statement fail."""

from __future__ import annotations

import psycopg

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.postgres.connect import Connection

#: the prefix of the messages
PREFIX = "bottledwater.ddl"
#: what is said of a database without them, and what to do
MISSING = (
    "ddl_topic is set, and the event triggers that tell of DDL statements are not in the database, or do not fire.",
    "As a superuser, run: bottledwater ddl install; or leave ddl_topic out.",
)
SCHEMA, TRIGGERS = "bottledwater", ("bottledwater_ddl", "bottledwater_ddl_dropped")

#: what a statement drops is only known to a trigger of the event sql_drop, which comes before ddl_command_end: it is
#: passed on in a setting of the transaction (https://www.postgresql.org/docs/current/event-trigger-matrix.html)
_DROPPED = """
CREATE FUNCTION bottledwater.note_dropped() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM set_config('bottledwater.dropped', (
        SELECT jsonb_agg(jsonb_build_object(
            'type', object_type, 'schema', schema_name, 'name', object_name, 'identity', object_identity))
        FROM pg_event_trigger_dropped_objects() WHERE NOT is_temporary
    )::text, true);
EXCEPTION WHEN OTHERS THEN
    RAISE LOG 'bottledwater could not note what % drops: %', TG_TAG, SQLERRM;
END $body$
"""
#: statements are cut, those that may have passwords are left out (also where they are sent with others, in one text),
#: and so are objects of single sessions. A text with another statement, which may have values of rows, is left out,
#: too: each part of it between semicolons has to begin as DDL does, and so each of its statements does. The columns of
#: a table are those of its Relation message (logicalrep_write_attrs, src/backend/replication/logical/proto.c)
#: A second message, which nobody publishes, comes behind the first: PostgreSQL orders what a transaction and its
#: subtransactions (such as the block with EXCEPTION) have written by LSNs, and that of a message is its end, which the
#: next change would begin at. What fails in DECLARE, EXCEPTION does not catch. Contents of messages are sent as the
#: bytes that were written (logicalrep_write_message in the same file): a text would be in the database's encoding
_NOTED = """
CREATE FUNCTION bottledwater.note_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    dropped jsonb;
    objects jsonb;
BEGIN
    dropped := coalesce(nullif(current_setting('bottledwater.dropped', true), ''), '[]')::jsonb;
    PERFORM set_config('bottledwater.dropped', '', true);
    SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
        'type', d.object_type, 'schema', d.schema_name, 'name', c.relname, 'identity', d.object_identity,
        'oid', CASE WHEN c.relkind IN ('r', 'p') THEN c.oid::bigint END,
        'replica_identity', CASE WHEN c.relkind IN ('r', 'p') THEN c.relreplident END,
        'columns', CASE WHEN c.relkind IN ('r', 'p') THEN (
            SELECT jsonb_agg(jsonb_build_array(
                       a.attname, a.atttypid::bigint, a.atttypmod,
                       c.relreplident = 'f' OR coalesce(a.attnum = ANY (x.indkey), false)) ORDER BY a.attnum)
            FROM pg_attribute a LEFT JOIN pg_index x ON x.indrelid = a.attrelid AND x.indisvalid
                AND CASE c.relreplident WHEN 'd' THEN x.indisprimary WHEN 'i' THEN x.indisreplident END
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
        ) END))), '[]')
    INTO objects
    FROM (SELECT DISTINCT object_type, schema_name, object_identity,
              CASE WHEN classid = 'pg_class'::regclass THEN objid END AS relation
          FROM pg_event_trigger_ddl_commands()
          WHERE NOT in_extension AND schema_name IS DISTINCT FROM 'pg_temp') d
    LEFT JOIN pg_class c ON c.oid = d.relation;
    IF objects <> '[]' OR dropped <> '[]' THEN
        PERFORM pg_logical_emit_message(true, 'bottledwater.ddl', convert_to(jsonb_build_object(
            'tag', TG_TAG,
            'statement', CASE WHEN TG_TAG !~ '(SUBSCRIPTION|USER MAPPING|SERVER|FOREIGN DATA WRAPPER)'
                AND current_query() !~* replace(
                    '(CREATE|ALTER) (ROLE|USER|GROUP|SERVER|SUBSCRIPTION|FOREIGN DATA)[[:>:]]',
                    ' ', E'([[:space:]]|--[^\\r\\n]*|/[*].*[*]/)+')
                AND current_query() !~* ('dblink|passw(or)?d[[:space:]]*[='']|://[^[:space:]]*@'
                    '|[[:<:]]AS[[:space:](]+(VALUES|EXECUTE)[[:>:]]')
                AND NOT EXISTS (
                    SELECT FROM regexp_split_to_table(current_query(), ';') part
                    WHERE part !~* (E'^([[:space:]]|--[^\\r\\n]*[\\r\\n]|/[*]([^*]|[*]+[^*/])*[*]+/)*((--[^\\r\\n]*)?$|'
                        '(CREATE|ALTER|DROP|COMMENT|GRANT|REVOKE|REFRESH|REINDEX|SECURITY|BEGIN|START|COMMIT)[[:>:]])'))
                THEN left(current_query(), 65536) END,
            'objects', objects, 'dropped', dropped)::text, 'UTF8'));
        PERFORM pg_logical_emit_message(false, 'bottledwater', '');
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE LOG 'bottledwater could not write %: %', TG_TAG, SQLERRM;
END $body$
"""
_TRIGGERS = (
    f"CREATE EVENT TRIGGER {TRIGGERS[0]} ON ddl_command_end EXECUTE FUNCTION {SCHEMA}.note_ddl()",
    f"CREATE EVENT TRIGGER {TRIGGERS[1]} ON sql_drop EXECUTE FUNCTION {SCHEMA}.note_dropped()",
)
_NO_TRIGGERS = tuple(f"DROP EVENT TRIGGER IF EXISTS {name}" for name in TRIGGERS)
_NO_FUNCTIONS = tuple(f"DROP FUNCTION IF EXISTS {SCHEMA}.{name}()" for name in ("note_ddl", "note_dropped"))


def install(connection: Connection) -> None:
    """Make the schema, the functions and the event triggers, or make them anew.

    :raises Refused: the role may not.
    """
    # the triggers first, so that none of what follows is an event; the functions are not replaced, which would leave
    # them to whoever has made them before, with the rights to write what a superuser's statements run
    schema = f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"
    _run(connection, *_NO_TRIGGERS, *_NO_FUNCTIONS, schema, _DROPPED, _NOTED, *_TRIGGERS)


def remove(connection: Connection) -> None:
    """Drop all that :func:`install` has made; the schema stays if somebody else has something in it.

    :raises Refused: the role may not.
    """
    _run(connection, *_NO_TRIGGERS, *_NO_FUNCTIONS)
    try:
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA}")  # type: ignore[arg-type]
    except psycopg.errors.DependentObjectsStillExist:
        pass


def installed(connection: Connection) -> bool:
    """Whether the event triggers are there, and fire."""
    row = connection.execute(
        "SELECT count(*) FROM pg_event_trigger WHERE evtname = ANY (%s) AND evtenabled IN ('O', 'A')", (list(TRIGGERS),)
    ).fetchone()
    return row is not None and row[0] == len(TRIGGERS)


def _run(connection: Connection, *statements: str) -> None:
    """All of them, or none."""
    try:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement)  # type: ignore[arg-type]
    except psycopg.errors.InsufficientPrivilege as error:
        raise Refused(
            f"The role of the connection may not make or drop event triggers ({str(error).splitlines()[0]}).",
            "Run this command once as a superuser (on RDS and Aurora: a member of rds_superuser; on Cloud SQL: of "
            "cloudsqlsuperuser); the pipeline's own role needs no right for it.",
        ) from None
