"""When a job that ended for a transient reason is started again: the one policy of the stream operator and of the
command."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from airflow_bottledwater.errors import BottledWaterError, Interrupted
from airflow_bottledwater.pipeline.settings import Settings

log = logging.getLogger(__name__)

#: how often a job is started again that makes no progress in between
RESTARTS = 10
#: seconds of back-off before a job is started again; doubled each time, up to the second number
_BACKOFF, LONGEST_BACKOFF = 2.0, 300.0
#: seconds after which the count of restarts begins anew, if the job has made progress
_STABLE = 600.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a job was started again, and since when it runs.

    :param at: when it was started, in seconds since 1970.
    :param position: the LSN up to which the slot was confirmed when the job before it ended; None if that is not known.
    :param before: when the job before it was started, in seconds since 1970; 0 if that is not known, or there was none.
    """

    count: int = 0
    at: float = 0.0
    position: int | None = None
    before: float = 0.0

    @property
    def pause(self) -> float:
        """Seconds to wait before this restart; 0 for the first start."""
        return min(_BACKOFF * 2 ** (self.count - 1), LONGEST_BACKOFF) if self.count else 0.0

    def after(self, kind: str, *, reached: int | None, now: float, published: bool = False) -> Restarts:
        """The restart that follows when the job has ended for a transient reason.

        :param kind: the class of its error.
        :param reached: the LSN up to which the slot is confirmed; None if that is not known.
        :param now: seconds since 1970.
        :param published: whether it is known to have published rows of a snapshot, in which the slot is not confirmed.
        """
        count = 1 if self._was_well(kind, reached, now, published) else self.count + 1
        again = Restarts(count, now, self.position if reached is None else reached)
        return Restarts(count, now + again.pause, again.position, self.at)

    def _was_well(self, kind: str, reached: int | None, now: float, published: bool) -> bool:
        """Whether the job has made progress before it ended, so that its end does not count as a repetition of the last
        failure.

        Its running time alone does not show it: a job that only waits for a server runs as long as its
        ``outage_timeout``.
        """
        if now - self.at <= _STABLE:
            return False
        progress = reached is not None and self.position is not None and reached > self.position
        return progress or published or kind == Interrupted.__name__


def reached(pipeline: Settings) -> int | None:
    """The LSN up to which the slot is confirmed, and so published; None if the source does not answer or has no such
    slot."""
    from airflow_bottledwater.postgres import slot
    from airflow_bottledwater.postgres.connect import session

    try:
        with session(pipeline.postgres, "Reading the slot's position") as connection:
            found = slot.state(connection, pipeline.slot)
    except BottledWaterError as error:
        log.info("The slot's position is not known: %s", error)
        return None
    return None if found is None else found.confirmed
