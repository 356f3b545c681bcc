"""Reads the topic of samples: those of the last seconds or days, and each further one as it is written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from airflow_bottledwater.kafka.clients import errors, made, passes, reader_config
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.metrics.sample import METRICS_TOPIC, Sample, decode

#: samples of a pipeline that are kept: enough for a rate
_KEPT = 8
#: seconds in which the samples from before the first look are read
_FIRST = 15.0


def first_since(consumer: Consumer, seconds: float, end: int, *, timeout: float) -> int:
    """The offset of the first sample that was written since so many seconds ago.

    :param end: the topic's end, which is returned if there is none.
    """
    begin = TopicPartition(METRICS_TOPIC, 0, int((time.time() - seconds) * 1000))
    (found,) = consumer.offsets_for_times([begin], timeout=timeout)
    return int(found.offset) if found.offset >= 0 else end


class History:
    """Follows the samples of all pipelines of a Kafka. The topic may not exist yet.

    :param since: seconds before now from which on samples are read.
    :param kept: how many samples of each pipeline are kept, the newest.
    :ivar samples: by the pipeline's name, the oldest first.
    """

    def __init__(self, kafka: Mapping[str, str], *, since: float = 60.0, kept: int = _KEPT) -> None:
        self._kafka, self._since, self._kept = dict(kafka), since, kept
        self._consumer: Consumer | None = None
        #: the offset behind the last sample that was read
        self._at = 0
        self.samples: dict[str, deque[Sample]] = {}

    @property
    def latest(self) -> dict[str, Sample]:
        """The newest sample of each pipeline."""
        return {name: samples[-1] for name, samples in self.samples.items()}

    def read(self, timeout: float = 1.0) -> None:
        """Read what there is; the first time, all that was there before.

        :param timeout: seconds to wait for the first sample.
        :raises Outage: Kafka does not answer.
        :raises Refused: it does not let this client read the topic.
        """
        with errors(self._kafka):
            if self._consumer is None:
                if (end := self._open()) is None:
                    return
                deadline = time.monotonic() + _FIRST
                while self._at < end and time.monotonic() < deadline:
                    self._take(timeout)
            self._take(timeout)

    def _take(self, timeout: float) -> None:
        assert self._consumer is not None
        first = self._consumer.poll(timeout)
        while first is not None:
            for message in [first, *self._consumer.consume(1000, 0)]:
                if (error := message.error()) is None:
                    self._at = (message.offset() or 0) + 1
                    self._add(decode(message.value()))
                elif error.code() != KafkaError._PARTITION_EOF and not passes(error):
                    raise KafkaException(error)
            first = self._consumer.poll(0)

    def _open(self) -> int | None:
        """Make the consumer; returns the topic's end, None if there is no topic yet."""
        if METRICS_TOPIC not in Topics(self._kafka).describe([METRICS_TOPIC]):
            return None
        consumer = made(Consumer, reader_config(self._kafka, auto_offset_reset="earliest"))
        _, end = consumer.get_watermark_offsets(TopicPartition(METRICS_TOPIC, 0), timeout=_FIRST)
        self._at = first_since(consumer, self._since, int(end), timeout=_FIRST)
        consumer.assign([TopicPartition(METRICS_TOPIC, 0, self._at)])
        self._consumer = consumer
        return int(end)

    def _add(self, sample: Sample | None) -> None:
        if sample is not None:
            self.samples.setdefault(sample.pipeline, deque(maxlen=self._kept)).append(sample)

    def close(self) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = None
