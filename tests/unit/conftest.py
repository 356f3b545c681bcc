"""An Airflow home of the tests' own: the first import of Airflow writes its configuration there."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

_home = tempfile.TemporaryDirectory(prefix="airflow-home-")
atexit.register(_home.cleanup)
os.environ["AIRFLOW_HOME"] = _home.name

Connect = Callable[..., None]

PASSWORD = "pa ss'w\\ord%41@/:?#&=é"
"""All characters that a connection string or a URI could trip over."""


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Makes an Airflow connection."""

    def make(name: str, **fields: Any) -> None:
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(fields))

    return make


@pytest.fixture
def connections(connect: Connect) -> str:
    """The four that a pipeline needs by default; returns their password."""
    connect(
        "postgres_default", conn_type="postgres", host="db", port=5433, login="cdc", password=PASSWORD, schema="shop"
    )
    connect("kafka_default", conn_type="kafka", extra={"bootstrap.servers": "k:9092", "sasl.password": PASSWORD})
    connect("schema_registry_default", conn_type="schema_registry", host="http://r", login="me", password=PASSWORD)
    connect(
        "spark_default",
        conn_type="spark",
        host="local[2]",
        extra={"spark-binary": "spark-submit", "deploy-mode": "client"},
    )
    return PASSWORD
