"""``metrics``: percent of the processor time of a stream that measuring takes, while it publishes a backlog: counting
each batch, and a sample every ten seconds. ``idle`` is the percentage of one core that samples take while nothing
changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.metrics import batch
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.sampler import Sampler
from airflow_bottledwater.metrics.source import SourceLook
from tests.benchmarks.common import Workload, emit, scaled
from tests.support.running import run_stream

_CHANGES = 1_000_000
_INTERVAL = 10.0


class _Timed:
    """Measures the processor time of the calling thread in some functions."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def wrap(self, owner: Any, name: str) -> None:
        """Measure a function from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        setattr(owner, name, timed)


def run(stack: DataStack) -> None:
    """See the module."""
    counting, sampling = _Timed(), _Timed()
    counting.wrap(batch, "count")
    counting.wrap(Meter, "add")
    counting.wrap(Meter, "observe")
    for owner, name in ((Sampler, "take"), (Sampler, "_write"), (SourceLook, "look")):
        sampling.wrap(owner, name)
    source = Workload(stack, skip_snapshot=True, metrics_interval=1.0)
    source.create()
    source.insert(600)
    run_stream(source.pipeline, bounded=True)  # compiled, and connected once
    for single in (False, True):
        changes = source.churn(scaled(_CHANGES) // (5 if single else 1), single=single)
        before, began = counting.seconds, time.process_time()
        first, calls, sampled = time.monotonic(), sampling.calls, sampling.seconds
        run_stream(source.pipeline, bounded=True)
        seconds, used = time.monotonic() - first, time.process_time() - began
        counted = counting.seconds - before
        # three calls a sample
        sample = (sampling.seconds - sampled) / max(1, sampling.calls - calls) * 3
        share = (counted + sample * seconds / _INTERVAL) / used
        emit(
            "metrics",
            100 * share,
            "%",
            {"stream_cpu_s": used},
            engine="single" if single else "batched",
            ns_per_change=1e9 * counted / changes,
            ms_per_sample=1e3 * sample,
            idle=100 * sample / _INTERVAL,
        )
    source.drop()
