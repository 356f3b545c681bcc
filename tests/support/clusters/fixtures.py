"""Two other hosts, and the servers and clusters that they reach or that run on them: started once for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clusters.hosts import Network, hosts
from tests.support.clusters.servers import ReachableServers
from tests.support.clusters.standalone import StandaloneCluster
from tests.support.clusters.yarn import YarnCluster


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts."""
    with hosts(2) as network:
        yield network


@pytest.fixture(scope="module")
def servers(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReachableServers]:
    """PostgreSQL (with prepared transactions), Kafka and the registry, reached from all hosts."""
    options = {"settings": {"max_prepared_transactions": "20"}}
    with ReachableServers(tmp_path_factory.mktemp("servers"), network, options) as servers:
        yield servers


@pytest.fixture(scope="module")
def standalone(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A Spark standalone cluster with a worker on each host."""
    with StandaloneCluster(tmp_path_factory.mktemp("standalone"), network) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def yarn(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnCluster]:
    """A YARN cluster with a node on each host."""
    with YarnCluster(tmp_path_factory.mktemp("yarn"), network) as cluster:
        yield cluster
