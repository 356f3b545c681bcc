"""The present values of all metrics of all pipelines of a Kafka: from their last samples and from what the shared topic
says of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_bottledwater.jobs import pipelines
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.registry import METRICS, Metric
from airflow_bottledwater.metrics.sample import Distribution, Sample
from airflow_bottledwater.model.slot import parts
from airflow_bottledwater.state import problems
from airflow_bottledwater.state.control_records import (
    SNAPSHOT,
    SnapshotReport,
    StatusRecord,
    VerifiedRecord,
    decode,
    is_below,
    reading_key,
    verified_key,
)

#: the states of a job, all of which are always given: a series that is absent fires no alert
STATES = ("starting", "snapshot", "streaming", "waiting", "stopped", "finished", "failed")


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric of one pipeline.

    :param labels: their values by their names, with those of the pipeline.
    :param started: since when a counter or a histogram counts, in seconds since 1970; 0 for a gauge, and if it is not
        known.
    """

    metric: Metric
    labels: Mapping[str, str]
    value: float | Distribution
    started: float = 0.0


def points(samples: Mapping[str, Sample], records: Mapping[str, Any], now: float | None = None) -> Iterator[Point]:
    """The present values.

    :param samples: the last of each pipeline, by its name.
    :param records: those of the shared topic.
    :param now: seconds since 1970.
    """
    now = time.time() if now is None else now
    statuses = pipelines.statuses(records)
    for name, status in statuses.items():
        yield from _of_records(name, status, records, now)
    for name, sample in samples.items():
        if sample.present(now) and name in statuses:
            yield from _of_sample(sample)


def place(name: str) -> dict[str, str]:
    """The labels of a pipeline: its name has the system identifier, database and slot."""
    system, database, slot = parts(name)
    return {"system": system, "database": database, "slot": slot}


def _of_sample(sample: Sample) -> Iterator[Point]:
    where = place(sample.pipeline)
    for name, values in sample.values.items():
        # one that this version does not know is left out
        if (metric := METRICS.get(name)) is None or metric is registry.PROBLEMS:
            continue
        started = sample.started if metric.kind == "counter" and not metric.lasting else 0.0
        for each in values:
            labels = dict(zip(metric.labels, each.labels, strict=False))
            yield Point(metric, {**where, **labels}, each.value, started)
    for name, distribution in sample.distributions.items():
        if (metric := METRICS.get(name)) is not None:
            yield Point(metric, where, distribution, sample.started)


def _of_records(name: str, status: StatusRecord, records: Mapping[str, Any], now: float) -> Iterator[Point]:
    where = place(name)
    # where no job can begin, the last one that could says nothing of what is; and a snapshot is no bounded run, after
    # which nothing has to follow for a while
    snapshot = status.state == "finished" and status.job.kind == SNAPSHOT
    present = "failed" if status.not_begun else SNAPSHOT if snapshot else status.state
    for state in STATES:
        yield Point(registry.STATE, {**where, "state": state}, float(present == state))
    yield Point(registry.WANTED, where, float(status.wanted))
    yield Point(registry.REPORT_AGE, where, max(0.0, now - status.at))
    yield Point(registry.READ_AT, where, now)
    yield Point(registry.OPEN_LETTERS, where, status.open_dead_letters)
    for kind, count in problems.by_kind(status.standing).items():
        yield Point(registry.PROBLEMS, {**where, "kind": kind}, count)
    prefix = reading_key(name, "")
    live = [decode(SnapshotReport, raw) for key, raw in records.items() if is_below(prefix, key)]
    open_ = [each for each in live if each is not None and not each.ended]
    for state, count in Counter(each.state for each in open_).items():
        yield Point(registry.LIVE, {**where, "state": state}, count)
    yield Point(registry.LIVE_ROWS, where, sum(each.rows for each in open_))
    if (verified := decode(VerifiedRecord, records.get(verified_key(name)))) is not None:
        if verified.at:
            yield Point(registry.VERIFIED_AGE, where, max(0.0, now - verified.at))
        for result in ("different", "unverified"):
            yield Point(registry.VERIFIED_WRONG, {**where, "result": result}, len(getattr(verified, result)))
