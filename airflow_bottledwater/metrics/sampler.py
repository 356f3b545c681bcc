"""A thread that takes a sample of a job every few seconds and writes it to Kafka. The job never waits for it, and
nothing depends on it: what cannot be written is lost."""

from __future__ import annotations

import heapq
import logging
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.kafka.clients import made, producer_config
from airflow_bottledwater.kafka.topics import NewTopic, Topics, small_segments
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.registry import METRICS, Metric
from airflow_bottledwater.metrics.sample import METRICS_TOPIC, Labelled, Sample
from airflow_bottledwater.metrics.source import Age, Look, SourceLook
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import problems
from airflow_bottledwater.state.control_records import StatusRecord

log = logging.getLogger(__name__)

#: tables that a sample has; the others are added up under this name, so that no sample is too large for Kafka
TABLES, OTHERS = 200, "(others)"
#: seconds for which the job's end waits for the thread
_ENDS_WITHIN = 1.0
#: seconds after which it is tried again to make the topic
_AGAIN = 60.0
#: seconds for which what was measured last is kept in the job's status when PostgreSQL does not answer, and intervals
_KEPT, _INTERVALS = 60.0, 3
#: bytes of a page of memory (getconf PAGESIZE)
_PAGE = resource.getpagesize()

Value = tuple[Metric, float, tuple[str, ...]]

#: counters of the status, by the metric that they are
_COUNTERS = {
    "superseded": registry.SUPERSEDED,
    "dead_letters": registry.DEAD_LETTERS,
    "transactions": registry.TRANSACTIONS,
    "skipped_changes": registry.LEFT_OUT,
}
#: the same of a snapshot's progress, with the value of the label
_PROGRESS: dict[str, tuple[Metric, tuple[str, ...]]] = {
    "ranges": (registry.RANGES, ("all",)),
    "ranges_done": (registry.RANGES, ("done",)),
    "rows": (registry.SNAPSHOT_ROWS, ()),
    "bytes": (registry.SNAPSHOT_BYTES, ("done",)),
    "total_bytes": (registry.SNAPSHOT_BYTES, ("all",)),
    "seconds_left": (registry.SNAPSHOT_LEFT, ()),
    "tables_not_followed": (registry.UNFOLLOWED, ()),
}


def of_status(status: StatusRecord) -> Iterator[Value]:
    """What a job's status says, as metrics."""
    for name, metric in _COUNTERS.items():
        if name in status.counters:
            yield metric, status.counters[name], ()
    for name, (metric, labels) in _PROGRESS.items():
        if isinstance(value := status.progress.get(name), int | float):
            yield metric, value, labels
    for limit, ratio in dict(status.pressure).items():
        yield registry.GUARD_PRESSURE, ratio, (limit,)
    yield registry.CLAIMS, status.job.epoch, ()
    yield registry.REPEATS, status.repeats, ()


def of_process() -> Iterator[Value]:
    """Memory and processor time of this process."""
    yield registry.MEMORY, int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE, ()
    yield registry.CPU, time.process_time(), ()


class Sampler:
    """Takes and writes samples until it is closed.

    :param name: the pipeline's name.
    :param status: tells the job's status.
    :ivar source: asks PostgreSQL.
    """

    def __init__(self, pipeline: Settings, name: str, status: Callable[[], StatusRecord], meter: Meter) -> None:
        self._pipeline, self._name, self._status, self._meter = pipeline, name, status, meter
        self.source, self._age = SourceLook(pipeline.postgres, pipeline.slot), Age()
        self._ended, self._told, self._tried = threading.Event(), False, 0.0
        self._answered = time.monotonic()
        self._producer: Producer | None = None
        #: whether the last sample did not reach Kafka
        self._lost = False
        self._shown: dict[str, set[tuple[str, ...]]] = {}
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Meter:
        """Start the thread; returns what the job counts with."""
        self._thread.start()
        return self._meter

    def __exit__(self, *_: object) -> None:
        """Write a last sample, if that takes no time."""
        self._ended.set()
        self._thread.join(_ENDS_WITHIN)

    def _run(self) -> None:
        # the first look measures the clocks, without which no delay is counted, and how far the stream is behind at its
        # start; a job that ends soon finds all ready
        self._attempt(lambda: self._measure(self.source.look()))
        self._attempt(self._open)
        over = False
        while not over:
            over = self._ended.wait(self._pipeline.metrics_interval)
            self._attempt(lambda: self._write(self.take(self.source.look())))
        if self._producer is not None:
            self._producer.flush(_ENDS_WITHIN)
        self.source.close()

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do something whose failure harms nobody; it is logged once."""
        try:
            work()
        except Exception as error:
            known = isinstance(error, BottledWaterError | KafkaException | BufferError | OSError)
            if not self._told:
                log.info(
                    "Metrics are not written for now, which harms nothing else: %s",
                    error,
                    exc_info=None if known else error,
                )
            self._told = True

    def _measure(self, look: Look | None) -> list[Value]:
        return list(self._of_source(look, self._status()))

    def take(self, look: Look | None) -> Sample:
        """Take a sample.

        :param look: what PostgreSQL has answered; None if it did not.
        """
        status = self._status()
        counted, distributions = self._meter.counted()
        values = {name: self._bounded(of, METRICS[name]) for name, of in counted.items()}
        for metric, value, labels in (*of_status(status), *of_process(), *self._measure(look)):
            values.setdefault(metric.name, []).append(Labelled(value, labels))
        for kind, count in problems.by_kind(status.problems).items():
            values.setdefault(registry.PROBLEMS.name, []).append(Labelled(count, (kind,)))
        return Sample(
            pipeline=self._name,
            slot=self._pipeline.slot,
            job=status.job.id,
            kind=status.job.kind,
            state=status.state,
            started=status.job.started,
            at=time.time(),
            interval=self._pipeline.metrics_interval,
            values=values,
            distributions=distributions,
            holder=look.holder if look is not None else "",
        )

    def _bounded(self, of: list[Labelled], metric: Metric) -> list[Labelled]:
        """The values of the tables that have most, by the sums of theirs, and of a counter the sums of the others, one
        for each of its other labels' values; all without labels. A table whose counter is shown stays so for the job's
        life, so that no sum ever shrinks: that would be taken for a counter that has begun again."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for each in of:
            sums[each.labels[:1]] += each.value
        shown = self._shown.setdefault(metric.name, set()) if metric.kind != "gauge" else set()
        shown.update(heapq.nlargest(TABLES - len(shown), sums.keys() - shown, key=sums.__getitem__))
        rest: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for each in of:
            if each.labels[:1] not in shown and metric.kind != "gauge":
                rest[each.labels[1:]] += each.value
        found = sorted((each for each in of if each.labels[:1] in shown), key=lambda each: each.value, reverse=True)
        return [*found, *(Labelled(value, (OTHERS, *labels)) for labels, value in rest.items())]

    def _of_source(self, look: Look | None, status: StatusRecord) -> Iterator[Value]:
        """What PostgreSQL has answered, and how far the stream is behind: that goes into its status, too."""
        now = time.monotonic()
        if look is None:
            if now - self._answered > max(_KEPT, _INTERVALS * self._pipeline.metrics_interval):
                status.lag = status.delay = self._meter.behind = None
            return
        self._meter.ahead, self._answered = look.ahead, now
        yield from look.values
        if not status.position:
            if look.lag is not None:
                yield registry.LAG_BYTES, look.lag, ()
            return
        published = Position.parse(status.position).lsn
        committed = self._meter.committed
        ago = time.time() + look.ahead - committed if committed else None
        lag, seconds = max(0, look.end - published), self._age.behind(published, look.end, ago)
        if lag and status.behind_since and status.position == status.began:
            seconds = max(seconds, time.time() - status.behind_since)
        self._meter.behind = lag, seconds
        status.lag, status.delay = lag, round(seconds, 1)
        yield registry.LAG_BYTES, lag, ()
        yield registry.LAG_SECONDS, seconds, ()

    def _write(self, sample: Sample) -> None:
        """Hand a sample to librdkafka, which sends it or drops it: if the topic was deleted, it is made again."""
        if (self._producer is None or self._lost) and time.monotonic() - self._tried >= _AGAIN:
            self._open()
        if self._producer is not None:
            self._producer.produce(
                METRICS_TOPIC, sample.encode(), sample.pipeline.encode(), partition=0, on_delivery=self._delivered
            )
            self._producer.poll(0)
            self._told = False

    def _delivered(self, error: KafkaError | None, _: object) -> None:
        self._lost = error is not None

    def _open(self) -> None:
        """Make the topic, unless there is one, and the producer."""
        self._tried = time.monotonic()
        if self._pipeline.create_topics:
            topics = Topics(self._pipeline.kafka)
            topics.make(new_topic(self._pipeline, topics.replicas(self._pipeline.replication_factor)))
        self._producer = made(
            Producer,
            {
                **producer_config(self._pipeline.kafka),
                # the user's could be true, which does not go with one acknowledgement
                "enable.idempotence": False,
                "acks": 1,
                # what is not sent by the next sample is not worth its memory
                "message.timeout.ms": max(1000, int(2000 * self._pipeline.metrics_interval)),
                "queue.buffering.max.messages": 10,
                "compression.type": "lz4",
            },
        )


def new_topic(pipeline: Settings, replication: int) -> NewTopic:
    """The topic of the samples: old ones are deleted by age and by size. Some managed Kafkas allow fewer properties."""
    kept = {
        "cleanup.policy": "delete",
        "retention.ms": str(int(pipeline.metrics_retention_days * 86_400_000)),
        "retention.bytes": str(pipeline.metrics_retention_bytes),
    }
    return NewTopic(METRICS_TOPIC, 1, replication, (*small_segments(kept), kept))
