"""Makes the source database's connection string from an Airflow connection of type Postgres."""

from __future__ import annotations

import json
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.hooks.connections import aconnection, connection

#: parameters that are set for each session (:mod:`airflow_bottledwater.postgres.connect`), and are ignored in a
#: connection
_OURS = frozenset(["replication", "client_encoding"])


def dsn_of(found: Any) -> str:
    """A Postgres connection as libpq's connection string; its secrets are masked in logs from then on."""
    # imported here, since a DAG processor does not need libpq, whose import takes a fifth of a second
    from psycopg import conninfo, pq

    options = {option.keyword.decode(): option for option in pq.Conninfo.get_defaults()}
    extra = json.loads(found.extra or "{}")
    if str(extra.get("iam", "")).lower() == "true":
        raise Refused(
            f"The Postgres connection {found.conn_id!r} has iam: its tokens last for minutes, and a stream connects "
            "again after months.",
            "Give the role a password, or a certificate, and leave iam out.",
        )
    own: dict[str, Any] = {
        "host": found.host,
        "port": found.port,
        "dbname": found.schema,
        "user": found.login,
        "password": found.password,
    }
    parts = {
        # keys that libpq does not know belong to other tools
        **{name: _text(value) for name, value in extra.items() if name in options and name not in _OURS},
        **{name: value for name, value in own.items() if value not in (None, "")},
    }
    dsn = conninfo.make_conninfo(**{name: value for name, value in parts.items() if value not in (None, "")})
    for name, value in conninfo.conninfo_to_dict(dsn).items():
        # the parameters that libpq itself marks as secret (dispchar of PQconninfoOption)
        if value and options[name].dispchar == b"*":
            mask_secret(str(value))
    return dsn


def _text(value: Any) -> Any:
    """A value for libpq, whose switches are numbers, while in JSON they may be booleans."""
    return int(value) if isinstance(value, bool) else value


class SourceHook(BaseHook):
    """The hook of the source database.

    :param postgres_conn_id: connection of type Postgres.
    """

    conn_name_attr = "postgres_conn_id"
    default_conn_name = "postgres_default"

    def __init__(self, postgres_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id

    def dsn(self) -> str:
        """The connection string.

        :raises Outage: the connection is not found.
        """
        return dsn_of(connection(self.postgres_conn_id))

    async def adsn(self) -> str:
        """Like :meth:`dsn`, for a trigger."""
        return dsn_of(await aconnection(self.postgres_conn_id))
