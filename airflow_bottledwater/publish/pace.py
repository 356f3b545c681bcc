"""How much one Kafka transaction may hold: what Kafka takes in half of the transaction time-out, at the rate that was
measured last.

A Kafka that takes everything at once sets no limit. One that is slow (a quota, a slow link) would never commit a batch
of the usual size: the broker aborts it at the time-out, and the same batch begins again. Then transactions become
smaller, and larger again when they are committed quickly.
"""

from __future__ import annotations

import math
import time

from airflow_bottledwater.kafka.errors import TooSlow

#: of half the time-out: what a transaction should take, so that most are committed in time though the rate varies
_AIM = 0.5
#: how many times larger transactions become when they are committed in less than a quarter of that
_GROWTH = 4
#: how many times smaller requests become after an attempt that showed no rate: one of 1 MB may take minutes
_SMALLER_REQUESTS = 64
#: bytes of the smallest requests, and of the largest, librdkafka's ``batch.size``
_SMALLEST, _LARGEST = 1_000, 1_000_000
#: a request is at most this part of a transaction, so that the records that are confirmed show the rate
_REQUESTS = 4
#: time-outs after which a limit is forgotten, if no transaction was slow since
_FORGOTTEN = 5


class Pace:
    """Learns from each transaction how large the next one may be.

    :param timeout: ``transaction_timeout``, in seconds.
    :param most: bytes above which there is no limit: what the largest transactions have.
    :ivar limit: bytes of the records of one transaction; infinite while Kafka is fast.
    :ivar request: bytes of one request, ``batch.size``.
    :ivar rate: bytes a second that Kafka took when it was slow last; 0 if it is not.
    """

    def __init__(self, timeout: float, most: int) -> None:
        self._timeout, self._most = timeout, most
        self.limit, self.request, self.rate = math.inf, _LARGEST, 0.0
        self._slow_at = 0.0
        self._failed: TooSlow | None = None

    @property
    def slow(self) -> bool:
        """Whether transactions are smaller than they would be, or none was committed since one took too long."""
        return self.limit < math.inf or self._failed is not None

    def committed(self, size: int, seconds: float) -> None:
        """Note a transaction.

        :param size: bytes of its records.
        :param seconds: for which Kafka was waited for.
        """
        if not self.slow:
            return
        self._failed = None
        if self.limit < math.inf and seconds >= _AIM * self._timeout / 2 / 4:
            self._measured(size, seconds)
        elif size * 2 >= self.limit:
            self.limit *= _GROWTH
        if self.limit >= self._most or time.monotonic() - self._slow_at > _FORGOTTEN * self._timeout:
            self.limit, self.request, self.rate = math.inf, _LARGEST, 0.0

    def failed(self, error: TooSlow) -> None:
        """Note a transaction that was given up after half the time-out. The first may have met an outage, which is no
        reason to cut the source's transactions: with smaller requests, the next attempt shows a rate."""
        again, self._failed = self.slow, error
        if again and error.confirmed:
            self._measured(error.confirmed, error.seconds)
        else:
            self._slow_at = time.monotonic()
            self.request = max(_SMALLEST, self.request // _SMALLER_REQUESTS)

    def _measured(self, size: int, seconds: float) -> None:
        self.rate = size / seconds
        self.limit = max(1.0, self.rate * _AIM * self._timeout / 2)
        self.request = int(min(_LARGEST, max(_SMALLEST, self.limit / _REQUESTS)))
        self._slow_at = time.monotonic()

    def __str__(self) -> str:
        if self.limit == math.inf:
            return str(self._failed or "")
        return (
            f"Kafka takes about {_rounded(self.rate)} a second (a quota, or a slow link): transactions have at most "
            f"{_rounded(self.limit)}, so that each is committed within half of transaction_timeout ({self._timeout:g} "
            "s)."
        )


def _rounded(size: float) -> str:
    """Bytes with one significant digit, so that a text does not change with every measurement."""
    unit = 1_000_000 if size >= 1_000_000 else 1_000 if size >= 1_000 else 1
    number = max(1.0, size / unit)
    digits = 10 ** int(math.log10(number))
    return f"{int(number / digits) * digits:,} {'MB' if unit == 1_000_000 else 'kB' if unit == 1_000 else 'bytes'}"
