"""Snapshot and stream on a Spark standalone cluster of two other hosts: what is done there, and what is said where it
cannot be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_bottledwater.jobs import status, submit, supervise
from tests.support.clusters.hosts import Host, Network, available
from tests.support.clusters.pipelines import ROWS, TABLES, live, make_flow
from tests.support.clusters.servers import ReachableServers
from tests.support.clusters.standalone import StandaloneCluster
from tests.support.live_reader import LiveReader
from tests.support.topics import Flow
from tests.support.waiting import until
from tests.support.writers import make_tables

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.long,
    # the servers are started once
    pytest.mark.xdist_group("standalone"),
]

#: for executors of a small cluster, and so that a lost one is noticed within the test
CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
    "spark.log.level": "WARN",
}
#: tasks wait until both hosts take part
BOTH = {"spark.scheduler.minRegisteredResourcesRatio": "1"}


class Job:
    """A job in client mode, whose executors are on the hosts. Nothing is said of the driver's address: it has to be
    right by itself."""

    def __init__(self, standalone: StandaloneCluster, flow: Flow, folder: Path, kind: str, **conf: str) -> None:
        folder.mkdir()
        self.run = folder
        settings = flow.pipeline.write(folder)
        tasks = 1 if kind == "stream" else flow.pipeline.lanes
        command = submit.command(kind, settings, master=standalone.url, conf={**CONF, **conf}, tasks=tasks)
        supervise.start(folder, command, submit.environment(master=standalone.url))

    @property
    def log(self) -> str:
        return (self.run / supervise.LOG).read_text()

    def ended(self, seconds: float = 600.0) -> int | None:
        until(lambda: not supervise.running(self.run), "the job's end", seconds)
        return supervise.exit_code(self.run)

    def error(self) -> tuple[str, bool]:
        """The message of a job that failed, and whether submitting it again may help."""
        assert self.ended() not in (0, None), self.log
        found = supervise.outcome(self.run)
        assert found is not None, self.log
        return found.error, found.transient


Start = Callable[..., Job]


@pytest.fixture
def start(standalone: StandaloneCluster, tmp_path: Path) -> Iterator[Start]:
    """Starts jobs; all of them end with the test."""
    made: list[Job] = []

    def one(flow: Flow, kind: str, **conf: str) -> Job:
        made.append(Job(standalone, flow, tmp_path / f"{kind}{len(made)}", kind, **conf))
        return made[-1]

    yield one
    for job in made:
        assert supervise.stop(job.run, timeout=10)
    # the next test finds free cores
    until(lambda: not standalone.state()["activeapps"], "no application is left")


def _more(reader: LiveReader, job: Job, seconds: float = 300.0) -> None:
    before = len(reader.arrivals)
    until(lambda: len(reader.arrivals) > before + 50 or not supervise.running(job.run), "more records", seconds)
    assert supervise.running(job.run), job.log


def _goes_on(reader: LiveReader, job: Job, flow: Flow, start: Start) -> Job:
    """After a loss: Spark has started the task again elsewhere, or the job has ended and was submitted again; returns
    the job."""
    before = len(reader.arrivals)
    until(lambda: len(reader.arrivals) > before + 50 or not supervise.running(job.run), "records, or an end", 300)
    if not supervise.running(job.run):
        assert job.error()[1], job.log
        job = start(flow, "stream")
    _more(reader, job)
    return job


def _executors(host: Host) -> list[int]:
    """The executors' JVMs and Python workers on a host, without Spark's worker daemon."""
    found = []
    for pid in host.processes():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in arguments or b"pyspark.daemon" in arguments:
                found.append(pid)
    return found


def _streams_on(network: Network, flow: Flow) -> Host:
    """The host on which the stream's task runs: by the connection that its reader has."""
    (row,) = until(
        lambda: flow.execute(
            "SELECT client_addr::text FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid"
            f" WHERE slot_name = '{flow.pipeline.slot}'"
        ),
        "the slot is read",
    )
    return next(host for host in network if host.address == row[0].partition("/")[0])


def _copies(standalone: StandaloneCluster) -> dict[Path, int]:
    """Copies of the settings in the work folders of all executors, with their modes."""
    found = {}
    for worker in standalone.workers:
        for path in worker.folder.glob("work/**/pipeline-*.json"):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.stat().st_mode & 0o777
    return found


def test_the_snapshot_is_taken_on_both_hosts(
    standalone: StandaloneCluster, servers: ReachableServers, start: Start
) -> None:
    flow = make_flow(servers, lanes=2)
    with live(flow, 10 * ROWS):
        job = start(flow, "snapshot", **BOTH)
        seen, modes = set(), dict[Path, int]()
        while supervise.running(job.run):
            modes |= _copies(standalone)
            seen |= {
                row[0]
                for row in flow.execute(
                    "SELECT DISTINCT client_addr::text FROM pg_stat_activity WHERE query LIKE 'COPY%' AND datname = "
                    "current_database()"
                )
            }
        assert supervise.exit_code(job.run) == 0, job.log
        assert {address.partition("/")[0] for address in seen} == {worker.address for worker in standalone.workers}
        assert status.report(flow.pipeline).complete
        # the settings were sent to both hosts, for this user only, and are gone
        assert len(modes) == 2 and set(modes.values()) == {0o600} and _copies(standalone) == {}


def test_a_stream_goes_on_without_the_executor_that_was_killed(
    servers: ReachableServers, network: Network, start: Start
) -> None:
    flow = make_flow(servers)
    with live(flow) as reader:
        flow.snapshot()
        job = start(flow, "stream")
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, job)
        for pid in _executors(_streams_on(network, flow)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job = _goes_on(reader, job, flow, start)
        assert supervise.stop(job.run)
        assert "StaleBatch" not in job.log


def test_a_stream_leaves_cores_to_other_jobs(
    standalone: StandaloneCluster, servers: ReachableServers, start: Start
) -> None:
    flow = make_flow(servers, lanes=1)
    with live(flow) as reader:
        flow.snapshot()
        job = start(flow, "stream")
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, job)
        verification = start(flow, "verify")
        assert verification.ended() == 0, verification.log
        _more(reader, job)
        assert [each["cores"] for each in standalone.state()["activeapps"]] == [1]


def test_an_executor_that_was_lost_but_lives_publishes_nothing(
    servers: ReachableServers, network: Network, start: Start
) -> None:
    """Its host freezes, Spark runs the task elsewhere, and the host wakes up with the task's process as it was."""
    flow = make_flow(servers)
    with live(flow) as reader:
        flow.snapshot()
        job = start(flow, "stream")
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, job)
        lost = _streams_on(network, flow)
        lost.freeze()
        try:
            # its walsender does not know that nobody listens any more
            flow.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            job = _goes_on(reader, job, flow, start)
        finally:
            lost.thaw()
        time.sleep(5.0)
        _more(reader, job)
        assert supervise.stop(job.run)


def test_a_lane_that_was_lost_but_lives_publishes_nothing(
    servers: ReachableServers, network: Network, start: Start
) -> None:
    """Its host freezes while it reads a range, Spark runs the lane elsewhere, and the host wakes up before the snapshot
    is complete, or after it."""
    flow = make_flow(servers, lanes=2)
    with live(flow, 20 * ROWS):
        job = start(flow, "snapshot", **BOTH)
        until(lambda: _ranges(flow) > 1 or not supervise.running(job.run), "the first ranges", 300)
        network[0].freeze()
        try:
            until(lambda: "Lost executor" in job.log or not supervise.running(job.run), "the executor is lost")
            before = _ranges(flow)
            until(lambda: _ranges(flow) > before or not supervise.running(job.run), "the other host goes on")
        finally:
            network[0].thaw()
        if job.ended() != 0:
            assert job.error()[1], job.log
            assert start(flow, "snapshot").ended() == 0
        time.sleep(5.0)
        assert status.report(flow.pipeline).complete


def test_a_worker_that_dies_with_its_executors_takes_part_again_when_it_is_back(
    standalone: StandaloneCluster, servers: ReachableServers, network: Network, start: Start
) -> None:
    """The stream goes on with the other one, and when that is lost, too, with the one that is back."""
    flow = make_flow(servers)
    with live(flow) as reader:
        flow.snapshot()
        job = start(flow, "stream")
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, job)
        first = _streams_on(network, flow)
        first.kill()
        job = _goes_on(reader, job, flow, start)
        assert _streams_on(network, flow) is not first
        (worker,) = [worker for worker in standalone.workers if worker.address == first.address]
        # the application has all the cores that it takes: it gets one there when it has lost the others
        worker.start()
        second = _streams_on(network, flow)
        second.kill()
        try:
            job = _goes_on(reader, job, flow, start)
            assert _streams_on(network, flow) is first
        finally:
            (worker,) = [worker for worker in standalone.workers if worker.address == second.address]
            worker.start()
        assert supervise.stop(job.run)


@pytest.mark.parametrize("kind", ["stream", "snapshot"])
def test_a_job_whose_executors_are_all_lost_says_so(
    standalone: StandaloneCluster, servers: ReachableServers, network: Network, start: Start, kind: str
) -> None:
    """Spark itself would wait for others for ever. When the cluster is back, a new job goes on."""
    flow = make_flow(servers, executor_timeout=120.0)
    with live(flow, ROWS if kind == "stream" else 20 * ROWS) as reader:
        if kind == "stream":
            flow.snapshot()
            job = start(flow, "stream")
            until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
            _more(reader, job)
        else:
            job = start(flow, "snapshot")
            until(lambda: _ranges(flow) > 1 or not supervise.running(job.run), "the first ranges", 300)
        began = time.monotonic()
        for host in network:
            host.kill()
        try:
            message, transient = job.error()
        finally:
            for worker in standalone.workers:
                worker.start()
        assert "all were lost, and the cluster gives no others" in message and transient
        assert time.monotonic() - began < 240
        if kind == "snapshot":
            assert start(flow, "snapshot").ended() == 0
        else:
            _more(reader, start(flow, "stream"))


def test_a_snapshot_goes_on_without_a_host(servers: ReachableServers, network: Network, start: Start) -> None:
    flow = make_flow(servers, lanes=2)
    with live(flow, 20 * ROWS):
        job = start(flow, "snapshot")
        until(lambda: _ranges(flow) > 1 or not supervise.running(job.run), "the first ranges", 300)
        for pid in _executors(network[0]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = job.ended()
        if code != 0:
            assert job.error()[1], job.log
            assert start(flow, "snapshot").ended() == 0
        assert status.report(flow.pipeline).complete


def _ranges(flow: Flow) -> int:
    return sum(int(table.ranges.partition("/")[0]) for table in status.report(flow.pipeline).tables)


# ------------------------------------------------------------------ the command
def _command(flow: Flow, *arguments: str) -> list[str]:
    pipeline = flow.pipeline
    return [
        str(Path(sys.executable).parent / "bottledwater"), *arguments, "-d", pipeline.postgres, "-s", pipeline.slot,
        "-b", pipeline.kafka["bootstrap.servers"], "-p", pipeline.topic_prefix, "-f", "json",
    ]  # fmt: skip


def test_the_command_is_interrupted_goes_on_and_is_stopped(
    standalone: StandaloneCluster, servers: ReachableServers, tmp_path: Path
) -> None:
    flow = make_flow(servers)
    names = (
        "xid_header",
        "range_bytes",
        "batch_bytes",
        "max_transaction_bytes",
        "replication_factor",
        "heartbeat_interval",
        "executor_timeout",
    )
    more = [part for name in names for part in ("--set", f"{name}={getattr(flow.pipeline, name)}")]
    more += [part for name, value in CONF.items() for part in ("--spark-conf", f"{name}={value}")]
    command = _command(flow, "-i", ",".join(TABLES), "--master", standalone.url, *more)
    log = tmp_path / "log"

    @contextlib.contextmanager
    def running() -> Iterator[subprocess.Popen[bytes]]:
        with log.open("ab") as output:
            # a shell lets what it runs in the background ignore SIGINT, and so would the command that was started by it
            process = subprocess.Popen(["env", "--default-signal=INT", *command], stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()  # a job without its command ends by itself
            process.wait()

    def arrives(reader: LiveReader, process: subprocess.Popen[bytes], many: int) -> None:
        until(lambda: len(reader.arrivals) >= many or process.poll() is not None, f"{many} records", 400)
        assert process.poll() is None, log.read_text()

    with live(flow) as reader:
        with running() as process:
            arrives(reader, process, 2 * ROWS + 50)
            # the driver is here, and both hosts have executors
            assert {worker["coresused"] for worker in standalone.state()["workers"] if worker["state"] == "ALIVE"} == {
                1
            }
            process.send_signal(signal.SIGINT)
            assert process.wait(90) == 0, log.read_text()
        until(lambda: not standalone.state()["activeapps"], "the application has ended")
        with running() as process:
            arrives(reader, process, len(reader.arrivals) + 50)
            stopped = subprocess.run(_command(flow, "stop"), capture_output=True, text=True, check=False)
            assert stopped.returncode == 0, stopped.stderr
            assert process.wait(90) == 0, log.read_text()
    until(lambda: not standalone.state()["activeapps"], "the application has ended")


# ------------------------------------------------------------------ what cannot work says so, soon
@pytest.fixture
def idle(servers: ReachableServers) -> Flow:
    """A pipeline whose snapshot is complete."""
    flow = make_flow(servers, executor_timeout=45.0)
    make_tables(flow, TABLES, 10)
    flow.create()
    flow.snapshot()
    return flow


@pytest.mark.parametrize("kind", ["stream", "snapshot"])
def test_executors_without_the_package(servers: ReachableServers, start: Start, tmp_path: Path, kind: str) -> None:
    flow = make_flow(servers)
    make_tables(flow, TABLES, 10)
    flow.create()
    if kind == "stream":
        flow.snapshot()
    bare = tmp_path / "python"
    # the interpreter of this environment, without its packages
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I "$@"\n')
    bare.chmod(0o755)
    began = time.monotonic()
    message, transient = start(
        flow, kind, **{"spark.pyspark.python": str(bare), "spark.pyspark.driver.python": sys.executable}
    ).error()
    assert "no module" in message and "[spark]" in message and not transient
    assert time.monotonic() - began < 90


@pytest.mark.parametrize("server", ["PostgreSQL", "Kafka"])
def test_executors_that_cannot_reach_a_server(idle: Flow, servers: ReachableServers, start: Start, server: str) -> None:
    """It listens on this machine only, as far as they can tell. They say so before the time for executors is over,
    which would put the blame on the cluster."""
    if server == "Kafka":
        idle.change(kafka={"bootstrap.servers": servers.bootstrap.replace(servers.address, "127.0.0.1")})
    else:
        idle.change(postgres=idle.pipeline.postgres.replace(servers.address, "127.0.0.1"))
    began = time.monotonic()
    message, transient = start(idle, "stream").error()
    assert "From the executor on host host" in message and f"{server} at 127.0.0.1" in message and transient
    assert time.monotonic() - began < 90


def test_executors_that_cannot_reach_the_driver(idle: Flow, start: Start) -> None:
    began = time.monotonic()
    job = start(idle, "stream", **{"spark.driver.host": "127.0.0.1"})
    message, transient = job.error()
    assert "No executor" in message and "127.0.0.1" in message and "spark.driver.host" in message and transient
    assert time.monotonic() - began < 120


def test_a_cluster_without_free_cores(idle: Flow, start: Start) -> None:
    message, transient = start(idle, "stream", **{"spark.executor.memory": "64g"}).error()
    assert "no free cores or memory" in message and transient
