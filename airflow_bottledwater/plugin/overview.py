"""All pipelines of a Kafka as the page lists them: what is wrong first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_bottledwater.hooks.instance import ours
from airflow_bottledwater.jobs.pipelines import HealthLimits, wrong
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.points import place
from airflow_bottledwater.metrics.rates import between, bound, rate
from airflow_bottledwater.metrics.registry import Metric
from airflow_bottledwater.metrics.sample import Sample, newest
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.plugin.watch import KafkaLook
from airflow_bottledwater.state.control_records import StatusRecord, VerifiedRecord, decode, verified_key

#: what a row has of the last sample
_VALUES: dict[str, Metric] = {
    "lag_bytes": registry.LAG_BYTES,
    "lag_seconds": registry.LAG_SECONDS,
    "wal_kept": registry.WAL_KEPT,
    "wal_limit": registry.WAL_LIMIT,
    "wal_safe": registry.WAL_SAFE,
    "memory": registry.MEMORY,
}


def row(kafka: str, name: str, status: StatusRecord, seen: KafkaLook) -> dict[str, Any]:
    """One pipeline.

    :param kafka: the id of the connection.
    """
    now, quiet = time.time(), name in seen.silent
    samples = seen.samples.get(name, ())
    last = newest(samples, now)
    verified = decode(VerifiedRecord, seen.records.get(verified_key(name)))
    owner = owner_of(status)
    return {
        "kafka": kafka,
        "name": name,
        **place(name),
        "state": "silent" if quiet else status.state,
        "wanted": status.wanted,
        "retired": status.retired,
        "kind": status.job.kind,
        "reported": status.at,
        "rate": rate(samples, registry.ROWS) if last is not None else None,
        "delay": _delay(samples) if last is not None else None,
        **{each: last.value(metric.name) if last is not None else None for each, metric in _VALUES.items()},
        "dead_letters": status.open_dead_letters,
        "verified": None if verified is None or not verified.at else {
            "at": verified.at, "equal": not verified.different and not verified.unverified
        },
        "snapshot": snapshot(status),
        "wrong": wrong(name, status, seen.records, HealthLimits(), alive=not quiet, now=now),
        "task": None if owner is None else {
            "dag_id": owner.dag_id, "run_id": owner.run_id, "task_id": owner.task_id, "map_index": owner.map_index
        },
    }  # fmt: skip


def owner_of(status: StatusRecord) -> Owner | None:
    """The task of this Airflow that has submitted a pipeline's job; None if none has, as for one of another Airflow,
    whose DAGs and runs may have the ids of others here."""
    owner = status.job.owner
    return owner if owner is not None and ours(owner) else None


def _delay(samples: Sequence[Sample]) -> float | None:
    """What 95 % of the delays did not exceed, over all samples of the last job that are kept, about a minute: a quiet
    pipeline has none in most of them."""
    first = next(each for each in samples if each.job == samples[-1].job)
    return bound(between(first, samples[-1], registry.DELAY_SECONDS), 0.95)


def snapshot(status: StatusRecord) -> dict[str, float] | None:
    """How far the snapshot is; None while none runs."""
    if status.job.kind != "snapshot" or status.ended:
        return None
    kept = ("ranges", "ranges_done", "rows", "bytes", "total_bytes", "seconds_left")
    return {name: value for name in kept if isinstance(value := status.progress.get(name), int | float)}


def rows(kafka: str, seen: KafkaLook) -> list[dict[str, Any]]:
    """All pipelines, those with something wrong first."""
    return worst_first([row(kafka, name, status, seen) for name, status in seen.statuses.items()])


def worst_first(found: list[Mapping[str, Any]] | list[dict[str, Any]]) -> list[Any]:
    """Rows with something wrong first, then those that run, then those that are not meant to; each by its slot."""
    return sorted(found, key=lambda each: (not each["wrong"], not each["wanted"], each["slot"], each["name"]))
