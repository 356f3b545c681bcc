"""A thread that reports on a job in the shared state topic, and hears the requests that are made to it there."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.pipeline.settings import Pipeline
from airflow_bottledwater.state import store

log = logging.getLogger(__name__)


class Reporter(ABC):
    """Writes a record at every heartbeat, and reads what is requested. Whatever goes wrong, the thread goes on: without
    it, the job could be neither watched nor stopped.

    :param what: what is reported, for the log.
    """

    def __init__(self, pipeline: Pipeline, what: str) -> None:
        self._pipeline, self._what = pipeline, what
        self._control = store.Control(pipeline.kafka)
        self._ended = threading.Event()
        self._silent = ""
        #: whether the requests from before this job were handled: what a second reader finds was written while the job
        #: runs
        self._heard = False
        #: set when the requests from before this job were heard
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @abstractmethod
    def _hear_before(self, records: store.RawRecords, *, again: bool) -> None:
        """Handle what was requested before the thread listened.

        :param records: all records of the topic.
        :param again: whether it had listened before, so that this was written while the job ran.
        """

    @abstractmethod
    def _hear_now(self, key: str, value: dict[str, Any] | None) -> None:
        """Handle a record that was written now."""

    @abstractmethod
    def _write(self, wait: float) -> None:
        """Write the record.

        :param wait: see :meth:`store.Control.write`.
        :raises Outage: Kafka does not take it.
        """

    def _finish(self, *, write: bool = True) -> bool:
        """End the thread, and write the record for the last time; a failure is only logged. Returns whether it was
        written."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(10)
        try:
            if write:
                self._write(wait=10.0)
        except BottledWaterError as failure:
            log.warning("The last %s could not be written: %s", self._what, failure)
            write = False
        self._control.close()
        return write

    def _run(self) -> None:
        reader: store.Reader | None = None
        last_written = 0.0
        while not self._ended.is_set():
            try:
                if reader is None:
                    reader = self._listen()
                for key, value in reader.poll(0.2):
                    self._hear_now(key, value)
                if time.monotonic() - last_written >= self._pipeline.heartbeat_interval:
                    last_written = time.monotonic()
                    self._write(wait=0)
                self._silent = ""
            except Exception as error:
                self._tell(error)
                self._ended.wait(1.0)
        if reader is not None:
            reader.close()

    def _tell(self, error: Exception) -> None:
        """Log an error once, until the thread works again."""
        if type(error).__name__ == self._silent:
            return
        self._silent = type(error).__name__
        if isinstance(error, BottledWaterError):
            log.info("Heartbeats and requests wait: %s", error)
        else:
            log.error("Heartbeats and requests do not work, the job goes on.", exc_info=error)

    def _listen(self) -> store.Reader:
        """A reader at the topic's end."""
        end = Topics(self._pipeline.kafka).ends(store.CONTROL_TOPIC, 1)[0]
        reader = store.Reader(self._pipeline.kafka, store.CONTROL_TOPIC, committed=False)
        try:
            records = reader.read_to(end, timeout=60.0)
        except BaseException:
            reader.close()
            raise
        self._hear_before(records, again=self._heard)
        self._heard = True
        self.listening.set()
        return reader
