"""Status, heartbeats and requests of a running job, over the shared topic."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.records import Job, encode

log = logging.getLogger(__name__)

#: seconds for which a request to stop that nobody answered holds for the continuation of the job that it names
REQUEST_HOLDS = 600.0
#: how a job ends in order
_IN_ORDER = ("stopped", "finished")


def status_key(name: str) -> str:
    """The key of a pipeline's status."""
    return f"status/{name}"


def request_key(name: str) -> str:
    """The key of a request to a pipeline's job."""
    return f"request/{name}"


def over(status: dict[str, Any]) -> bool:
    """Whether the job that wrote this status has ended, and none continues it."""
    return status.get("state") in _IN_ORDER or (status.get("state") == "failed" and bool(status.get("permanent")))


def holds(request: dict[str, Any], status: dict[str, Any] | None, epoch: int, now: float) -> bool:
    """Whether a job obeys a request that was there before it listened; the rules are :class:`Controller`'s.

    :param status: the pipeline's last, perhaps an earlier job's.
    :param epoch: the job's.
    """
    asked, at = request.get("epoch"), request.get("at")
    if asked == epoch:
        return True
    if not isinstance(asked, int) or asked > epoch or not isinstance(at, int | float) or abs(now - at) > REQUEST_HOLDS:
        return False
    # a status of an even later job than the one that was asked: that one had its chance to answer
    return status is not None and _epoch(status) == asked and not over(status)


def _epoch(status: dict[str, Any]) -> int:
    job = status.get("job")
    return int(job.get("epoch", 0)) if isinstance(job, dict) else 0


@dataclass(slots=True)
class Status:
    """What a job says of itself; written at every heartbeat.

    :param state: starting, snapshot, streaming, waiting, stopped, finished or failed.
    """

    state: str = "starting"
    position: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    permanent: bool = False
    retired: bool = False


class Controller:
    """The job's voice and ear: a thread that writes heartbeats and reads requests.

    A request to stop names the pipeline and the job that was seen last, by its epoch. It holds for that job, and for the next one if
    that is its continuation: a stop that is asked for between a job's death and its restart must not be lost, and one that nobody
    answered must not end what a person starts on purpose later. So a job obeys

    * every request that is written while it listens, whatever earlier epoch it names;
    * a request that was there before, and that no job has answered, if it names the job itself; or if it names an earlier one that
      neither ended in order nor failed for good, and it is at most :data:`REQUEST_HOLDS` seconds old (a job that died or failed of
      a transient cause is submitted again within that time).

    Whatever else it finds is removed, as is what it has answered.

    :ivar stopped: set when somebody asks the job to stop.
    """

    def __init__(self, pipeline: Pipeline, cluster: Cluster, job: Job) -> None:
        self.name = cluster.pipeline(pipeline.slot)
        self.status = Status()
        self.stopped = threading.Event()
        #: the request passes on a signal from outside (the number), of which nobody asked the job to stop
        self.interrupted = 0
        self._pipeline, self._job = pipeline, job
        self._ended = threading.Event()
        self._control = store.Control(pipeline.kafka)
        self._topics = Topics(pipeline.kafka)
        self._silent = ""
        #: whether what was in the topic before was looked at: a second reader finds only what was written meanwhile
        self._heard = False
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Begin to listen and to write."""
        self._thread.start()

    def finish(self, result: str, error: BaseException | None = None, *, permanent: bool = False) -> None:
        """Write the last status and end."""
        self.status.state = result
        if error is not None:
            self.status.error, self.status.permanent = str(error), permanent
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(10)
        try:
            self._write(wait=10.0)
        except BottledWaterError as failure:
            log.warning("The last status could not be written: %s", failure)
        self._control.close()

    def _run(self) -> None:
        reader: store.Reader | None = None
        last_written = 0.0
        while not self._ended.is_set():
            try:
                if reader is None:
                    reader = self._listen()
                for key, value in reader.poll(0.2):
                    if key == request_key(self.name) and value is not None:
                        self._hear(value)
                if time.monotonic() - last_written >= self._pipeline.heartbeat_interval:
                    last_written = time.monotonic()
                    self._write(wait=0)
                self._silent = ""
            except Exception as error:
                # whatever it is: a job that says and hears nothing more cannot be watched or stopped
                self._tell(error)
                self._ended.wait(1.0)
        if reader is not None:
            reader.close()

    def _tell(self, error: Exception) -> None:
        """Once, until the thread works again."""
        if type(error).__name__ == self._silent:
            return
        self._silent = type(error).__name__
        if isinstance(error, BottledWaterError):
            log.info("Heartbeats and requests wait: %s", error)
        else:
            log.error("Heartbeats and requests do not work, the job goes on.", exc_info=error)

    def _listen(self) -> store.Reader:
        """A reader at the topic's end; what was there before is heard if it still holds."""
        end = self._topics.ends(store.CONTROL_TOPIC, 1)[0]
        reader = store.Reader(self._pipeline.kafka, store.CONTROL_TOPIC, committed=False)
        try:
            facts = reader.read_to(end, timeout=60.0)
        except BaseException:
            reader.close()
            raise
        request = facts.get(request_key(self.name))
        if request is None:
            return reader
        if self._heard or holds(request, facts.get(status_key(self.name)), self._job.epoch, time.time()):
            self._hear(request)
        else:
            log.info("A request to stop that an earlier job did not answer is removed: %s", request)
            self._control.write(request_key(self.name), None, wait=0)
        self._heard = True
        return reader

    def _hear(self, request: dict[str, Any]) -> None:
        epoch = request.get("epoch")
        if not isinstance(epoch, int) or epoch > self._job.epoch:
            return  # to a later job
        log.info("Asked to stop%s.", " for good" if request.get("retire") else "")
        self.status.retired = bool(request.get("retire"))
        self.interrupted = int(request.get("interrupted", 0))
        self.stopped.set()
        self._control.write(request_key(self.name), None, wait=0)

    def _write(self, wait: float) -> None:
        record = {
            "state": self.status.state,
            "job": encode(self._job),
            "slot": self._pipeline.slot,
            "on_error": self._pipeline.on_error,
            "engine": self._pipeline.engine,
            "position": self.status.position,
            "counters": self.status.counters,
            "progress": self.status.progress,
            "error": self.status.error,
            "permanent": self.status.permanent,
            "retired": self.status.retired,
            "at": time.time(),
        }
        self._control.write(status_key(self.name), record, wait=wait)


def read_status(pipeline: Pipeline, name: str) -> dict[str, Any] | None:
    """The last status of a pipeline."""
    found = store.read_records(pipeline.kafka, store.CONTROL_TOPIC, committed=False).get(status_key(name))
    return found if found is None or _epoch(found) else None


def request_stop(pipeline: Pipeline, cluster: Cluster, *, retire: bool = False) -> dict[str, Any] | None:
    """Ask the running job of a slot to stop, or the one that continues it; returns the status that it was addressed by, None if
    there is none. A job that has ended in order, or for good, is not asked: nothing runs, and nothing is continued.

    :param retire: for good: ``drop_slot(when='retired')`` may then drop the slot.
    """
    name = cluster.pipeline(pipeline.slot)
    status = read_status(pipeline, name)
    if status is None:
        return None
    if not over(status):
        _request(pipeline, name, status["job"]["epoch"], retire)
    if retire and status["state"] in (*_IN_ORDER, "failed"):
        control = store.Control(pipeline.kafka)
        try:
            control.write(status_key(name), {**status, "retired": True})
        finally:
            control.close()
    return status


def request_stop_of(pipeline: Pipeline, cluster: Cluster, job: Job, *, interrupted: int = 0) -> None:
    """Ask one job to stop, whether or not it has reported yet.

    :param interrupted: the signal from outside that is passed on, of which nobody asked the job to stop.
    :raises Outage: Kafka does not take the request.
    """
    _request(pipeline, cluster.pipeline(pipeline.slot), job.epoch, retire=False, interrupted=interrupted)


def _request(pipeline: Pipeline, name: str, epoch: int, retire: bool, interrupted: int = 0) -> None:
    request = {"command": "stop", "epoch": epoch, "retire": retire, "interrupted": interrupted, "at": time.time()}
    control = store.Control(pipeline.kafka)
    try:
        control.write(request_key(name), request)
    finally:
        control.close()


def wait_ended(pipeline: Pipeline, cluster: Cluster, job_id: str, *, timeout: float) -> dict[str, Any] | None:
    """Wait until a job has written its last status; None if it has not in time."""
    name = cluster.pipeline(pipeline.slot)
    end = Topics(pipeline.kafka).ends(store.CONTROL_TOPIC, 1)[0]
    reader = store.Reader(pipeline.kafka, store.CONTROL_TOPIC, committed=False)
    deadline = time.monotonic() + timeout
    try:
        try:
            reader.read_to(end, timeout=timeout)
        except Outage:
            return None
        while time.monotonic() < deadline:
            status = reader.values.get(status_key(name))
            if (
                status is None
                or not _epoch(status)
                or status["job"]["id"] != job_id
                or status["state"] in (*_IN_ORDER, "failed")
            ):
                return status
            reader.poll(0.2)
        return None
    finally:
        reader.close()
