"""What is done about which error, in one table."""

from __future__ import annotations

import enum

from airflow_bottledwater import errors
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused


class Act(enum.Enum):
    """What the jobs do."""

    WAIT = "wait with back-off, then the same again"
    REOPEN = "a new producer: initialise, read the state, go on or end"
    AGAIN = "end; started again, the job reads the state and goes on from there"
    RECORD = "the record error policy (on_error)"
    END = "end; a person has to decide"
    FINISH = "end; nothing is wrong"


#: error class → act; the first class that matches, in this order
ACTS: dict[type[BaseException], Act] = {
    errors.SlotInUse: Act.WAIT,
    errors.Outage: Act.WAIT,
    NewProducerNeeded: Act.REOPEN,
    RecordRefused: Act.RECORD,
    errors.RecordError: Act.RECORD,
    errors.StopRequested: Act.FINISH,
    errors.TakenOver: Act.END,
    errors.StaleBatch: Act.AGAIN,
    errors.Refused: Act.END,
    errors.BottledWaterError: Act.END,
}


def act(error: BaseException) -> Act:
    """The row of the table for an error; anything unknown ends the job."""
    return next((found for kind, found in ACTS.items() if isinstance(error, kind)), Act.END)


def transient(error: BaseException) -> bool:
    """Whether submitting the job again may help."""
    return act(error) in (Act.WAIT, Act.REOPEN, Act.AGAIN)
