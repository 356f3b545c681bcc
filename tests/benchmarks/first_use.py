"""``first_use``: seconds until a new worker process has all compiled code, with a warm cache; references: with a cold
one, the slower of two cold ones that start at once, and an interpreter that imports numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import emit

_READY = "from airflow_bottledwater.warm import warm_up; warm_up()"
_REPEAT = 5


def _started(code: str, cache: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    return subprocess.Popen([sys.executable, "-c", code], env={**environment, "XDG_CACHE_HOME": cache})


def _seconds(code: str, cache: str, processes: int = 1) -> float:
    started = time.perf_counter()
    running = [_started(code, cache) for _ in range(processes)]
    assert not any(process.wait() for process in running)
    return time.perf_counter() - started


def run(stack: DataStack) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        cold, both = _seconds(_READY, one), _seconds(_READY, other, 2)
        warm = min(_seconds(_READY, one) for _ in range(_REPEAT))
        numpy = min(_seconds("import numpy", one) for _ in range(_REPEAT))
    emit("first_use", warm, "s", {"cold": cold, "two_cold_at_once": both, "numpy": numpy})
