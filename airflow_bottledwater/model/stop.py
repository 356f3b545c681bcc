"""How a job is stopped: by a request, or by a signal from outside the pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from airflow_bottledwater.errors import Interrupted


class Stop(threading.Event):
    """An event that is set when the job is to end.

    :param asked: returns whether a stop was requested. The signal alone does not show it: a host that reboots sends the
        same one.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._asked = asked
        self._signal = 0

    def interrupt(self, signum: int) -> None:
        """Handle a signal: the job is to end. If the event was already set, the signal is ignored."""
        if not self.is_set():
            self._signal = signum
            self.set()

    @property
    def interruption(self) -> Interrupted | None:
        """The error to end with if the job was interrupted without a request; None if a stop was requested, or the job
        is not ending."""
        return Interrupted(self._signal) if self._signal and not self._asked() else None


def interruption(stopped: threading.Event) -> Interrupted | None:
    """:attr:`Stop.interruption` of any event; None for a plain event, which is set on request only."""
    return stopped.interruption if isinstance(stopped, Stop) else None
