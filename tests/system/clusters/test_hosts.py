"""Other hosts on this machine: what they are called, whom they reach, and what can happen to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_bottledwater.processes import alive
from tests.support.clusters.hosts import Network, available, hosts
from tests.support.clusters.servers import ReachableServers
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(available()), reason=available())


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts(2) as network:
        yield network


def test_a_host_has_its_own_name_and_address_and_the_machine_keeps_its_own(network: Network) -> None:
    code = (
        "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n), socket.gethostbyname('host2.test'))"
    )
    before = os.uname().nodename, Path("/etc/hosts").read_text()
    done = network[0].run([sys.executable, "-c", code])
    assert done.stdout.split() == ["host1.test", network[0].address, network[1].address], done.stderr
    assert (os.uname().nodename, Path("/etc/hosts").read_text()) == before
    resolve = [sys.executable, "-c", "import socket; print(socket.gethostbyname('host2.test'))"]
    assert subprocess.check_output(network.command(resolve), text=True).strip() == network[1].address


def test_hosts_reach_each_other_and_the_machine_until_one_is_cut_off(network: Network, tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "http.server", "8000", "--bind", "0.0.0.0", "--directory", str(tmp_path)]
    get = [sys.executable, "-c", "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=2)", ""]

    def reached() -> bool:
        get[-1] = f"http://{network[1].name}:8000/"
        return network[0].run(get).returncode == 0

    server = network[1].start(serve, log=tmp_path / "log")
    until(reached, "host2 serves host1")
    assert network[1].processes() == {server.pid: next(iter(network[1].processes().values()))}
    network[1].cut()
    assert not reached()
    network[1].join()
    until(reached, "host2 is back")
    network[1].freeze()
    assert not reached()
    network[1].thaw()
    assert reached()
    network[1].kill()
    assert network[1].processes() == {}
    assert server.wait(60) == -9


def test_nothing_is_left_of_a_network_when_a_test_fails() -> None:
    running: dict[int, int] = {}
    addresses: list[str] = []

    def left() -> set[Path]:
        name = "bw" + addresses[0].split(".")[2]
        folders = [f"/sys/class/net/{name}", f"/sys/class/net/{name}v*", f"/run/netns/{name}-*"]
        patterns = [*folders, f"/etc/netns/{name}", f"/etc/netns/{name}-*"]
        return {path for pattern in patterns for path in Path("/").glob(pattern[1:])}

    def fails() -> None:
        with hosts(2) as network:
            addresses.append(network.address)
            network[0].start(["sleep", "1000"], log=Path("/dev/null"))
            until(network[0].processes, "it runs")
            running.update(network[0].processes())
            assert len(left()) == 1 + 2 + 2 + 3, "the bridge, two devices and namespaces, and three files of names"
            raise RuntimeError("a test failed")

    with pytest.raises(RuntimeError, match="a test failed"):
        fails()
    assert running and not alive(running)
    assert left() == set()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom tests.support.clusters.hosts import hosts\nwith hosts(1) as n:\n"
        " print(n.address, flush=True)\n os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    number = done.stdout.strip().split(".")[2]
    assert Path(f"/sys/class/net/bw{number}").exists(), done.stderr
    with hosts(1):
        pass
    assert not Path(f"/sys/class/net/bw{number}").exists()
    assert not Path(f"/run/netns/bw{number}-1").exists()


@pytest.mark.long
def test_the_servers_of_this_machine_are_reached_from_a_host(network: Network, tmp_path: Path) -> None:
    code = (
        "import sys, psycopg, urllib.request\n"
        "from confluent_kafka import Consumer, Producer\n"
        "from confluent_kafka.admin import AdminClient, NewTopic\n"
        "dsn, bootstrap, registry = sys.argv[1:]\n"
        "print(psycopg.connect(dsn).execute('SELECT 1').fetchone()[0])\n"
        "psycopg.connect(dsn + ' replication=database').close()\n"
        "admin = AdminClient({'bootstrap.servers': bootstrap})\n"
        "admin.create_topics([NewTopic('t', 1)])['t'].result(20)\n"
        "producer = Producer({'bootstrap.servers': bootstrap})\n"
        "producer.produce('t', b'x')\n"
        "print(producer.flush(20))\n"
        "print(urllib.request.urlopen(registry + '/subjects', timeout=20).read().decode())\n"
    )
    with ReachableServers(tmp_path, network) as servers:
        arguments = [servers.dsn(), servers.bootstrap, servers.registry_url]
        done = network[0].run([sys.executable, "-c", code, *arguments])
        assert done.stdout.split() == ["1", "0", "[]"], done.stderr
        here = subprocess.run(
            [sys.executable, "-c", code.replace("'t'", "'u'"), *arguments], check=False, capture_output=True
        )
        assert here.stdout.split() == [b"1", b"0", b"[]"], here.stderr
