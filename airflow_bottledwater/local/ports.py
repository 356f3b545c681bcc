"""Ports of the local servers: picked once for a folder and kept there, so that a server has the same port after a
restart."""

from __future__ import annotations

import json
import random
import socket
import urllib.request
from pathlib import Path
from typing import Any

from airflow_bottledwater.errors import LocalServerError

HOST = "127.0.0.1"
_LOWEST, _HIGHEST = 20_000, 32_000
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: a socket for each port that this process has given out; its name tells all processes that the port is taken
_taken: list[socket.socket] = []
# a proxy that the environment names must not be used for local addresses
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def check(port: int) -> None:
    """Check that a server could listen on this port.

    :raises LocalServerError: it could not.
    """
    if not 0 < port < 65_536:
        raise LocalServerError(f"{port} is not a port: it must be between 1 and 65535")
    with socket.socket() as probe:
        # as servers do; otherwise, connections of an earlier server in TIME_WAIT would count as use of the port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise LocalServerError(f"cannot listen on {HOST}:{port}: {error.strerror}") from error


def open_url(request: urllib.request.Request | str) -> Any:
    """Send a request to a local server; returns what :func:`urllib.request.urlopen` does."""
    return _opener.open(request, timeout=5)


def free() -> int:
    """A port on which no server listens and which no living process of this machine has been given here.

    The kernel's own choice (bind to port 0) is not used, since outgoing connections get these ports, too: while a
    server is down for a restart, a client that tries to reach it could be given the server's port. Until a server has
    started and while it restarts, nobody listens on its port: so that another process does not pick it meanwhile, its
    number is the name of an abstract Unix socket (unix(7)), which ends with the process that has it.
    """
    low, high = _range()
    for _ in range(1_000):
        port = random.randrange(low, high)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0bottledwater-port-{port}")
            check(port)
        except (OSError, LocalServerError):
            claim.close()
            continue
        _taken.append(claim)
        return port
    raise LocalServerError(f"no free port between {low} and {high}")


def _range() -> tuple[int, int]:
    """The ports among which one is picked: those below the kernel's range of outgoing ports (ip(7)) where there are
    any, else those above it."""
    try:
        first, last = (int(port) for port in _OUTGOING.read_text().split())
    except (OSError, ValueError):
        return _LOWEST, _HIGHEST
    high = min(_HIGHEST, first)
    if high >= 10_000:
        return min(_LOWEST, high - 5_000), high
    return (last + 1, 65_536) if last < 64_000 else (_LOWEST, _HIGHEST)


def keep(folder: Path, **wanted: int) -> dict[str, int]:
    """The ports of a server by name, kept in its folder: as wanted, or for 0 the port of the last time, or a new
    one."""
    file = folder / "ports.json"
    kept: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    ports = {name: port or kept.get(name) or free() for name, port in wanted.items()}
    if ports != kept:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(ports))
    return ports
