"""The history of a pipeline, from the topic of samples: what its plots show."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from airflow_bottledwater.kafka.clients import errors, made, passes, reader_config
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.history import first_since
from airflow_bottledwater.metrics.rates import between, bound
from airflow_bottledwater.metrics.registry import Metric
from airflow_bottledwater.metrics.sample import METRICS_TOPIC, Sample, decode

#: seconds of a plot, and seconds of each of its points
PERIODS = {900: 10, 3600: 30, 21600: 120, 86400: 300, 604800: 1800}
#: seconds in which an answer is given, with what was read by then
_ANSWER = 1.5
#: how many plots are kept
_KEPT = 64

#: what is shown: the largest value in the time of a point
_GAUGES: dict[str, Metric] = {
    "lag_bytes": registry.LAG_BYTES,
    "lag_seconds": registry.LAG_SECONDS,
    "wal_kept": registry.WAL_KEPT,
    "wal_limit": registry.WAL_LIMIT,
    "memory": registry.MEMORY,
    "problems": registry.PROBLEMS,
}
#: what is shown in a second
_COUNTERS: dict[str, tuple[Metric, str]] = {
    "inserts": (registry.ROWS, "insert"),
    "updates": (registry.ROWS, "update"),
    "deletes": (registry.ROWS, "delete"),
    "bytes": (registry.BYTES, ""),
}
#: durations, of which the median and the 95th percentile are shown
_DURATIONS = {"delay": registry.DELAY_SECONDS, "commit": registry.COMMIT_SECONDS}


@dataclass(slots=True)
class _Bin:
    """What was measured in the time of one point."""

    gauges: dict[str, float] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    counts: dict[str, list[int]] = field(default_factory=dict)


class Past:
    """The plots of one pipeline over one period; read forward, as far as there is time for in each call.

    :param name: the pipeline's.
    :param period: one of :data:`PERIODS`.
    """

    def __init__(self, kafka: Mapping[str, str], name: str, period: int) -> None:
        self._kafka, self._name, self._period, self._step = dict(kafka), name, period, PERIODS[period]
        self._bins: dict[int, _Bin] = {}
        self._last: Sample | None = None
        self._offset = -1
        self._complete = False
        self._reading, self._adding = threading.Lock(), threading.Lock()

    def look(self) -> dict[str, Any]:
        """The plots, with what there is by now.

        :raises Outage: Kafka does not answer.
        """
        if self._reading.acquire(blocking=False):
            try:
                with errors(self._kafka):
                    self._read(time.monotonic() + _ANSWER)
            finally:
                self._reading.release()
        return self._shown()

    def _read(self, deadline: float) -> None:
        """Read on to the topic's present end."""
        consumer = made(Consumer, reader_config(self._kafka, auto_offset_reset="earliest"))
        try:
            end = self._begin(consumer)
            self._complete = self._offset >= end
            if self._complete:
                return
            consumer.assign([TopicPartition(METRICS_TOPIC, 0, self._offset)])
            while not self._complete and time.monotonic() < deadline:
                messages = consumer.consume(500, 0.2)
                with self._adding:
                    for message in messages:
                        self._take(message)
                self._complete = self._offset >= end
        finally:
            consumer.close()

    def _begin(self, consumer: Consumer) -> int:
        """Find out where the period begins, unless this is known; returns the topic's end, -1 if there is none."""
        try:
            first, end = consumer.get_watermark_offsets(TopicPartition(METRICS_TOPIC, 0), timeout=_ANSWER)
            if self._offset < 0:
                self._offset = first_since(consumer, self._period, int(end), timeout=_ANSWER)
        except KafkaException as error:
            if error.args[0].code() not in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                raise
            return -1  # nothing was ever measured
        if self._offset > end:  # the topic was deleted and made again
            self._offset = first
        self._offset = max(self._offset, first)  # old ones were deleted
        return int(end)

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if not passes(error):
                raise KafkaException(error)
            return
        self._offset = (message.offset() or 0) + 1
        # those of other pipelines are not even decoded
        if message.key() == self._name.encode() and (sample := decode(message.value())) is not None:
            self._add(sample)

    def _add(self, sample: Sample) -> None:
        made = self._bins.setdefault(int(sample.at // self._step), _Bin())
        for name, metric in _GAUGES.items():
            if (value := sample.value(metric.name)) is not None:
                made.gauges[name] = max(value, made.gauges.get(name, value))
        before, self._last = self._last, sample
        if before is None or before.job != sample.job or sample.at <= before.at:
            return
        made.seconds += sample.at - before.at
        for name, (metric, operation) in _COUNTERS.items():
            grown = max(0.0, _counted(sample, metric, operation) - _counted(before, metric, operation))
            made.grown[name] = made.grown.get(name, 0.0) + grown
        for name, metric in _DURATIONS.items():
            if counts := between(before, sample, metric):
                known = made.counts.get(name) or [0] * len(counts)
                made.counts[name] = [a + b for a, b in zip(known, counts, strict=True)]

    def _shown(self) -> dict[str, Any]:
        last = int(time.time() // self._step)
        first = last - self._period // self._step
        with self._adding:
            for old in [each for each in self._bins if each < first]:
                del self._bins[old]
            bins = [self._bins.get(each, _Bin()) for each in range(first, last + 1)]
            complete = self._complete
        series: dict[str, list[float | None]] = {name: [each.gauges.get(name) for each in bins] for name in _GAUGES}
        for name in _COUNTERS:
            series[name] = [each.grown.get(name, 0.0) / each.seconds if each.seconds else None for each in bins]
        for name in _DURATIONS:
            for suffix, share in (("p50", 0.5), ("p95", 0.95)):
                series[f"{name}_{suffix}"] = [bound(each.counts.get(name, ()), share) for each in bins]
        return {
            "at": [each * self._step for each in range(first, last + 1)],
            "step": self._step,
            "complete": complete,
            "series": series,
        }


def _counted(sample: Sample, metric: Metric, operation: str) -> float:
    """A counter, or the part of it that one operation is, over all tables."""
    values = sample.values.get(metric.name, ())
    return sum(each.value for each in values if not operation or each.labels[-1:] == (operation,))


_of: dict[tuple[str, str, int], Past] = {}
_all = threading.Lock()


def past(kafka: Mapping[str, str], name: str, period: int) -> Past:
    """The plots of a pipeline, which are kept while they are among the last ones that were asked for."""
    key = (str(sorted(kafka.items())), name, period)
    with _all:
        found = _of.pop(key, None) or Past(kafka, name, period)
        _of[key] = found
        for old in list(_of)[:-_KEPT]:
            del _of[old]
        return found
