"""Families of processes, and the guard that ends them when the process that started them is gone.

A family is a process, its group and all its descendants: PostgreSQL's backends and some of Airflow's tasks leave the
group of their parent, so the group alone is not enough.

The guard is this file run as a script. It reads from its standard input, a pipe of which only the starting process
holds the other end: when that process ends, however it ends, the kernel closes the pipe. (The kernel's own
``PR_SET_PDEATHSIG`` follows the *thread* that started a process, so that a server started in a helper thread would
end with that thread; and it reaches only one process, not a family.) Standard library only, for it starts in 20 ms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_STATE, _PARENT, _GROUP, _STARTED = 0, 1, 2, 19
"""The fields of /proc/PID/stat that are used, counted from behind the name, which is in parentheses (proc(5))."""


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[_STATE] in "ZX" else fields


def started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is none (or only a zombie).

    Process id and start time together identify a process for good; the id alone does not, since the kernel reuses ids.
    """
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else None


def family(leader: int) -> dict[int, int]:
    """The processes of the leader's group and all descendants of the leader: process id → start time."""
    stats = {int(entry): fields for entry in os.listdir("/proc") if entry.isdigit() and (fields := _stat(int(entry)))}
    found = {pid for pid, fields in stats.items() if pid == leader or int(fields[_GROUP]) == leader}
    grown = True
    while grown:
        more = {pid for pid, fields in stats.items() if int(fields[_PARENT]) in found} - found
        found |= more
        grown = bool(more)
    return {pid: int(stats[pid][_STARTED]) for pid in found}


def send(processes: dict[int, int], signum: int) -> None:
    """Send a signal to each process, unless its id belongs to another process by now."""
    for pid, start in processes.items():
        if started(pid) == start:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass


def alive(processes: dict[int, int]) -> bool:
    """Whether any of the processes still runs."""
    return any(started(pid) == start for pid, start in processes.items())


def kill_family(leader: int, start: int) -> None:
    """Kill the leader and its family, and wait until they are gone, for at most 10 seconds."""
    if started(leader) == start:
        # a stopped leader starts no child between the search and the kill
        send({leader: start}, signal.SIGSTOP)
    elif started(leader) is not None:
        return  # the id belongs to another process now, so the group has ended, too
    members = family(leader)
    deadline = time.monotonic() + 10
    while alive(members) and time.monotonic() < deadline:
        send(members, signal.SIGKILL)
        time.sleep(0.01)


class Guard:
    """This process's connection to its guard, which is started when the first family is to be watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._parents: subprocess.Popen[bytes] | None = None  # kept: dropping a Popen makes it warn
        # a forked copy of this process must neither hold the pipe open nor write to it
        os.register_at_fork(after_in_child=self._forget)

    def watch(self, pid: int, start: int, first_signal: int) -> None:
        """Have the family ended when this process ends: `first_signal` goes to its leader, SIGKILL to those left after
        2 s."""
        self._write(f"+ {pid} {start} {int(first_signal)}\n")

    def release(self, pid: int, start: int) -> None:
        """Stop watching the family."""
        if self._process is not None:
            self._write(f"- {pid} {start} 0\n")

    def _write(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())

    def _forget(self) -> None:
        self._lock = threading.Lock()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._parents, self._process = self._process, None


def main() -> None:
    """Read `+ pid start signal` and `- pid start 0` until the end of the input, then end the families that are still
    watched."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    watched: dict[tuple[int, int], int] = {}
    for line in sys.stdin:
        sign, pid, start, first_signal = line.split()
        if sign == "+":
            watched[int(pid), int(start)] = int(first_signal)
        else:
            watched.pop((int(pid), int(start)), None)
    families = []
    for (pid, start), first_signal in watched.items():
        if started(pid) == start:
            families.append(family(pid))
            send({pid: start}, first_signal)
            send({pid: start}, signal.SIGCONT)  # a stopped process would not handle the first signal
    deadline = time.monotonic() + 2
    while any(map(alive, families)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for members in families:
        send(members, signal.SIGKILL)
    for pid, start in watched:
        kill_family(pid, start)


if __name__ == "__main__":
    main()
