"""How a job is told to end: asked to, or interrupted by a signal that nobody of ours has sent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from airflow_bottledwater.errors import Interrupted


class Stop(threading.Event):
    """Set when a job is to end.

    :param asked: whether somebody asked for it, where a signal alone does not tell: a host that reboots sends the same one.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._asked = asked
        self._signal = 0

    def interrupt(self, signum: int) -> None:
        """A signal came. After a stop that was asked for it means nothing more."""
        if not self.is_set():
            self._signal = signum
            self.set()

    @property
    def interruption(self) -> Interrupted | None:
        """Why the job ends although nobody asked it to; None: somebody did, or it does not end."""
        return Interrupted(self._signal) if self._signal and not self._asked() else None


def interruption(stopped: threading.Event) -> Interrupted | None:
    """The same of any event: one that cannot be interrupted is set on request only."""
    return stopped.interruption if isinstance(stopped, Stop) else None
