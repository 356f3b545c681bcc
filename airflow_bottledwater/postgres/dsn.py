"""Connection strings of libpq."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg import conninfo

from airflow_bottledwater.errors import Refused


def describe(dsn: str) -> str:
    """Host, port and database of a connection string; never its password.

    :raises Refused: the connection string is not valid.
    """
    known = parse(dsn)
    where = known.get("host") or known.get("hostaddr") or known.get("service") or "the default host"
    return f"PostgreSQL at {where}:{known.get('port') or 5432}, database {known.get('dbname') or '(default)'}"


def parse(dsn: str) -> dict[str, Any]:
    """The parameters of a connection string.

    If a password is not quoted correctly, libpq's errors would show a part of it, or it would become part of host or
    port, which the errors of this package show. Such a string is refused without showing any of it.

    :raises Refused: the connection string is not valid.
    """
    try:
        known = {k: v for k, v in conninfo.conninfo_to_dict(dsn).items() if v is not None}
    except psycopg.ProgrammingError:
        known = {"port": "?"}
    uri = dsn.lstrip().startswith(("postgresql://", "postgres://"))
    if (uri and dsn.partition("?")[0].count("@") > 1) or not re.fullmatch("[0-9, ]*", str(known.get("port", ""))):
        raise Refused(
            "The connection string is not valid.",
            "In key=value pairs put a value with blanks in single quotes; in a URI quote @ : / ? % of a password as "
            "%40 %3A %2F %3F %25.",
        )
    return known
