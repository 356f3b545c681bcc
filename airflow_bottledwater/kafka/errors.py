"""What happens to a transaction, between the producers and those who publish; users never see these."""

from __future__ import annotations

from airflow_bottledwater.errors import BottledWaterError


class NewProducerNeeded(BottledWaterError):
    """The transaction is lost, not the data: make a new producer, initialise it, read the state, decide again."""


class RecordRefused(BottledWaterError):
    """The broker refuses a record for good (size, authorization, validation); the transaction was aborted.

    :param record: the first record of the batch that it fell on.
    """

    def __init__(self, what: str, record: int, code: int) -> None:
        super().__init__(what)
        self.record, self.code = record, code
