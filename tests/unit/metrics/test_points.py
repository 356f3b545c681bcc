"""Since when the counters count that are told to OpenTelemetry."""

from __future__ import annotations

from airflow_bottledwater.metrics.otlp import data
from airflow_bottledwater.metrics.points import points
from airflow_bottledwater.metrics.sample import Labelled, Sample
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.state.control_records import StatusRecord, encode, status_key

NAME = "7/shop/orders"


def test_a_counter_that_goes_on_over_jobs_did_not_begin_with_the_job() -> None:
    counters = ("published_bytes", "cpu_seconds", "superseded_rows", "dead_letters", "claims", "slot_spilled_bytes")
    sample = Sample(NAME, "orders", "j", "stream", "streaming", 900.0, 1000.0, 10.0,
                    {each: [Labelled(5.0)] for each in counters}, {})  # fmt: skip
    status = StatusRecord("streaming", Job(4, "j", "stream", "h", 5, 900.0), "orders")
    found = data(points({NAME: sample}, {status_key(NAME): encode(status)}, 1000.0), 1000.0)
    metrics = found.resource_metrics[0].scope_metrics[0].metrics
    started = {each.name.partition(".")[2]: each.data.data_points[0].start_time_unix_nano for each in metrics}
    begun = int(900e9)
    assert [started[each] for each in counters] == [begun, begun, 0, 0, 0, 0]
