"""All metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from airflow_bottledwater.metrics.points import Point
from airflow_bottledwater.metrics.registry import METRICS, SECONDS
from airflow_bottledwater.metrics.sample import Distribution

#: the labels of a pipeline
PLACE = ("system", "database", "slot")

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def families(points: Iterable[Point]) -> Iterator[Metric]:
    """The values by metric, as the client library writes them."""
    found = {
        metric.name: _FAMILIES[metric.kind](metric.full, metric.sentence, labels=[*PLACE, *metric.labels])
        for metric in METRICS.values()
    }
    for point in points:
        family = found[point.metric.name]
        labels = [point.labels[name] for name in (*PLACE, *point.metric.labels)]
        if isinstance(point.value, Distribution):
            family.add_metric(labels, buckets=_buckets(point.value), sum_value=point.value.sum)
        else:
            family.add_metric(labels, point.value)
    yield from (family for family in found.values() if family.samples)


def _buckets(found: Distribution) -> list[tuple[str, int]]:
    """Cumulative, as Prometheus has them."""
    total, buckets = 0, []
    for bound, count in zip((*SECONDS, float("inf")), found.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets


class _Pipelines(Collector):
    def __init__(self, look: Callable[[], Iterable[Point]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        return families(self._look())

    def describe(self) -> Iterable[Metric]:
        # otherwise the registry would look, to learn the names
        return ()


def collector(look: Callable[[], Iterable[Point]]) -> CollectorRegistry:
    """A registry of the client library that looks whenever it is read.

    :param look: the present values.
    """
    found = CollectorRegistry()
    found.register(_Pipelines(look))
    return found


def serve(look: Callable[[], Iterable[Point]], address: str, port: int) -> Callable[[], None]:
    """Serve the values over HTTP, in threads; returns what ends that.

    :raises OSError: the port cannot be used.
    """
    server, thread = start_http_server(port, addr=address, registry=collector(look))

    def end() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return end
