"""How fast counters grow, and how long durations are, between two samples."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.metrics.registry import SECONDS, Metric
from airflow_bottledwater.metrics.sample import Distribution, Sample


def rate(samples: Sequence[Sample], metric: Metric, *labels: str) -> float:
    """How much a counter has grown in a second between the last two samples of one job; 0 if there are none."""
    if len(samples) < 2 or samples[-1].job != samples[-2].job:
        return 0.0
    before, last = samples[-2:]
    grown = (last.value(metric.name, *labels) or 0.0) - (before.value(metric.name, *labels) or 0.0)
    return max(0.0, grown) / max(0.001, last.at - before.at)


def between(before: Sample, last: Sample, metric: Metric) -> list[int]:
    """How often each duration was seen between two samples of one job, by bucket; empty if it is not measured."""
    found = last.distributions.get(metric.name)
    if found is None:
        return []
    earlier = before.distributions.get(metric.name) or Distribution([0] * len(found.counts), 0.0)
    return [a - b for a, b in zip(found.counts, earlier.counts, strict=True)]


def bound(counts: Sequence[int], share: float) -> float | None:
    """A bound that this share of durations did not exceed, in seconds; None if there were none.

    :param counts: by bucket, see :class:`~airflow_bottledwater.metrics.sample.Distribution`.
    """
    if (total := sum(counts)) <= 0:
        return None
    reached = 0
    for seconds, count in zip((*SECONDS, SECONDS[-1]), counts, strict=True):
        reached += count
        if reached >= share * total:
            return seconds
    return SECONDS[-1]


def quantile(samples: Sequence[Sample], metric: Metric, share: float) -> float | None:
    """A bound that this share of the durations between the last two samples of one job did not exceed, in seconds;
    None if there were none."""
    if len(samples) < 2 or samples[-1].job != samples[-2].job:
        return None
    return bound(between(samples[-2], samples[-1], metric), share)
