"""Errors by which producers report to their callers what has become of a transaction; users never see these."""

from __future__ import annotations

from airflow_bottledwater.errors import BottledWaterError


class NewProducerNeeded(BottledWaterError):
    """The transaction has failed, or its outcome is unknown. No data is lost: make a new producer, initialise it, read
    the state, and decide from it what is left to do."""


class TooSlow(NewProducerNeeded):
    """The transaction was aborted, since the broker would have ended it: Kafka does not take it within half of the
    time-out.

    :param confirmed: bytes of its records that Kafka had confirmed.
    :param seconds: for which Kafka was waited for.
    :param divisible: whether a smaller transaction can be tried.
    """

    def __init__(self, what: str, confirmed: int, seconds: float, *, divisible: bool = True) -> None:
        super().__init__(what)
        self.confirmed, self.seconds, self.divisible = confirmed, seconds, divisible


class RecordRefused(BottledWaterError):
    """The broker refuses a record for good (size, authorization, validation); the transaction was aborted.

    :param record: the number of the first refused record in its batch.
    :param code: Kafka's error code.
    """

    def __init__(self, what: str, record: int, code: int) -> None:
        super().__init__(what)
        self.record, self.code = record, code
