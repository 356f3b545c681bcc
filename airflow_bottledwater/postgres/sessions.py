"""Other sessions, as messages name them: without the text of their statements, which has values of rows."""

from __future__ import annotations

from datetime import datetime

from psycopg import sql

#: of pg_stat_activity as ``a``, what :func:`named` takes behind the process id
COLUMNS = sql.SQL(
    "a.usename, a.datname, a.application_name, a.state, a.xact_start, "
    "upper(substring(a.query FROM '^[[:space:]]*([[:alpha:]]+)'))"
)


def named(
    pid: int,
    user: str | None,
    database: str | None,
    application: str | None,
    state: str | None,
    start: datetime | None,
    verb: str | None,
) -> str:
    """A session as text.

    :param state: visible with pg_read_all_stats only, if it is another role's session; ``start`` and ``verb`` as well.
    :param verb: the first word of its last statement.
    """
    since = f", {state}, since {start:%H:%M:%S}" if start else ""
    last = f", {verb} …" if verb else ""
    return f"session {pid} ({user or ''}@{database or ''}, {application or 'no application name'}{since}{last})"
