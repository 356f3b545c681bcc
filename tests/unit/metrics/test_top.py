"""What ``bottledwater top`` shows, without a Kafka."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from airflow_bottledwater.cli.top import screen
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.rates import quantile, rate
from airflow_bottledwater.metrics.registry import SECONDS
from airflow_bottledwater.metrics.sample import Distribution, Labelled, Sample
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.state.control_records import StatusRecord, encode, status_key


class Told:
    """Pipelines as they have reported."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.taken: dict[str, list[Sample]] = {}

    def add(self, slot: str, *samples: Sample, **status: Any) -> None:
        now = time.time()
        job = Job(1, "j", "stream", "h", 5, now)
        record = StatusRecord(status.pop("state", "streaming"), job, slot, at=status.pop("at", now), **status)
        self.records[status_key(f"7/shop/{slot}")] = encode(record)
        self.taken[f"7/shop/{slot}"] = list(samples)

    def read(self) -> Mapping[str, Any]:
        return self.records

    def samples(self, name: str) -> list[Sample]:
        return self.taken[name]


def taken(ago: float, rows: int, job: str = "j") -> Sample:
    counts = [0, 0, rows, *[0] * (len(SECONDS) - 2)]
    values = {
        "rows": [Labelled(rows, ("public.orders", "insert"))],
        "lag_bytes": [Labelled(1_500_000)],
        "lag_seconds": [Labelled(75)],
        "slot_wal_kept_bytes": [Labelled(2e9)],
        "slot_wal_limit_bytes": [Labelled(1e10)],
        "memory_bytes": [Labelled(4e8)],
    }
    at = time.time() - ago
    return Sample(
        "7/shop/a", "a", job, "stream", "streaming", 0.0, at, 10.0, values, {"delay_seconds": Distribution(counts, 1.0)}
    )


def shown(found: Told, slot: str = "") -> list[str]:
    console = Console(width=160, markup=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(found, slot))  # type: ignore[arg-type]
    return console.export_text().splitlines()


def test_all_pipelines_are_shown_those_with_something_wrong_first() -> None:
    found = Told()
    found.add("a", taken(10, 100), taken(0, 300))
    found.add("b", state="failed", error="The slot is lost.", permanent=True)
    lines = shown(found)
    rows = [line for line in lines if "7/shop" in line and "│" in line]
    assert "7/shop/b" in rows[0] and "failed" in rows[0] and "7/shop/a" in rows[1]
    for part in ("20", "1.5 MB, 75 s", "≤ 25 ms", "2.0 GB of 10.0 GB", "400 MB"):
        assert part in rows[1], part
    assert any("7/shop/b: The job failed for good" in line and "The slot is lost." in line for line in lines)


def test_one_pipeline_is_shown_with_its_tables() -> None:
    found = Told()
    found.add("a", taken(10, 100), taken(0, 300))
    found.add("b")
    lines = shown(found, "a")
    assert not any("7/shop/b" in line for line in lines)
    assert any("public.orders" in line and " 20 " in line for line in lines)
    assert shown(found, "c") == ["No pipeline has a slot 'c'."]
    assert shown(Told()) == ["No pipeline has ever reported to this Kafka."]


def test_what_an_old_sample_says_is_not_shown_as_the_present() -> None:
    found = Told()
    found.add("a", taken(60, 100), taken(50, 300))
    assert not any("1.5 MB" in line for line in shown(found))
    assert not any("public.orders" in line for line in shown(found, "a"))


def test_a_rate_is_of_one_job_only() -> None:
    assert rate([taken(10, 100, "before"), taken(0, 5)], registry.ROWS) == 0
    assert rate([taken(0, 5)], registry.ROWS) == 0
    assert quantile([taken(10, 100, "before"), taken(0, 5)], registry.DELAY_SECONDS, 0.5) is None
    assert quantile([taken(10, 100), taken(0, 300)], registry.DELAY_SECONDS, 0.95) == 0.025
    assert quantile([taken(10, 100), taken(0, 100)], registry.DELAY_SECONDS, 0.95) is None
