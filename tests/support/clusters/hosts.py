"""Other hosts on one machine: each has a network and a host name of its own, and can freeze, die or be cut off.

A host is a network namespace on a bridge, and what runs on it has a UTS namespace, in which the host's name is set. All
hosts share the disk, the users and the process ids of the machine: give each a folder of its own, and expect to see
its processes from outside.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local.process import plain_environment
from airflow_bottledwater.local.process import run as run_here
from airflow_bottledwater.processes import started

_NAMES = Path("/etc/netns")
_NAMESPACES = Path("/run/netns")
_DEVICES = Path("/sys/class/net")
_PROGRAMS = ("ip", "unshare", "hostname", "mount")
Command = Sequence[str | os.PathLike[str]]


@functools.cache
def available() -> str:
    """Why this machine cannot have other hosts; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    probe = ["ip", "link", "add", "bwprobe", "type", "veth", "peer", "name", "bwprobe1"]
    tried = subprocess.run(["unshare", "--net", "--uts", *probe], check=False, capture_output=True, text=True)
    return f"the kernel refuses a network namespace: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host. Its processes are all that run in its network namespace, whoever started them.

    :param name: what it calls itself, and what the others of its network call it.
    :param address: its address.
    """

    def __init__(self, name: str, address: str, namespace: str, device: str) -> None:
        self.name, self.address = name, address
        self._namespace, self._device = namespace, device

    def command(self, command: Command) -> list[str]:
        """The command that runs this one on the host. Its process id will be the command's own, since all before it is
        replaced."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self._namespace, *named, *map(str, command)]

    def run(
        self, command: Command, *, env: Mapping[str, str] | None = None, cwd: Path = Path("/"), timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end; its return code is not checked.

        :param env: the whole environment; by default the few variables that a server needs.
        :param timeout: seconds, after which it is killed.
        """
        return subprocess.run(
            self.command(command),
            env=plain_environment() if env is None else env,
            cwd=cwd,
            timeout=timeout,
            check=False,
            capture_output=True,
            text=True,
        )

    def start(
        self, command: Command, *, log: Path, env: Mapping[str, str] | None = None, cwd: Path = Path("/")
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in a session of its own.

        :param log: gets what it prints.
        """
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(command),
                env=plain_environment() if env is None else env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> dict[int, int]:
        """All processes of the host: process id → start time."""
        own = (_NAMESPACES / self._namespace).stat().st_ino
        found: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == own and (start := started(int(entry))) is not None:
                        found[int(entry)] = start
        return found

    def freeze(self) -> None:
        """Stop all processes: connections stay open, but get no answers."""
        self._signal_until(signal.SIGSTOP, lambda pid: _state(pid) in "tT")

    def thaw(self) -> None:
        """Let them go on."""
        self._signal_until(signal.SIGCONT, lambda pid: _state(pid) not in "tT")

    def kill(self) -> None:
        """Kill all processes at once, as when the power fails; the host itself stays, so they can be started again."""
        self._signal_until(signal.SIGKILL, lambda pid: False)

    def cut(self) -> None:
        """Pull the network cable: nothing gets through, and nobody is told."""
        _ip("link", "set", self._device, "down")

    def join(self) -> None:
        """Plug it in again."""
        _ip("link", "set", self._device, "up")

    def _signal_until(self, signum: int, done: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + 10
        # again, since a process may have started others meanwhile
        while left := [pid for pid in self.processes() if not done(pid)]:
            if time.monotonic() > deadline:
                raise LocalServerError(f"processes of {self.name} did not react to signal {signum}: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(0.02)


class Network(list[Host]):
    """The hosts of a network, in order.

    :param address: of this machine in it: servers that the hosts are to reach must listen here, not on 127.0.0.1 alone.
    :param name: what the hosts call this machine.
    """

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__()
        self._number, self._folder = number, folder
        self.address, self.name = f"10.99.{number}.1", "machine.test"

    def command(self, command: Command) -> list[str]:
        """The command that runs this one on the machine itself, but with the hosts' names known to it."""
        bound = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', f"{self._folder}/hosts"]
        return [*bound, *map(str, command)]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Network]:
    """Make hosts, named host1.test, host2.test and so on; kill all that runs on them and remove them in the end."""
    if reason := available():
        raise LocalServerError(f"no other hosts here: {reason}")
    _remove_abandoned()
    number = _bridge()
    try:
        network = Network(number, _NAMES / f"bw{number}")
        _describe(network, number, count)
        for i in range(1, count + 1):
            network.append(_host(number, i))
        yield network
    finally:
        _remove(number)


def _bridge() -> int:
    """Make a bridge of a number that no other network of this machine has."""
    for number in range(1, 255):
        if not (_DEVICES / f"bw{number}").exists():
            try:
                _ip("link", "add", f"bw{number}", "type", "bridge")
            except LocalServerError:
                continue  # another process was faster
            _ip("link", "set", f"bw{number}", "alias", f"{os.getpid()} {started(os.getpid())}")
            _ip("addr", "add", f"10.99.{number}.1/24", "dev", f"bw{number}")
            _ip("link", "set", f"bw{number}", "up")
            return number
    raise LocalServerError("all networks 10.99.1.0/24 to 10.99.254.0/24 are in use")


def _describe(network: Network, number: int, count: int) -> None:
    """Write the hosts file: `ip netns exec` puts a namespace's own in the place of /etc/hosts."""
    known = [("127.0.0.1", "localhost"), (network.address, f"{network.name} {os.uname().nodename}")]
    known += [(f"10.99.{number}.{10 + i}", f"host{i}.test") for i in range(1, count + 1)]
    text = "".join(f"{address} {name}\n" for address, name in known)
    for folder in [f"bw{number}", *(f"bw{number}-{i}" for i in range(1, count + 1))]:
        (_NAMES / folder).mkdir(parents=True, exist_ok=True)
        (_NAMES / folder / "hosts").write_text(text)


def _host(number: int, i: int) -> Host:
    namespace, device, address = f"bw{number}-{i}", f"bw{number}v{i}", f"10.99.{number}.{10 + i}"
    _ip("netns", "add", namespace)
    _ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", device, "master", f"bw{number}", "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    return Host(f"host{i}.test", address, namespace, device)


def _remove(number: int) -> None:
    for path in sorted(_NAMESPACES.glob(f"bw{number}-*")) if _NAMESPACES.exists() else []:
        # an abandoned network may be removed by two processes at once
        with contextlib.suppress(LocalServerError, FileNotFoundError):
            Host(path.name, "", path.name, "").kill()
            _ip("netns", "del", path.name)  # and with it the pair of devices
    for folder in [_NAMES / f"bw{number}", *_NAMES.glob(f"bw{number}-*")]:
        shutil.rmtree(folder, ignore_errors=True)
    # Without its namespace, the kernel removes a device a moment later. The bridge is removed last, since another
    # process may take the number as soon as it is free.
    for device in [*_DEVICES.glob(f"bw{number}v*"), _DEVICES / f"bw{number}"]:
        with contextlib.suppress(LocalServerError):
            _ip("link", "del", device.name)


def _remove_abandoned() -> None:
    """Remove the networks of processes that were killed before they could do it."""
    for device in _DEVICES.glob("bw[0-9]*"):
        try:
            pid, start = (device / "ifalias").read_text().split()
        except (OSError, ValueError):
            continue  # gone meanwhile, being made, or not a bridge
        if str(started(int(pid))) != start:
            _remove(int(device.name.removeprefix("bw")))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _ip(*arguments: str) -> None:
    run_here(["ip", *arguments], f"ip {' '.join(arguments)}", cwd=Path("/"))
