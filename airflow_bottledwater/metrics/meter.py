"""What a job counts while it works."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

from airflow_bottledwater.metrics.registry import ROWS, SECONDS, Metric
from airflow_bottledwater.metrics.sample import Distribution, Labelled


class Meter:
    """Counts; may be used from several threads. A call takes a microsecond, so it is made for a batch, not for a row.

    :ivar ahead: seconds by which the source's clock is ahead of this host's; None until it was measured.
    :ivar committed: commit time of the last transaction that was published, in seconds since 1970 by the source's
        clock; 0 before that.
    :ivar behind: bytes of WAL and seconds by which the stream was behind when that was measured last; None before that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[str, dict[tuple[str, ...], float]] = {}
        self._observed: dict[str, Distribution] = {}
        self.ahead: float | None = None
        self.committed = 0.0
        self.behind: tuple[float, float] | None = None

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Count.

        :param labels: the values of the metric's labels.
        """
        with self._lock:
            of = self._counted.setdefault(metric.name, {})
            of[labels] = of.get(labels, 0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Note the present value.

        :param labels: the values of the metric's labels.
        """
        with self._lock:
            self._counted.setdefault(metric.name, {})[labels] = value

    def observe(self, metric: Metric, seconds: float) -> None:
        """Count one duration."""
        counts = [0] * (len(SECONDS) + 1)
        counts[bisect.bisect_left(SECONDS, seconds)] = 1
        self.observe_all(metric, counts, seconds)

    def observe_all(self, metric: Metric, counts: Sequence[int], total: float) -> None:
        """Count many durations.

        :param counts: how many are in each bucket: up to each of :data:`SECONDS`, and above the last.
        :param total: their sum, in seconds.
        """
        with self._lock:
            before = self._observed.get(metric.name, Distribution([0] * (len(SECONDS) + 1), 0.0))
            self._observed[metric.name] = Distribution(
                [a + b for a, b in zip(before.counts, counts, strict=True)], before.sum + total
            )

    def rows(self) -> dict[str, int]:
        """The changes that were published, by table."""
        found: dict[str, int] = {}
        with self._lock:
            for (table, _), count in self._counted.get(ROWS.name, {}).items():
                found[table] = found.get(table, 0) + int(count)
        return found

    def counted(self) -> tuple[dict[str, list[Labelled]], dict[str, Distribution]]:
        """All that was counted until now: values by metric, and distributions."""
        with self._lock:
            values = {
                name: [Labelled(value, labels) for labels, value in of.items()] for name, of in self._counted.items()
            }
            return values, dict(self._observed)
