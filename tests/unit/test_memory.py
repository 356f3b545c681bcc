"""Memory that processes keep while they work, and give back while they rest."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from airflow_bottledwater import memory
from airflow_bottledwater.memory import Rest


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_given_back_once_whenever_something_begins_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls, released = [100.0], [], []
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "give_back", lambda: calls.append(now[0]))
    rest = Rest(lambda: released.append(now[0]))
    for seconds, worked in (
        (1, True),
        (3, False),
        (3, False),
        (3, False),
        (60, False),
        (1, True),
        (4, False),
        (2, False),
    ):
        now[0] += seconds
        rest.note(worked=worked)
    assert calls == released == [107.0, 177.0]


def test_freed_memory_goes_back_to_the_kernel() -> None:
    # below the size from which malloc takes memory from the kernel, and gives it back, by itself
    pieces = [np.ones(100_000, dtype=np.uint8) for _ in range(600)]
    kept = pieces[::2]
    del pieces
    before = _resident()
    memory.give_back()
    assert before - _resident() > 20_000_000
    assert all(piece[0] == 1 for piece in kept)


def test_freed_memory_is_kept_for_the_next_batch() -> None:
    code = (
        "import sys\n"
        "from airflow_bottledwater import memory\n"
        "if sys.argv[1:]: memory.keep()\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "made = [b'x' * (15 << 20) for _ in range(3)]; full = resident(); del made\n"
        "print(full - resident())"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC_", "MALLOC_", "LD_"))}
    given_back = [
        int(
            subprocess.run(
                [sys.executable, "-c", code, *more], capture_output=True, text=True, check=True, env=environment
            ).stdout
        )
        for more in ((), ("keep",))
    ]
    assert given_back[0] > 25_000_000
    assert given_back[1] < 5_000_000


def test_what_was_loaded_is_not_looked_through_again() -> None:
    code = (
        "import gc\n"
        "from airflow_bottledwater import memory\n"
        "memory.settle(); first = gc.get_freeze_count()\n"
        "kept = [[] for _ in range(50_000)]; memory.settle()\n"
        "print(first > 1000, gc.get_freeze_count() <= first)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["True", "True"]


def test_what_refers_to_itself_is_freed_when_memory_is_given_back() -> None:
    class Publisher:
        pass

    publisher = Publisher()
    publisher.itself, gone = publisher, []  # type: ignore[attr-defined]
    weakref.finalize(publisher, gone.append, True)
    del publisher
    memory.give_back()
    assert gone
