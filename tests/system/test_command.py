"""The command on real servers: snapshot and stream through spark-submit, interrupted, started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater import processes
from airflow_bottledwater.jobs import status
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.topics import Flow, assert_exactly_once_in_order
from tests.support.verifying import (
    ended_equal,
    holds_snapshot,
    start_command,
    verified_by_command,
)
from tests.support.waiting import until


def _start(flow: Flow, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [
        str(Path(sys.executable).parent / "bottledwater"), *arguments, "-d", flow.dsn, "-s", flow.pipeline.slot,
        "-b", flow.kafka.bootstrap, "-p", flow.pipeline.topic_prefix,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def _run(flow: Flow, *arguments: str) -> str:
    process = _start(flow, *arguments)
    output = process.communicate(timeout=180)[0].decode()
    assert process.returncode == 0, output
    return output


_STREAM = (
    "-f",
    "json",
    "-i",
    "a",
    "--master",
    "local[2]",
    "--set",
    "replication_factor=1",
    "--set",
    "keepalive_interval=0.5",
)


def _until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    def ask() -> bool:
        assert process.poll() is None, process.communicate()
        return condition()

    until(ask, "what the process does", 180, pause=0.3)


@pytest.mark.long
def test_the_command_is_interrupted_exits_with_0_and_goes_on_from_the_slot(database: str, kafka: KafkaBroker) -> None:
    flow = Flow(database, kafka, None, tables="a")
    flow.execute(
        "CREATE TABLE a (id bigint PRIMARY KEY, n int)", "INSERT INTO a SELECT g, 0 FROM generate_series(1, 1000) g"
    )
    process = _start(flow, *_STREAM)
    try:
        _until(lambda: status.report(flow.pipeline).complete, process)
        flow.execute("UPDATE a SET n = 1 WHERE id <= 10")
        _until(lambda: status.report(flow.pipeline).counters["published"] >= 10, process)
        told = _run(flow, "snapshot", "--tables", "a", "--where", "id <= 20", "--sweep")
        assert "20 rows published, 0 superseded" in told and "0 tombstones" in told
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.communicate()[0].decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    # flushed and acknowledged: the slot is where the stream was, and free
    report = status.report(flow.pipeline)
    assert report.slot is not None
    assert report.slot.active_pid is None
    assert int(report.position.partition("/")[0], 16) == report.slot.confirmed
    flow.execute("UPDATE a SET n = 2 WHERE id <= 10", "DELETE FROM a WHERE id = 5")
    # the verification waits until the bounded run has published what was committed before it
    verification = start_command(flow)
    try:
        _until(lambda: holds_snapshot(flow.execute, "a"), verification)
        _run(flow, *_STREAM, "--bounded")
        assert ended_equal(verification).rows == 999
    finally:
        verification.kill()
    messages = flow.read("a")
    assert_exactly_once_in_order(messages)
    assert len([m for m in messages if m.op == "r" and not m.snapshot]) == 1000
    assert sorted(m.key["id"] for m in messages if m.snapshot) == list(range(1, 21))
    told = json.loads(_run(flow, "status", "--json"))
    assert told["complete"]
    assert told["tables"][0]["rows"] == 1000
    assert "Kept" in _run(flow, "drop-slot")
    assert "Dropped slot" in _run(flow, "drop-slot", "--when", "always")


def _probe(flow: Flow, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "bottledwater"), "status", "--check", *options),
            *("-d", flow.dsn, "-s", flow.pipeline.slot, "-b", flow.kafka.bootstrap),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def _epoch(flow: Flow) -> int:
    """Of the job that reported last."""
    return job.job.epoch if (job := flow.job) else 0


def test_as_a_service_the_command_starts_a_killed_job_again_and_takes_it_along_when_it_is_killed_itself(
    database: str, kafka: KafkaBroker, tmp_path: Path
) -> None:
    """And probes are answered."""
    flow = Flow(database, kafka, None, tables="a")
    flow.execute(
        "CREATE TABLE a (id bigint PRIMARY KEY, n int)", "INSERT INTO a SELECT g, 0 FROM generate_series(1, 100) g"
    )
    process = _start(flow, *_STREAM, "--restart", "--log-format", "json", TMPDIR=str(tmp_path))
    try:
        _until(lambda: status.report(flow.pipeline).complete, process)
        flow.execute("UPDATE a SET n = 1 WHERE id <= 10")
        _until(lambda: status.report(flow.pipeline).counters["published"] >= 10, process)
        code, told = _probe(flow, "--max-lag", "0", "--max-age", "0.000001")
        assert (code, told.count("\n")) == (1, 1)
        killed = flow.job
        assert killed is not None
        os.kill(killed.job.pid, signal.SIGKILL)
        _until(lambda: _epoch(flow) > killed.job.epoch, process)
        flow.execute("UPDATE a SET n = 2 WHERE id <= 10")
        _until(lambda: status.report(flow.pipeline).counters["published"] >= 20, process)
        # each probe is a whole command
        _until(lambda: flow.state == "streaming" and _probe(flow)[0] == 0, process)
        assert verified_by_command(flow).rows == 100
        (folder,) = (found for found in tmp_path.glob("bottledwater-run-*") if (found / "supervisor.json").exists())
        members = processes.family(json.loads((folder / "supervisor.json").read_text())["pid"])
        assert list(folder.glob("spark-*/pyspark-*")), "Spark's files are not among those of the job"
        # supervisor, JVM, driver and worker
        assert len(members) >= 4
        process.kill()
        output = process.communicate(timeout=180)[0].decode()
        until(lambda: not processes.alive(members) and not folder.exists(), "the job and its files are gone")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    lines = [json.loads(line) for line in output.splitlines()]
    assert {line["slot"] for line in lines} == {flow.pipeline.slot}
    assert [line["message"] for line in lines if "It is started again in 2 s (1 of 10)" in line["message"]] != []
    report = status.report(flow.pipeline)
    assert report.slot is not None and report.slot.active_pid is None
    # in order: it could say that it ended
    assert report.job is not None and report.job.failed and not report.job.permanent
    code, told = _probe(flow)
    assert code == 1 and "Not ready: The job failed for a transient reason" in told, told
    assert_exactly_once_in_order(flow.read("a"))
