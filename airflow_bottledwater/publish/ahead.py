"""Completes the next part of a batch while the one before it is published.

Messages of updates that leave large values as they were are small, so a batch of them is published in parts. To read
the values of a part takes PostgreSQL about as long as Kafka takes to receive them. A value may be read at any time
after its transaction has become visible (:mod:`~airflow_bottledwater.publish.current`), thus also before the preceding
part is committed.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.postgres.partitions import Known
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.toast import Completed, ToastResolver

log = logging.getLogger(__name__)


class _NotNow(Exception):
    """Something is not available; it is waited for when the part's turn comes."""


class Ahead:
    """A :class:`~airflow_bottledwater.publish.toast.ToastResolver` that can complete the next part in a second thread.

    The second thread never waits for a server, and its errors do not matter: what it could not complete is completed
    when it is needed.

    :param dsn: the connection string of the source.
    :param waiting: called when a look-up has to wait; it sleeps, or raises to give up.
    :param most: see :class:`ToastResolver`, as is ``record``.
    """

    def __init__(self, dsn: str, waiting: Waiting, most: int, *, record: SlotRecord | None = None) -> None:
        self._resolver = ToastResolver(dsn, self._wait, most, record=record)
        self._waiting = waiting
        self._pool = ThreadPoolExecutor(1, "values")
        #: the work of the second thread, which alone uses the resolver until :meth:`_await` has returned
        self._working: Future[None] | None = None
        self._in_background = False
        self._prepared: tuple[Batch, Completed] | None = None

    def close(self) -> None:
        """Wait for the second thread, and close the connection."""
        self._pool.shutdown()
        self._resolver.close()

    def know(self, partitions: Mapping[int, Known]) -> None:
        """Go on with the partitions that the topics know now, see :attr:`CurrentRows.partitions`."""
        self._resolver.current.partitions = partitions

    def leading(self, batch: Batch, programs: Programs) -> Batch:
        """The leading part of a batch, see :meth:`ToastResolver.leading`."""
        prepared = self._await()
        if prepared is not None and prepared[0].data is batch.data and prepared[0].start == batch.start:
            return prepared[0]
        return self._resolver.leading(batch, programs)

    def complete(self, part: Batch, programs: Programs) -> Completed:
        """Complete a part, see :meth:`ToastResolver.complete`, unless that was done already."""
        prepared, self._prepared = self._await(), None
        if prepared is not None:
            expected, completed = prepared
            if expected.data is part.data and (expected.start, expected.end) == (part.start, part.end):
                return completed
        return self._resolver.complete(part, programs)

    def prepare(self, rest: Batch, programs: Programs) -> None:
        """Begin to complete the leading part of a batch, in the second thread."""
        self._await()
        self._prepared = None
        context = contextvars.copy_context()  # has the request to stop, which ends waits for PostgreSQL
        self._in_background = True
        self._working = self._pool.submit(context.run, self._prepare, rest, programs)

    def _prepare(self, rest: Batch, programs: Programs) -> None:
        part = self._resolver.leading(rest, programs)
        self._prepared = part, self._resolver.complete(part, programs)

    def _await(self) -> tuple[Batch, Completed] | None:
        if self._working is not None:
            error = self._working.exception()
            self._working, self._in_background = None, False
            if error is not None:
                log.debug("The next part could not be completed ahead: %s", error)
        return self._prepared

    def _wait(self, what: str | BaseException) -> None:
        if self._in_background:
            raise _NotNow(str(what))
        self._waiting(what)
