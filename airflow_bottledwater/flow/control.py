"""Status, heartbeats and requests of a running job, over the shared topic."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.flow import facts as f
from airflow_bottledwater.flow.preflight import pipeline_name
from airflow_bottledwater.kafka import state
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.settings import Pipeline

log = logging.getLogger(__name__)


def status_key(name: str) -> str:
    """The key of a pipeline's status."""
    return f"status/{name}"


def request_key(name: str) -> str:
    """The key of a request to a pipeline's job."""
    return f"request/{name}"


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

    :ivar stopped: set when somebody asks the job to stop.
    """

    def __init__(self, pipeline: Pipeline, cluster: Cluster, job: f.Job) -> None:
        self.name = pipeline_name(cluster, pipeline.slot)
        self.status = Status()
        self.stopped = threading.Event()
        self._pipeline, self._job = pipeline, job
        self._ended = threading.Event()
        self._control = state.Control(pipeline.kafka)
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
        reader: state.Reader | None = None
        told = 0.0
        while not self._ended.is_set():
            try:
                if reader is None:
                    reader = state.Reader(self._pipeline.kafka, state.CONTROL_TOPIC, committed=False)
                for key, value in reader.poll(0.2):
                    if key == request_key(self.name) and value is not None:
                        self._answer(value)
                if time.monotonic() - told >= self._pipeline.heartbeat_interval:
                    told = time.monotonic()
                    self._write(wait=0)
            except BottledWaterError as error:
                log.debug("Control: %s", error)
                self._ended.wait(1.0)
        if reader is not None:
            reader.close()

    def _answer(self, request: dict[str, Any]) -> None:
        if request.get("epoch") != self._job.epoch:
            return  # of an earlier job
        log.info("Asked to stop%s.", " for good" if request.get("retire") else "")
        self.status.retired = bool(request.get("retire"))
        self.stopped.set()
        self._control.write(request_key(self.name), None, wait=0)

    def _write(self, wait: float) -> None:
        record = {
            "state": self.status.state,
            "job": self._job.to_json(),
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
    return state.read_facts(pipeline.kafka, state.CONTROL_TOPIC, committed=False).get(status_key(name))


def request_stop(pipeline: Pipeline, cluster: Cluster, *, retire: bool = False) -> dict[str, Any] | None:
    """Ask the running job of a slot to stop; returns the status that it was addressed by, None if there is none.

    :param retire: for good: ``drop_slot(when='retired')`` may then drop the slot.
    """
    name = pipeline_name(cluster, pipeline.slot)
    status = read_status(pipeline, name)
    if status is None:
        return None
    _request(pipeline, name, status["job"]["epoch"], retire)
    if retire and status["state"] in ("stopped", "finished", "failed"):
        control = state.Control(pipeline.kafka)
        try:
            control.write(status_key(name), {**status, "retired": True})
        finally:
            control.close()
    return status


def request_stop_of(pipeline: Pipeline, cluster: Cluster, job: f.Job) -> None:
    """Ask one job to stop, whether or not it has reported yet.

    :raises Outage: Kafka does not take the request.
    """
    _request(pipeline, pipeline_name(cluster, pipeline.slot), job.epoch, retire=False)


def _request(pipeline: Pipeline, name: str, epoch: int, retire: bool) -> None:
    control = state.Control(pipeline.kafka)
    try:
        control.write(request_key(name), {"command": "stop", "epoch": epoch, "retire": retire, "at": time.time()})
    finally:
        control.close()


def wait_ended(pipeline: Pipeline, cluster: Cluster, job_id: str, *, timeout: float) -> dict[str, Any] | None:
    """Wait until a job has written its last status; None if it has not in time."""
    name = pipeline_name(cluster, pipeline.slot)
    end = Topics(pipeline.kafka).ends(state.CONTROL_TOPIC, 1)[0]
    reader = state.Reader(pipeline.kafka, state.CONTROL_TOPIC, committed=False)
    deadline = time.monotonic() + timeout
    try:
        try:
            reader.read_to(end, timeout=timeout)
        except Outage:
            return None
        while time.monotonic() < deadline:
            status = reader.values.get(status_key(name))
            if status is None or status["job"]["id"] != job_id or status["state"] in ("stopped", "finished", "failed"):
                return status
            reader.poll(0.2)
        return None
    finally:
        reader.close()
