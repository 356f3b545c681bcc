"""``first_use``: seconds until a new worker process has all compiled code, with a warm cache; references: with a cold
one, the slower of two cold ones that start at once, and an interpreter that imports numpy. The second line is of a new
host, with the code that the wheel brings; its reference compiles, since there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import airflow_bottledwater
from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import emit

_READY = "from airflow_bottledwater.warm import warm_up; warm_up()"
_REPEAT = 5


class _Installation:
    """A copy of the package without compiled code, and an empty cache."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        package = Path(airflow_bottledwater.__file__).parent
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt_code", "www")
        shutil.copytree(package, self._folder / package.name, ignore=ignored)

    def prebuild(self) -> None:
        """Compile what a wheel brings."""
        assert self._started("-m", "airflow_bottledwater.prebuild", cache="none").wait() == 0

    def seconds(self, code: str, cache: str, processes: int = 1) -> float:
        """Until processes that start at once have run some code.

        :param cache: the name of their cache.
        """
        started = time.perf_counter()
        running = [self._started("-c", code, cache=cache) for _ in range(processes)]
        assert not any(process.wait() for process in running)
        return time.perf_counter() - started

    def _started(self, *arguments: str, cache: str) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
        environment["XDG_CACHE_HOME"] = str(self._folder / "caches" / cache)
        # standard output is for results only
        return subprocess.Popen([sys.executable, *arguments], env=environment, cwd=self._folder, stdout=sys.stderr)


def run(stack: DataStack) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        host = _Installation(folder)
        cold, both = host.seconds(_READY, "one"), host.seconds(_READY, "other", 2)
        warm = min(host.seconds(_READY, "one") for _ in range(_REPEAT))
        numpy = min(host.seconds("import numpy", "one") for _ in range(_REPEAT))
        emit("first_use", warm, "s", {"cold": cold, "two_cold_at_once": both, "numpy": numpy})
        host.prebuild()
        new = min(host.seconds(_READY, f"new {k}") for k in range(_REPEAT))
        emit("first_use", new, "s", {"compiling": cold}, host="new")
