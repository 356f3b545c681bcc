"""What Spark itself could spoil: each kind of process of a real job dies, or stands still while another takes over."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_bottledwater.jobs import status, submit, supervise
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.spark.job import EXIT_FAILED, EXIT_TRANSIENT
from tests.faults.conftest import SEED
from tests.support.again import ask, check_rows, ended
from tests.support.forms import Draw
from tests.support.live_reader import LiveReader
from tests.support.options import has_hashed_key
from tests.support.topics import Flow, MakeFlow, read
from tests.support.upheaval import Upheaval
from tests.support.waiting import until
from tests.support.writers import PREPARING, SHORT, Habit, Writers, audit, make_tables, state_topic

pytestmark = pytest.mark.long


TABLES = ("a", "b")
ROWS = 3000
HABITS = (Habit(open_for=(0.05, 0.3)), SHORT, PREPARING)


class SparkJob:
    """A job as the command and Airflow submit it.

    :param kind: stream or snapshot.
    """

    def __init__(self, folder: Path, flow: Flow, kind: str) -> None:
        self.run = folder
        folder.mkdir()
        settings = flow.pipeline.write(folder)
        supervise.start(folder, submit.command(kind, settings, master="local[2]"), submit.environment())

    def __enter__(self) -> SparkJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        supervise.stop(self.run, timeout=5)

    def _processes(self) -> list[psutil.Process]:
        supervisor = int(json.loads((self.run / "supervisor.json").read_text())["pid"])
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(supervisor).children(recursive=True)
        return []

    def processes(self, victim: str) -> list[psutil.Process]:
        """Those of one kind: driver (Python), jvm, worker (forked from Spark's daemon)."""
        driver = json.loads((self.run / "driver.json").read_text())["pid"]
        found: dict[str, list[psutil.Process]] = {"driver": [], "jvm": [], "worker": []}
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                arguments = " ".join(process.cmdline())
                parent = process.parent()
                if process.pid == driver:
                    found["driver"].append(process)
                elif process.name() == "java":
                    found["jvm"].append(process)
                elif (
                    "airflow_bottledwater.spark.installed" in arguments
                    and parent is not None
                    and parent.name() != "java"
                ):
                    found["worker"].append(process)
        return found[victim]

    @property
    def log(self) -> str:
        """Its output."""
        return (self.run / supervise.LOG).read_text()

    def ended(self, seconds: float = 90.0) -> int:
        """Wait until nothing of it lives; its exit code."""
        until(lambda: not supervise.running(self.run), "the job's end", seconds)
        code = supervise.exit_code(self.run)
        assert code is not None, self.log
        return code

    def stop(self) -> None:
        """As the command does."""
        assert supervise.stop(self.run)


@pytest.fixture
def submitted(tmp_path: Path) -> Iterator[Callable[[Flow, str], SparkJob]]:
    """Submits jobs; all of them end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda flow, kind: stack.enter_context(SparkJob(tmp_path / f"{kind}-{time.time_ns()}", flow, kind))


Submitted = Callable[[Flow, str], SparkJob]


def _ready(flow: Flow, draw: Draw, rows: int) -> Flow:
    make_tables(flow, TABLES, rows)
    draw(flow, SEED, TABLES)
    flow.create()
    return flow


def _writers(flow: Flow) -> Writers:
    return Writers(flow.dsn, TABLES, 1, ROWS, HABITS, (0.01, 0.1))


def _more(reader: LiveReader, job: SparkJob, count: int = 50, seconds: float = 120.0) -> None:
    before = len(reader.arrivals)
    until(lambda: len(reader.arrivals) > before + count or not supervise.running(job.run), "records", seconds)
    assert supervise.running(job.run), job.log


@contextlib.contextmanager
def _streaming(
    make_flow: MakeFlow, submitted: Submitted, draw: Draw, **settings: Any
) -> Iterator[tuple[Flow, LiveReader, SparkJob]]:
    """A stream job that publishes what writers do; behind it the rest is streamed, and everything must be there
    once."""
    flow = _ready(make_flow(tables=TABLES, **settings), draw, ROWS)
    with _writers(flow):
        flow.snapshot()
        with LiveReader(flow, TABLES) as reader:
            job = submitted(flow, "stream")
            reader.goes_on()
            _more(reader, job)
            yield flow, reader, job
    flow.stream()
    audit(flow, TABLES).check()


@pytest.mark.parametrize("victim", ["driver", "jvm", "worker"])
def test_a_stream_whose_process_is_killed(make_flow: MakeFlow, submitted: Submitted, draw: Draw, victim: str) -> None:
    with _streaming(make_flow, submitted, draw) as (flow, reader, job):
        time.sleep(random.uniform(0.0, 0.5))
        killed = job.processes(victim)
        assert killed, [p.cmdline() for p in job._processes()]
        for process in killed:
            process.kill()
        # Spark may start a worker's task again by itself; if the job ends, it says that submitting it again helps.
        # Without its driver or JVM it ends, although its worker may publish until it notices
        dead = time.time()
        until(
            lambda: not supervise.running(job.run) or (victim == "worker" and reader.committed > dead),
            "an end, or later changes",
        )
        if not supervise.running(job.run):
            assert supervise.exit_code(job.run) not in (0, EXIT_FAILED), job.log
            job = submitted(flow, "stream")
        _more(reader, job)
        job.stop()


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_a_stream_that_stood_still_and_was_replaced_ends(
    make_flow: MakeFlow, submitted: Submitted, draw: Draw, victim: str
) -> None:
    with _streaming(make_flow, submitted, draw) as (flow, reader, zombie):
        stopped = zombie.processes(victim)
        assert stopped, [p.cmdline() for p in zombie._processes()]
        for process in stopped:
            process.suspend()
        flow.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE active AND database = current_database()"
        )
        time.sleep(1.0)
        successor = submitted(flow, "stream")
        until(lambda: len(_epochs(flow)) > 1, "the successor publishes")
        for process in stopped:
            process.resume()
        assert zombie.ended() in (EXIT_FAILED, EXIT_TRANSIENT), zombie.log
        outcome = supervise.outcome(zombie.run)
        assert outcome is not None and outcome.kind == "TakenOver", zombie.log
        assert "was taken over by" in outcome.error
        _more(reader, successor)
        successor.stop()


def _epochs(flow: Flow) -> set[int]:
    streamed = [m.value for m in read(flow.kafka, state_topic(flow)) if m.value and "ordinal" in m.value]
    return {value["epoch"] for value in streamed}


def test_a_stream_whose_broker_dies_goes_on(
    make_flow: MakeFlow, submitted: Submitted, draw: Draw, kafka: KafkaBroker
) -> None:
    with _streaming(make_flow, submitted, draw) as (_, reader, job):
        kafka.kill()
        time.sleep(5.0)
        kafka.start()
        _more(reader, job)
        job.stop()


@pytest.mark.timeout(1200)
def test_rows_are_read_again_while_their_tables_are_written_truncated_and_altered(
    make_flow: MakeFlow, submitted: Submitted, draw: Draw, seed: int
) -> None:
    """Two live snapshots beside the stream; the job is killed in the second one, and the next one goes on with it."""
    flow = make_flow(tables=TABLES, batch_bytes=1 << 20)
    make_tables(flow, TABLES, 4 * ROWS)
    draw(flow, seed, TABLES)
    flow.create()
    with Writers(flow.dsn, TABLES, seed, 4 * ROWS, HABITS, (0.01, 0.1)):
        flow.snapshot()
        job = submitted(flow, "stream")
        limits = {"rows_per_second": 5000.0}
        with Upheaval(flow.dsn, TABLES, seed, ROWS, ("alter", "truncate", "rewrite")) as upheaval:
            asked = [ask(flow, TABLES, sweep=True, **limits)]
            ended(flow, asked, ())
            until(lambda: len(upheaval.done) >= 3, "something is done to whole tables")
            by_key = seed % 2 == 0 and not has_hashed_key(flow, TABLES)
            asked.append(ask(flow, TABLES, by_key=by_key, **limits))
            until(lambda: flow.reported(asked[1].id).rows > 0, "rows are read again")
            for process in job.processes("worker"):
                process.kill()
            if until(lambda: not supervise.running(job.run) or flow.reported(asked[1].id).ended, "it goes on"):
                code = supervise.exit_code(job.run)
                assert code is None or code not in (0, EXIT_FAILED), job.log
            if not supervise.running(job.run):
                job = submitted(flow, "stream")
            ended(flow, asked, ())
        job.stop()
    flow.stream()
    assert {flow.reported(each.id).state for each in asked} == {"finished"}
    alone, _ = check_rows(flow, TABLES, asked, upheaval.done)
    # a table that was truncated gets its rows in one transaction, which is larger than max_transaction_bytes
    counted = audit(flow, TABLES, cut_from=50).check().statistics
    assert alone >= 100 and counted.truncated >= 1
    assert {each.what for each in upheaval.done} == {"alter", "truncate", "rewrite"}


@pytest.mark.parametrize("victim", ["driver", "jvm", "worker", "holder"])
def test_a_snapshot_whose_process_is_killed_is_resumed(make_flow: MakeFlow, submitted: Submitted, victim: str) -> None:
    flow = make_flow(tables=TABLES, lanes=2)
    # without other forms, which would take minutes to be read: so many rows are needed to be killed among them
    make_tables(flow, TABLES, 40 * ROWS)
    flow.create()
    with _writers(flow):
        job = submitted(flow, "snapshot")
        until(lambda: _ranges(flow) > 2 or not supervise.running(job.run), "the first ranges")
        if victim == "holder":
            flow.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'bottledwater snapshot holder' AND datname = current_database()"
            )
        else:
            for process in job.processes(victim):
                process.kill()
        code = job.ended()
        assert code not in (0, EXIT_FAILED), job.log
        assert not status.report(flow.pipeline).complete
        again = submitted(flow, "snapshot")
        assert again.ended(180) == 0, again.log
        flow.stream()
    flow.stream()
    audit(flow, TABLES, resumed=True).check()


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_a_snapshot_that_stood_still_and_was_replaced_ends(
    make_flow: MakeFlow, submitted: Submitted, draw: Draw, victim: str
) -> None:
    flow = _ready(make_flow(tables=TABLES, lanes=2), draw, 20 * ROWS)
    with _writers(flow):
        zombie = submitted(flow, "snapshot")
        until(lambda: _ranges(flow) > 2 or not supervise.running(zombie.run), "the first ranges")
        stopped = zombie.processes(victim)
        assert stopped, zombie.log
        for process in stopped:
            process.suspend()
        flow.snapshot()
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):  # its driver may have noticed, and ended it
                process.resume()
        assert zombie.ended() == EXIT_FAILED, zombie.log
        outcome = supervise.outcome(zombie.run)
        assert outcome is not None and outcome.kind == "TakenOver", zombie.log
        flow.stream()
    flow.stream()
    audit(flow, TABLES, resumed=True).check()


def _ranges(flow: Flow) -> int:
    return sum(int(table.ranges.partition("/")[0]) for table in status.report(flow.pipeline).tables)
