"""Errors by which producers report to their callers what has become of a transaction; users never see these."""

from __future__ import annotations

from airflow_bottledwater.errors import BottledWaterError


class NewProducerNeeded(BottledWaterError):
    """The transaction has failed, or its outcome is unknown. No data is lost: make a new producer, initialise it, read the state, and
    decide from it what is left to do."""


class RecordRefused(BottledWaterError):
    """The broker refuses a record for good (size, authorization, validation); the transaction was aborted.

    :param record: the number of the first refused record in its batch.
    :param code: Kafka's error code.
    """

    def __init__(self, what: str, record: int, code: int) -> None:
        super().__init__(what)
        self.record, self.code = record, code
