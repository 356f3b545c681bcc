"""Spark's tasks and workers: which errors of ours it sees as failures, and what a task that is started again does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark import SparkConf, SparkContext, TaskContext, cloudpickle

from airflow_bottledwater.errors import Outage, Refused, TakenOver
from airflow_bottledwater.jobs.submit import LOCAL_CONF
from airflow_bottledwater.postgres import watch
from airflow_bottledwater.snapshot import driver as snapshot_driver
from airflow_bottledwater.snapshot.task import SnapshotResult
from airflow_bottledwater.spark import error_codec, job, snapshot, stream, tasks, verify
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.stream.start import begin
from airflow_bottledwater.verify import driver
from tests.support.topics import MakeFlow
from tests.support.waiting import until

# Spark's workers do not have this module
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.long
def test_a_job_imports_neither_pandas_nor_arrow() -> None:
    code = (
        "import sys; from airflow_bottledwater.spark import job\n"
        "with job.context('x', {'spark.master': 'local[1]', 'spark.ui.enabled': 'false'}) as context:\n"
        "    assert context.parallelize([1], 1).map(lambda x: x + 1).collect() == [2]\n"
        "    print([m for m in ('pandas', 'pyarrow', 'google.protobuf') if m in sys.modules])\n"
        "import pandas"
    )
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def context() -> Iterator[SparkContext]:
    """As in a cluster: a task that fails is started again, up to three times."""
    conf = SparkConf().setMaster("local[2,4]").setAppName("tasks").setAll(list(LOCAL_CONF.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        made = SparkContext(conf=conf)
    made.setLogLevel("OFF")
    try:
        yield made
    finally:
        made.stop()


def failed_attempts(context: SparkContext, act: Callable[[], Any]) -> int:
    """How many tasks' attempts failed while this ran."""

    def count() -> int:
        tracker = context.statusTracker()
        stages = [s for j in tracker.getJobIdsForGroup() if (i := tracker.getJobInfo(j)) for s in i.stageIds]
        return sum(i.numFailedTasks for s in stages if (i := tracker.getStageInfo(s)))

    before = count()
    act()
    return count() - before


def test_workers_import_pyspark_as_it_is_installed(context: SparkContext) -> None:
    """Python compiles what it imports from Spark's own archive at each start."""

    def imported(_: int) -> str:
        import pyspark.worker

        return str(pyspark.worker.__file__)

    assert ".zip" not in context.parallelize([1], 1).map(imported).collect()[0]


#: a lane, or a stream's start, whose settings are nowhere: a permanent error in the task
NOWHERE: Any = SimpleNamespace(lane=0, position="0/0", state_topic="", job=None)


def test_a_verification_reads_tables_and_topics_in_tasks(
    context: SparkContext, make_flow: MakeFlow, tmp_path: Path
) -> None:
    flow = make_flow(tables="items", partitions=3)
    flow.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text)")
    flow.execute("INSERT INTO items SELECT g, 'item ' || g FROM generate_series(1, 500) g")
    flow.create()
    flow.snapshot()
    file = SettingsFile(str(flow.pipeline.write(tmp_path)))
    read = partial(verify.run_readings, context, flow.pipeline, file)
    with flow.streaming() as errors:
        assert driver.run(flow.pipeline, read).as_json()["equal"]
        producer = Producer({"bootstrap.servers": flow.kafka.bootstrap, "partitioner": "murmur2_random"})
        producer.produce(flow.topic("items"), None, b'{"id":7}')
        producer.flush(60)
        (table,) = driver.run(flow.pipeline, read).tables
        assert table.counts == {"missing": 1}
    assert not errors
    with pytest.raises(Refused, match="/nowhere"):
        verify.run_readings(context, flow.pipeline, SettingsFile("/nowhere/pipeline.json"), [NOWHERE])


@pytest.mark.long
def test_tasks_read_on_under_a_new_snapshot_when_theirs_is_given_up(
    context: SparkContext, make_flow: MakeFlow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_INTERVAL", 0.2)
    flow = make_flow(tables="items", lock_queue_limit=0.3, range_bytes=65536)
    flow.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text)")
    flow.execute("INSERT INTO items SELECT g, repeat('item ' || g, 5) FROM generate_series(1, 500000) g")
    flow.create()
    file = SettingsFile(str(flow.pipeline.write(tmp_path)))
    tasks.warm_workers(context, flow.pipeline, 2, snapshot.warm)
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(
                snapshot_driver.run(flow.pipeline, partial(snapshot.run_lanes, context, flow.pipeline, file))
            )
        except BaseException as error:
            results.append(error)

    def found() -> Any:
        return flow.job

    taking = threading.Thread(target=work, daemon=True)
    taking.start()
    until(lambda: found() and found().progress.get("ranges_done"), "it reads", failed=results)
    flow.transaction("LOCK TABLE items IN ACCESS EXCLUSIVE MODE", "UPDATE items SET name = 'new' WHERE id % 1000 = 1")
    taking.join(120)
    assert [(each.limit, each.step) for each in found().guard] == [("locks", "renewed")]
    (result,) = results
    assert isinstance(result, SnapshotResult) and 500_000 <= result.rows < 600_000, result
    flow.execute("DELETE FROM items WHERE id % 1000 = 2")
    flow.stream()
    assert flow.compare("items").differences == []


def test_a_lanes_permanent_error_is_not_tried_again(context: SparkContext) -> None:
    def lanes() -> None:
        nothing: Any = None
        with pytest.raises(Refused, match="/nowhere"):
            snapshot.run_lanes(context, nothing, SettingsFile("/nowhere/pipeline.json"), [NOWHERE, NOWHERE])

    assert failed_attempts(context, lanes) == 0


def test_a_streams_permanent_error_is_not_tried_again(context: SparkContext) -> None:
    def act() -> None:
        nothing: Any = None
        with pytest.raises(Refused, match="/nowhere"):
            stream.run_task(context, nothing, SettingsFile("/nowhere/pipeline.json"), NOWHERE, False, threading.Event())

    assert failed_attempts(context, act) == 0


def _away(_: int) -> Any:
    def work() -> None:
        raise Outage(f"The broker is away in attempt {TaskContext.get().attemptNumber()}.")  # type: ignore[union-attr]

    return error_codec.returned(work)


def test_an_outage_is_tried_again(context: SparkContext) -> None:
    def act() -> None:
        with pytest.raises(Exception, match="bottledwater-error") as raised:
            context.parallelize([1], 1).map(_away).collect()
        assert str(job.translate(raised.value)).startswith("The broker is away")

    assert failed_attempts(context, act) == 4


def test_one_lane_that_fails_ends_the_others(context: SparkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = error_codec.Failure(str(error_codec.pack(TakenOver("Another job has it."))))
    wait = time.sleep

    def run(_: str, task: Any) -> Any:
        return failure if task.lane == 0 else wait(120)

    monkeypatch.setattr(snapshot, "_run_lane", run)
    tasks: Any = [SimpleNamespace(lane=lane) for lane in (0, 1)]
    nothing: Any = None
    begun = time.monotonic()
    with pytest.raises(TakenOver):
        snapshot.run_lanes(context, nothing, SettingsFile(""), tasks)
    while context.statusTracker().getActiveJobsIds():
        wait(0.1)
    assert time.monotonic() - begun < 60


def test_a_task_that_is_started_again_looks_first_whose_the_slot_is(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(skip_snapshot=True)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY)")
    flow.create()
    start = begin(flow.pipeline)
    attempt = SimpleNamespace(attemptNumber=lambda: 0)
    monkeypatch.setattr(TaskContext, "get", lambda: attempt)
    job.check_attempt(flow.pipeline, start.state_topic, start.job)
    attempt.attemptNumber = lambda: 1
    job.check_attempt(flow.pipeline, start.state_topic, start.job)
    begin(flow.pipeline)
    with pytest.raises(TakenOver):
        job.check_attempt(flow.pipeline, start.state_topic, start.job)
