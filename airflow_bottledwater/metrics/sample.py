"""A sample: all that a job has measured, as it is written to the topic :data:`METRICS_TOPIC`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

#: the topic of all pipelines' samples: never written in a transaction, and nothing is lost with it but history
METRICS_TOPIC = "_bottledwater_metrics"
#: intervals after which a sample is not shown any more, and the seconds that an interval counts at least
_OLD, _SHORTEST = 3, 10.0


class Labelled(msgspec.Struct, frozen=True, array_like=True):
    """A value, and the values of its metric's labels."""

    value: float
    labels: tuple[str, ...] = ()


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """How often each duration was seen.

    :param counts: by bucket, see :data:`airflow_bottledwater.metrics.registry.SECONDS`; the last is above all of them.
    :param sum: of all durations, in seconds.
    """

    counts: list[int]
    sum: float


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job has measured.

    :param pipeline: its name: system identifier, database and slot, with slashes between them.
    :param job: the id of the job.
    :param started: when the job started, in seconds since 1970 by the clock of its host: counters begin with zero then,
        but for lasting ones.
    :param at: seconds since 1970, by the same clock.
    :param interval: seconds until the next sample.
    :param values: by the name of the metric.
    :param distributions: the same of histograms.
    :param holder: who holds the oldest xmin, as text; empty if nobody does, or if it is not visible.
    """

    pipeline: str
    slot: str
    job: str
    kind: str
    state: str
    started: float
    at: float
    interval: float
    values: dict[str, list[Labelled]] = {}
    distributions: dict[str, Distribution] = {}
    holder: str = ""

    def value(self, name: str, *labels: str) -> float | None:
        """The value of a metric; without labels, the sum over them; None if it was not measured."""
        found = [each.value for each in self.values.get(name, ()) if not labels or each.labels == labels]
        return sum(found) if found else None

    def present(self, now: float) -> bool:
        """Whether it is not too old, or too far ahead, to be shown: values of a job that is gone must not look like
        present ones. The clock of the job's host may be some intervals off.

        :param now: seconds since 1970.
        """
        return abs(now - self.at) < _OLD * max(_SHORTEST, self.interval)

    def encode(self) -> bytes:
        """The sample as JSON."""
        return msgspec.json.encode(self)


def newest(samples: Sequence[Sample], now: float) -> Sample | None:
    """The last of a pipeline's samples, if it is :meth:`Sample.present`."""
    return samples[-1] if samples and samples[-1].present(now) else None


_decoder = msgspec.json.Decoder(Sample)


def decode(raw: bytes | None) -> Sample | None:
    """The inverse of :meth:`Sample.encode`; None for anything else, since others may write to the topic, too."""
    try:
        return None if raw is None else _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError):
        return None
