"""The host of a job is lost, or cut off and back again, while Airflow's host can only look into Kafka. Executors that
are lost are in ``tests/system/clusters/test_pipeline_on_standalone.py``, which ``make test-faults`` runs, too."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.jobs import alive, stop, submitted
from airflow_bottledwater.jobs.watch import Ended, JobWatch
from airflow_bottledwater.local.process import plain_environment
from airflow_bottledwater.model.job import Owner
from tests.support import process_job
from tests.support.clusters.hosts import Host, Network, available
from tests.support.clusters.pipelines import ROWS, live, make_flow
from tests.support.clusters.servers import ReachableServers
from tests.support.live_reader import LiveReader
from tests.support.topics import Flow
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.long,
    # the servers are started once
    pytest.mark.xdist_group("hosts"),
]

ROOT = Path(__file__).parents[2]


class Job:
    """A stream on another host, without Spark."""

    def __init__(self, flow: Flow, host: Host, folder: Path) -> None:
        self.flow, self.id = flow, uuid.uuid4().hex
        self.identity: Any = {"id": self.id, "folder": "", "host": host.name, "application": "", "master": "spark"}
        submitted.announce(flow.pipeline, self.id, "stream", Owner("d", "r", "t", -1, host.name, "", "spark"), "", "")
        folder.mkdir()
        self.log = folder / "log"
        command = process_job.command("stream", flow.pipeline.write(folder), self.id)
        self.process: subprocess.Popen[bytes] = host.start(command, log=self.log, env=plain_environment(), cwd=ROOT)

    def end(self, seconds: float = 90) -> Ended:
        watch = JobWatch(self.flow.pipeline, self.identity, start_timeout=90, write=lambda level, line: None)
        try:
            return until(watch.fetch, "the job's end", seconds)
        finally:
            watch.close()


Start = Callable[[Flow, Host], Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts jobs; all of them end with the test."""
    made: list[Job] = []

    def one(flow: Flow, host: Host) -> Job:
        made.append(Job(flow, host, tmp_path / f"job{len(made)}"))
        return made[-1]

    yield one
    for job in made:
        job.process.kill()
        job.process.wait()


def _more(reader: LiveReader, job: Job) -> None:
    before = len(reader.arrivals)
    until(lambda: len(reader.arrivals) > before + 50 or job.process.poll() is not None, "more records")
    assert job.process.poll() is None, job.log.read_text()


@pytest.mark.parametrize("loss", ["killed", "cut off"])
def test_the_host_of_a_job_is_lost(
    servers: ReachableServers, network: Network, start: Start, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """One that was only cut off comes back, with its job as it was, and nothing that this sends is seen."""
    monkeypatch.setattr(alive, "_SHORTEST", 5.0)
    flow = make_flow(servers)
    with live(flow) as reader:
        flow.snapshot()
        job = start(flow, network[0])
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, job)
        if loss == "killed":
            network[0].kill()
        else:
            network[0].cut()
        try:
            end = job.end()
            assert end.lost and end.outcome.transient
            stop.stop(flow.pipeline, job.identity, timeout=2.0)
            successor = start(flow, network[1])
            _more(reader, successor)
        finally:
            if loss == "cut off":
                network[0].join()
        if loss == "cut off":
            until(lambda: job.process.poll() is not None, "the job that was cut off ends", 180)
            assert "was taken over by" in job.log.read_text() or "Asked to stop" in job.log.read_text()
        _more(reader, successor)
        stop.stop(flow.pipeline, successor.identity)
        found = successor.end()
        assert found.outcome.ok and found.outcome.stopped
