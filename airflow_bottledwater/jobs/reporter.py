"""A thread that reports on a job in the shared state topic, and hears the requests that are made to it there."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.state.store import RawRecords

log = logging.getLogger(__name__)

#: seconds after which it is looked again whether the shared topic was deleted, while records do not reach it
_AGAIN = 30.0


class Reporter(ABC):
    """Writes a record at every heartbeat, and reads what is requested. Whatever goes wrong, the thread goes on: without
    it, the job could be neither watched nor stopped.

    :param what: what is reported, for the log.
    :param wants: whether the record of a key is to be heard.
    """

    def __init__(self, pipeline: Settings, what: str, wants: Callable[[str], bool]) -> None:
        self._pipeline, self._what = pipeline, what
        self._topic = ControlTopic.of(pipeline.kafka)
        self._heard = self._topic.subscribe(wants)
        self._ended = threading.Event()
        self._silent = ""
        #: set when the requests from before this job were heard
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @abstractmethod
    def _hear_before(self, records: RawRecords) -> None:
        """Handle what was requested before the thread listened.

        :param records: all records of the topic.
        """

    @abstractmethod
    def _hear_now(self, key: str, value: dict[str, Any] | None) -> None:
        """Handle a record that was written now."""

    @abstractmethod
    def _write(self, wait: float) -> None:
        """Write the record.

        :param wait: see :meth:`ControlTopic.write`.
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
        self._release()
        return write

    def _release(self) -> None:
        self._heard.close()
        self._topic.close()

    def _run(self) -> None:
        last_written, looked = 0.0, -math.inf
        while not self._ended.is_set():
            try:
                if not self.listening.is_set():
                    self._listen()
                for key, value in self._heard.poll(0.2):
                    self._hear_now(key, value)
                if time.monotonic() - last_written >= self._pipeline.heartbeat_interval:
                    last_written = time.monotonic()
                    if self._topic.lost and last_written - looked > _AGAIN:
                        looked = last_written
                        self._make_again()
                    self._write(wait=0)
                    self._silent = ""
            except Exception as error:
                self._tell(error)
                self._ended.wait(1.0)

    def _make_again(self) -> None:
        """Make the shared topic, if it was deleted: without it, nobody sees the job, or can stop it."""
        from airflow_bottledwater.kafka.topics import Topics
        from airflow_bottledwater.state import store

        topics = Topics(self._pipeline.kafka)
        if self._pipeline.create_topics and not topics.describe([store.CONTROL_TOPIC], confirm=True):
            log.warning("Topic %r was deleted, and is made again.", store.CONTROL_TOPIC)
            topics.make(store.new_topic(store.CONTROL_TOPIC, topics.replicas(self._pipeline.replication_factor)))
        self._topic.end()  # has it read from its start, if it was made again

    def _listen(self) -> None:
        self._hear_before(self._heard.read())
        self.listening.set()

    def _tell(self, error: Exception) -> None:
        """Log an error once, until the thread works again."""
        if type(error).__name__ == self._silent:
            return
        self._silent = type(error).__name__
        if isinstance(error, BottledWaterError):
            log.info("Heartbeats and requests wait: %s", error)
        else:
            log.error("Heartbeats and requests do not work, the job goes on.", exc_info=error)
