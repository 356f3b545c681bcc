"""One table that says what the jobs do about each class of error."""

from __future__ import annotations

import enum

from airflow_bottledwater import errors
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused


class ErrorAction(enum.Enum):
    """What a job does about an error."""

    WAIT = "wait with back-off, then the same again"
    REOPEN = "a new producer: initialise, read the state, go on or end"
    AGAIN = "end; started again, the job reads the state and goes on from there"
    RECORD = "the record error policy (on_error)"
    END = "end; manual intervention is required"
    FINISH = "end; nothing is wrong"


#: error class → what is done about it; the first class that matches decides, in this order
ERROR_ACTIONS: dict[type[BaseException], ErrorAction] = {
    errors.SlotInUse: ErrorAction.WAIT,
    errors.Outage: ErrorAction.WAIT,
    NewProducerNeeded: ErrorAction.REOPEN,
    RecordRefused: ErrorAction.RECORD,
    errors.RecordError: ErrorAction.RECORD,
    errors.StopRequested: ErrorAction.FINISH,
    errors.TakenOver: ErrorAction.END,
    errors.StaleBatch: ErrorAction.AGAIN,
    errors.BeginsAnew: ErrorAction.AGAIN,
    errors.JobDied: ErrorAction.AGAIN,
    errors.Refused: ErrorAction.END,
    errors.BottledWaterError: ErrorAction.END,
}


def act(error: BaseException) -> ErrorAction:
    """What is done about an error, by the table; an error of any other class ends the job."""
    return next((found for kind, found in ERROR_ACTIONS.items() if isinstance(error, kind)), ErrorAction.END)


def transient(error: BaseException) -> bool:
    """Whether submitting the job again may help."""
    return act(error) in (ErrorAction.WAIT, ErrorAction.REOPEN, ErrorAction.AGAIN)
