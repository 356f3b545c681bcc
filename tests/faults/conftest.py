"""Pipelines whose every version is known, and jobs that die where they are told to.

``BOTTLEDWATER_FAULTS`` says how often every named point is hit (once in ``make test``), ``BOTTLEDWATER_SEED`` begins
the seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.faults import Jobs, ProxiedBroker

COUNT = int(os.environ.get("BOTTLEDWATER_FAULTS", "1"))
SEED = int(os.environ.get("BOTTLEDWATER_SEED", "1"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a ``seed`` runs as often as every point is to be hit."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(SEED, SEED + COUNT))


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Starts jobs."""
    found = Jobs(tmp_path_factory.mktemp("jobs"))
    yield found
    found.end()


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """Transactions are named, batches are small, and servers are waited for."""
    return {
        "xid_header": True,
        "transaction_topic": "transactions",
        "messages": {"*": "messages"},
        "range_bytes": 64 * 1024,
        "batch_bytes": 64 * 1024,
        "max_transaction_bytes": 64 * 1024,
        "outage_timeout": 120.0,
    }


@pytest.fixture(scope="session")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedBroker]:
    """A broker behind a proxy."""
    with ProxiedBroker(tmp_path_factory.mktemp("proxied")) as server:
        yield server
        server.proxy.close()
