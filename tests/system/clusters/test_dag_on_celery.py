"""The DAG's life on CeleryExecutor: two workers and the triggerer have a host name and an AIRFLOW_HOME of their own, so
that a job can be watched and stopped through Kafka only. Spark runs on the worker's host, on a standalone cluster, or
on YARN."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters.dag import DAG, SPARKS, Stream, System, Yarn
from tests.support.clusters.hosts import available
from tests.support.verifying import verified_in_airflow
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(available()), reason=available()), pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=SPARKS)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    started = System(tmp_path_factory.mktemp("celery"), request.param)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def stream(system: System) -> Iterator[Stream]:
    started = Stream(system, "orders")
    yield started
    started.end()


def _signal(pids: Any, signum: int) -> None:
    for pid in pids:
        os.kill(pid, signum)


def test_it_streams_from_a_worker(system: System, stream: Stream) -> None:
    host, folder = stream.deferred()
    assert isinstance(system.spark, Yarn) or host in {worker.host for worker in system.airflow.workers}
    assert folder
    stream.nothing_lost_or_twice()


def test_marked_failed_the_job_on_the_worker_ends(system: System, stream: Stream) -> None:
    """The triggerer is on another host."""
    system.client.set_task_state(DAG, stream.run_id, "stream", "failed")
    stream.gone()
    until(lambda: stream.task("drop_slot")["state"] in ("success", "failed", "upstream_failed"), "the teardown")


def test_cleared_the_old_job_is_gone_before_the_new_one_starts(system: System, stream: Stream) -> None:
    # the slot was dropped with the run: another one, with a table of its own
    system.client.wait_run(DAG, stream.run_id, 90)
    stream.end()
    stream.__dict__.update(Stream(system, "tickets").__dict__)
    _, old = stream.deferred()
    stream.clear()
    _, new = stream.deferred(but=old)
    assert new != old and len({folder for _, folder in system.jobs().values()}) == 1


def test_another_triggerer_watches_the_same_job(system: System, stream: Stream) -> None:
    job = stream.deferred()
    triggerer = system.airflow.components["triggerer"]
    triggerer.kill()
    triggerer.start()
    assert stream.deferred() == job


@pytest.mark.parametrize("triggerer", ["runs", "is away"])
def test_a_retry_attaches_to_the_job_that_runs(system: System, stream: Stream, triggerer: str) -> None:
    """Airflow fails the deferred task itself: a triggerer that runs does not take that for the end of the task."""
    job = stream.deferred()
    tries = stream.task()["try_number"]
    component = system.airflow.components["triggerer"]
    if triggerer == "is away":
        component.kill()
    system.time_out(stream)
    until(lambda: stream.task()["try_number"] > tries, "the next try", pause=0.5)
    if triggerer == "is away":
        component.start()
    assert stream.deferred() == job, stream.why()
    # the processes that make up the job have not been asked to end either
    time.sleep(5.0)
    assert stream.deferred() == job, stream.why()
    stream.nothing_lost_or_twice()


def test_a_worker_that_dies_with_its_job_is_replaced_by_the_other(system: System, stream: Stream) -> None:
    host, folder = stream.deferred()
    if isinstance(system.spark, Yarn):
        # nothing of it is on the worker: an operator of the cluster ends it
        system.spark.cluster.kill(folder.removeprefix("stream-"))
        stream.deferred(but=folder)
        stream.nothing_lost_or_twice()
        return
    worker = system.airflow.components[host]
    pids = [pid for pid, (where, _) in system.jobs().items() if where == host]
    worker.kill()
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    other, _ = stream.deferred(but=folder)
    assert other != host
    worker.start()
    stream.nothing_lost_or_twice()


def test_a_job_that_hangs_is_replaced_and_publishes_nothing_when_it_wakes(system: System, stream: Stream) -> None:
    _, folder = stream.deferred()
    frozen = system.spark.all_of(system.airflow, folder)
    _signal(frozen, signal.SIGSTOP)
    try:
        new_host, new = stream.deferred(but=folder)
    finally:
        _signal((pid for pid in frozen if Path(f"/proc/{pid}").exists()), signal.SIGCONT)
    assert new != folder
    until(lambda: all(of == new for _, of in system.jobs().values()), "the old job has ended")
    stream.nothing_lost_or_twice()
    assert stream.deferred() == (new_host, new)


def test_a_run_that_is_ended_leaves_nothing(system: System, stream: Stream) -> None:
    stream.deferred()
    conf = {"slot": stream.name, "topic_prefix": "x", "format": "json", "executor_timeout": 180}
    verified_in_airflow(system.client, conf)
    system.client.set_run_state(DAG, stream.run_id, "failed")
    until(lambda: not system.jobs(), "no process of a job lives")
    until(lambda: stream.task("drop_slot")["state"] in ("success", "failed"), "the teardown has ended")
    assert stream.task("drop_slot")["state"] == "success", stream.why()
    assert system.execute(f"SELECT FROM pg_replication_slots WHERE slot_name = '{stream.name}'") == []
