"""``several``: proportional MB of memory that each of several pipelines takes on one host, run by the command, some
seconds after each has published a backlog; pages that processes share are divided among them. ``by_process`` says what
each process of one takes.

Reference: the same of the first pipeline, before there are others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from airflow_bottledwater.jobs.status import snapshot_is_complete
from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.command import running
from tests.benchmarks.common import Follower, Workload, descendants, emit, is_jvm, parent, proportional, scaled
from tests.support.waiting import until

_PIPELINES = 3
_CHANGES = 200_000
#: until a stream has given back what it does not need while it rests, and Spark has ended idle workers of the snapshot
#: (after a minute)
_REST_SECONDS = 80.0
_MB = 1_000_000
#: words of the command lines of Python processes, in the order of the search
_KINDS = ("spark.installed", "supervise", "spark_jobs")


def _kind(pid: int, parent_is_jvm: bool) -> str:
    """What a process is for."""
    if is_jvm(pid):
        return "jvm"
    line = Path(f"/proc/{pid}/cmdline").read_text()
    kind = next((k for k in _KINDS if k in line), "command")
    if kind == "spark.installed" and not parent_is_jvm:
        return "worker"
    return {"spark.installed": "daemon", "spark_jobs": "driver", "supervise": "supervisor"}.get(kind, kind)


def _memory(commands: Sequence[int]) -> dict[str, float]:
    """MB by kind of process, of each pipeline."""
    found: Counter[str] = Counter()
    for pid in [p for command in commands for p in (command, *descendants(command))]:
        found[_kind(pid, is_jvm(parent(pid)))] += proportional(pid)
    return {kind: size / _MB / len(commands) for kind, size in found.items()}


def run(stack: DataStack) -> None:
    """See the module."""
    alone: dict[str, float] = {}
    commands: list[int] = []
    sources = []
    with ExitStack() as block:
        for _ in range(_PIPELINES):
            source = Workload(stack)
            source.insert(600)
            source.create()
            commands.append(block.enter_context(running(source)))
            follower = Follower(source)
            until(lambda s=source: snapshot_is_complete(s.pipeline), "the end of the snapshot", 300)  # type: ignore[misc]
            follower.until(source.churn(scaled(_CHANGES, 1000)))
            follower.close()
            sources.append(source)
            if not alone:
                time.sleep(_REST_SECONDS)
                alone = _memory(commands)
        time.sleep(_REST_SECONDS)
        each = _memory(commands)
    emit(
        "several", sum(each.values()), "MB", {"alone": sum(alone.values())}, pipelines=_PIPELINES, by_process=each,
        changes=scaled(_CHANGES, 1000),
    )  # fmt: skip
    for source in sources:
        source.released()
        source.drop()
