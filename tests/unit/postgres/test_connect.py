"""What is said of a server that refuses a connection."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.postgres import connect


@pytest.mark.parametrize(
    ("dsn", "role"),
    [("user=cdc", '"cdc"'), ("user='Chänge \"data\".'", '"Chänge ""data""."'), ("", "…")],
)
def test_the_statements_for_a_role_that_may_not_replicate_quote_its_name(
    monkeypatch: pytest.MonkeyPatch, dsn: str, role: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError('FATAL:  no pg_hba.conf entry for replication connection from host "h"')

    monkeypatch.setattr(psycopg.Connection, "connect", refuse)
    with pytest.raises(Refused) as raised:
        connect.connect(f"host=h {dsn}", application="test", replication=True)
    assert f"ALTER ROLE {role} REPLICATION (on RDS and Aurora: GRANT rds_replication TO {role})" in str(raised.value)
