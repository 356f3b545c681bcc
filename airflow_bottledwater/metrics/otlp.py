"""All metrics as OpenTelemetry's collector takes them, pushed by OTLP over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable
from importlib import metadata
from typing import cast

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from airflow_bottledwater.metrics.points import Point
from airflow_bottledwater.metrics.registry import PREFIX, SECONDS
from airflow_bottledwater.metrics.registry import Metric as Described
from airflow_bottledwater.metrics.sample import Distribution

#: a unit at the end of a name, and its code in UCUM, which OpenTelemetry prescribes; of the others, whose unit is what
#: they count, the code is a note: a collector adds "_ratio" to the name of a gauge with the unit 1
_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}
_CUMULATIVE = AggregationTemporality.CUMULATIVE


def data(points: Iterable[Point], now: float) -> MetricsData:
    """The values as OTLP has them.

    :param now: seconds since 1970.
    """
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.metric.name, []).append(point)
    metrics = [_metric(of[0].metric, of, _nanoseconds(now)) for of in found.values()]
    resource = Resource.create({"service.name": "bottledwater"})
    scope = InstrumentationScope("airflow_bottledwater", metadata.version("airflow-provider-bottledwater"))
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _metric(metric: Described, of: list[Point], now: int) -> Metric:
    unit = next((code for suffix, code in _UNITS.items() if metric.name.endswith(suffix)), f"{{{metric.name}}}")
    # with its unit: lag_bytes and lag_seconds are two metrics
    name = f"{PREFIX.rstrip('_')}.{metric.name}"
    if metric.kind == "gauge":
        held: Gauge | Sum | Histogram = Gauge([_number(point, now) for point in of])
    elif metric.kind == "counter":
        held = Sum([_number(point, now) for point in of], _CUMULATIVE, is_monotonic=True)
    else:
        held = Histogram([_histogram(p, p.value, now) for p in of if isinstance(p.value, Distribution)], _CUMULATIVE)
    return Metric(name, metric.sentence, unit, held)


def _number(point: Point, now: int) -> NumberDataPoint:
    assert not isinstance(point.value, Distribution)
    return NumberDataPoint(dict(point.labels), _nanoseconds(point.started), now, point.value)


def _histogram(point: Point, value: Distribution, now: int) -> HistogramDataPoint:
    # smallest and largest are not known, and OTLP need not have them
    smallest = largest = cast(float, None)
    started, count = _nanoseconds(point.started), sum(value.counts)
    return HistogramDataPoint(
        dict(point.labels), started, now, count, value.sum, value.counts, list(SECONDS), smallest, largest
    )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


class Pusher:
    """Pushes values to a collector.

    :param endpoint: its URL, with the path ``/v1/metrics``; empty for the one of OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPMetricExporter(endpoint=endpoint or None)

    def push(self, points: Iterable[Point]) -> bool:
        """Push values; returns whether the collector took them."""
        return self._exporter.export(data(points, time.time())) is MetricExportResult.SUCCESS

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
