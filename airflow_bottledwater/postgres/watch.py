"""Work under an exported snapshot, while the session that holds it is watched, and the sessions that wait for its
locks."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import TypeVar

from airflow_bottledwater.backoff import Refusals
from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused, SourcePressed, StopRequested, rotated
from airflow_bottledwater.postgres.snapshot import SnapshotExporter

log = logging.getLogger(__name__)

#: seconds between two looks
_INTERVAL = 2.0
#: seconds for what is done to end when its result is not wanted any more
_GRACE = 2.0

T = TypeVar("T")


@dataclass(slots=True)
class HolderWatch:
    """Watches the holder of a snapshot, and who waits behind its locks, about every two seconds.

    :param limit: seconds that others may wait.
    :param what: whose locks they are, for messages; ``again`` is what to do after an outage, ``kept`` what a stop
        leaves.
    :param meanwhile: called each time that the holder was seen.
    """

    holder: SnapshotExporter
    limit: float
    stopped: threading.Event
    what: str
    again: str
    kept: str = ""
    meanwhile: Callable[[], None] = lambda: None
    _looked: float = field(default_factory=time.monotonic, init=False)
    _since: float = field(default=0.0, init=False)
    _refusals: Refusals = field(default_factory=Refusals, init=False)
    _told: bool = field(default=False, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def look(self) -> None:
        """
        :raises SourcePressed: others have waited for too long.
        :raises Outage: the holder's session was lost; or for 20 seconds, or as long as others may wait, nobody could
            look who waits.
        :raises Refused: see there.
        """
        now = time.monotonic()
        if now - self._looked < _INTERVAL:
            return
        self._looked = now
        self.holder.alive()
        self.meanwhile()
        try:
            queue = self.holder.waiting_behind()
            self._refusals.over()
        except (Outage, Refused) as error:
            # the holder's session goes on, also where there is no room for another one
            if self._refusals.last(0.0 if isinstance(error, CredentialsRefused) else self.limit):
                if isinstance(error, CredentialsRefused):
                    raise rotated(error) from error
                raise
            if not self._told:
                log.warning("%s goes on, although nobody can see who waits for its locks: %s", self.what, error)
            self._told = True
            return
        self._since = (self._since or now) if queue else 0.0
        if queue and now - self._since > self.limit:
            raise SourcePressed(
                f"{self.what}'s locks blocked others for {self.limit:.0f} s: {'; '.join(queue)}.",
                f"It gave up its locks so that they can proceed. {self.again} or raise lock_queue_limit.",
            )

    def work(self, do: Callable[[], T]) -> T:
        """Do something in another thread, and watch until it is done.

        :raises Outage: see :meth:`look`.
        :raises StopRequested: it was asked to stop.
        """
        done = futures.Future[T]()

        def run() -> None:
            try:
                done.set_result(do())
            except BaseException as error:
                done.set_exception(error)

        # not a pool's thread, which the interpreter would wait for at its exit
        self._thread = thread = threading.Thread(
            target=contextvars.copy_context().run, args=(run,), name="under the snapshot", daemon=True
        )
        thread.start()
        try:
            while not done.done():
                futures.wait([done], 0.1)
                self._heed()
                self.look()
            return done.result()
        except Outage:
            # what is done may have heard the stop first, and ended the session
            self._heed()
            raise
        finally:
            # it still uses what its caller is going to close
            thread.join(_GRACE)

    def ended(self, seconds: float) -> bool:
        """Wait until what was done last has ended; returns whether it has, within so many seconds.

        :raises StopRequested: it was asked to stop.
        """
        deadline = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._heed()
            self._thread.join(0.1)
        return self._thread is None or not self._thread.is_alive()

    def _heed(self) -> None:
        if self.stopped.is_set():
            raise StopRequested(f"{self.what} was asked to stop{self.kept}.")
