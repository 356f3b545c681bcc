"""What is done about which error, in one table; and the patience with which outages are waited out."""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable

from airflow_bottledwater import errors
from airflow_bottledwater.kafka.publisher import NewProducerNeeded, RecordRefused

log = logging.getLogger(__name__)

#: seconds for new credentials to arrive where the old ones are read
_ROTATION = 20.0


class Act(enum.Enum):
    """What the runners do."""

    WAIT = "wait with back-off, then the same again"
    REOPEN = "a new producer: initialise, read the state, go on or end"
    AGAIN = "end; started again, the job reads the state and goes on from there"
    RECORD = "the record error policy (on_error)"
    END = "end; a person has to decide"
    FINISH = "end; nothing is wrong"


#: error class → act; the first class that matches, in this order
ACTS: dict[type[BaseException], Act] = {
    errors.Outage: Act.WAIT,
    NewProducerNeeded: Act.REOPEN,
    RecordRefused: Act.RECORD,
    errors.RecordError: Act.RECORD,
    errors.StopRequested: Act.FINISH,
    errors.TakenOver: Act.END,
    errors.StaleBatch: Act.AGAIN,
    errors.SlotInUse: Act.WAIT,
    errors.Refused: Act.END,
    errors.BottledWaterError: Act.END,
}


def act(error: BaseException) -> Act:
    """The row of the table for an error; anything unknown ends the job."""
    if isinstance(error, errors.SlotInUse):
        return Act.WAIT
    for kind, found in ACTS.items():
        if isinstance(error, kind):
            return found
    return Act.END


def transient(error: BaseException) -> bool:
    """Whether submitting the job again may help."""
    return act(error) in (Act.WAIT, Act.REOPEN, Act.AGAIN)


class Patience:
    """Waits out outages: with back-off, until it is told to stop or (with a limit) has waited too long.

    An outage begins with the first :meth:`wait` and lasts until :meth:`over`, however long a single attempt takes.

    :param limit: seconds; None waits for ever.
    :param stopped: set when the job is asked to end.
    :param report: told what is waited for, once per outage and then every ten seconds.
    """

    def __init__(
        self, limit: float | None, stopped: threading.Event | None = None, report: Callable[[str], None] | None = None
    ) -> None:
        self._limit = limit
        self._stopped = stopped or threading.Event()
        self._report = report or (lambda what: log.warning("Waiting: %s", what))
        self._since: float | None = None
        self._told = -math.inf
        self._pause = 0.1
        self._refused: float | None = None

    def wait(self, what: str | BaseException) -> None:
        """One pause of an outage.

        :param what: waited for; or the error, of which credentials that are refused have a limit of their own: new ones may be
            in libpq's password file in a moment, else whoever starts the job again has them.
        :raises StopRequested: the job is to end.
        :raises Outage: the limit is reached.
        :raises CredentialsRefused: they still are.
        """
        now = time.monotonic()
        if isinstance(what, errors.CredentialsRefused):
            self._refused = now if self._refused is None else self._refused
            if now - self._refused > _ROTATION:
                raise what
        self._since = now if self._since is None else self._since
        if now - self._told >= 10.0:
            self._report(str(what))
            self._told = now
        if self._limit is not None and now - self._since > self._limit:
            raise errors.Outage(
                f"{what} (for {now - self._since:.0f} s).",
                "Everything is resumable: start again when it is back, or raise outage_timeout.",
            )
        if self._stopped.wait(self._pause):
            raise errors.StopRequested("The job was asked to stop while it waited for a server.")
        self._pause = min(self._pause * 1.6, 5.0)

    def over(self) -> None:
        """What was waited for has worked."""
        self._since = self._refused = None
        self._told, self._pause = -math.inf, 0.1
