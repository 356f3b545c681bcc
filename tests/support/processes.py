"""The processes of jobs, as the machine itself knows them."""

from __future__ import annotations

import os
from pathlib import Path

from airflow_bottledwater import processes


def job_processes(home: Path) -> dict[int, str]:
    """Every process that belongs to a job of this Airflow, orphans too: process id → the job's folder.

    The supervisor has the folder in its arguments, all that it started has it in its environment.
    """
    root = f"{home}/bottledwater/".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and processes.started(int(entry)) is not None:
            seen = proc(entry, "cmdline") + b"\0" + proc(entry, "environ")
            for part in seen.split(b"\0"):
                value = part.partition(b"BOTTLEDWATER_RUN_DIRECTORY=")[2] or part
                if value.startswith(root):
                    found[int(entry)] = value.removeprefix(root).split(b"/")[0].decode()
                    break
    return found


def proc(pid: int | str, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
