"""``bottledwater demo``: loads real data, lets writers change it from before the snapshot until the end, runs the DAG,
and verifies."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airflow_bottledwater.cli.verify import show
from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.jobs import requests, status
from airflow_bottledwater.local import flights
from airflow_bottledwater.local.demo_stack import DAG, SLOT, DemoStack, alone, console, say
from airflow_bottledwater.local.waiting import until
from airflow_bottledwater.postgres import publication, slot
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.verify import driver

#: seconds for which the writers go on while the stream runs
STREAM_SECONDS = 20.0
#: seconds for one phase of the run before the demo gives up
STALLED = 240.0
#: seconds between two reports
_EVERY = 4.0


class DemoFailed(BottledWaterError):
    """The demo did not show what it is meant to show."""


@contextmanager
def _running(folder: Path) -> Iterator[DemoStack]:
    """The servers, which begin with nothing."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    shutil.rmtree(folder, ignore_errors=True)
    stack = DemoStack(folder, die_with_parent=True)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, interrupt)
    try:
        stack.start()
        yield stack
    finally:
        # a second Ctrl-C must not leave some of the servers running
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say("Stopping everything that was started.")
        stack.stop()


def demo() -> None:
    """Run the demo from start to end.

    :raises DemoFailed: the run failed, a topic and its table differ, or the snapshot did not overlap with the writers.
    :raises Refused: another demo runs.
    """
    began = time.monotonic()
    with alone("demo") as folder, _running(folder) as stack:
        writers = flights.Writers(stack.dsn)
        writers.start()
        say(
            "Four sessions write: delays, cancellations, new flights, key changes, several tables in one transaction, "
            "roll-backs."
        )
        try:
            seen = _Run(stack, writers).follow()
        finally:
            writers.stop()
        _check_overlap(seen)
        _check_gone(stack)
    say(f"Done in {time.monotonic() - began:.0f} s.")


class _Run:
    """A run of the DAG, followed from the trigger to the teardown; the stream is stopped when the writers have run for
    their time."""

    def __init__(self, stack: DemoStack, writers: flights.Writers) -> None:
        self._stack, self._writers = stack, writers
        self._client = stack.airflow.client()
        self._id = self._client.trigger(DAG, {"tables": list(flights.TABLES), "slot": SLOT, "drop_slot": "always"})
        say(f"Triggered DAG {DAG!r}: {stack.airflow.url}/dags/{DAG}/runs/{self._id}")
        self._states: dict[str, str] = {}
        self._phase = time.monotonic()
        self._seen: status.PipelineReport | None = None
        self._rows: tuple[int, float] | None = None

    def follow(self) -> status.PipelineReport | None:
        """Follow the run to its end; returns the last report of the pipeline.

        :raises DemoFailed: the run failed, or makes no progress any more.
        """
        streaming_since = shown = 0.0
        stopped = False
        while True:
            time.sleep(0.5)
            self._look_at_tasks()
            if (state := self._client.run(DAG, self._id)["state"]) == "success":
                return self._seen
            if state == "failed":
                raise DemoFailed(f"The DAG run failed; its tasks: {self._states}.")
            made, dropping = "create_slot" in self._states, stopped and "drop_slot" in self._states
            if time.monotonic() - shown >= _EVERY and made and not dropping:
                shown = time.monotonic()
                self._look()
                self._show()
            if self._states.get("stream") == "deferred" and self._seen and self._seen.position:
                streaming_since = streaming_since or time.monotonic()
            if streaming_since and time.monotonic() - streaming_since > STREAM_SECONDS and not stopped:
                self._end()
                stopped = True
            if time.monotonic() - self._phase > STALLED:
                raise DemoFailed(f"Nothing happened for {STALLED:.0f} s; tasks: {self._states}.")

    def _look_at_tasks(self) -> None:
        """Print the tasks whose state has changed."""
        for task in self._client.task_instances(DAG, self._id):
            name, state = task["task_id"], task["state"]
            if state == self._states.get(name) or state in (None, "scheduled", "queued"):
                continue
            self._states[name] = state
            self._phase = time.monotonic()
            say(f"  task {name}: {state}")
            if state == "failed":
                log = self._client.task_log(DAG, self._id, name, max(1, task.get("try_number") or 1))
                raise DemoFailed(f"Task {name} failed:\n{log[-3000:]}")

    def _look(self) -> None:
        """Read the pipeline's report, if there is one."""
        try:
            found = status.report(self._stack.pipeline)
        except BottledWaterError:
            return
        if found.tables:
            self._seen = found

    def _show(self) -> None:
        """Print a line about the progress of the snapshot or the stream."""
        if (seen := self._seen) is None or (job := seen.job) is None:
            return
        lag = seen.slot.lag if seen.slot else 0
        if job.state == "snapshot":
            rows, at = sum(t.rows for t in seen.tables), time.monotonic()
            rate = ""
            if self._rows is not None and rows > self._rows[0]:
                rate = f", {(rows - self._rows[0]) / (at - self._rows[1]):,.0f} rows/s"
            self._rows = rows, at
            say(f"  snapshot: {rows:,} rows{rate}; slot {lag / 2**20:.1f} MiB behind")
        elif job.state == "streaming":
            say(
                f"  stream: {job.counters.get('published', 0):,} records, "
                f"{job.counters.get('skipped_transactions', 0):,} transactions left to the snapshot; slot "
                f"{lag / 2**20:.2f} MiB behind"
            )

    def _verify(self) -> None:
        """Compare the topics with the tables, while the writers write and the stream runs.

        :raises DemoFailed: a topic and its table differ.
        """
        say("The topics are compared with the tables, while all go on (bottledwater verify).")
        pipeline = self._stack.pipeline
        found = driver.run(pipeline, driver.in_threads(pipeline))
        show(found, console)
        if advice := found.advice():
            raise DemoFailed(advice)

    def _end(self) -> None:
        """Verify, stop the writers, wait until the stream has caught up, and ask it to stop for good."""
        self._verify()
        writers = self._writers
        writers.stop()
        say(f"The writers have stopped after {writers.committed:,} transactions ({writers.rolled_back:,} rolled back).")
        self._catch_up()
        with connect(self._stack.dsn) as connection:
            requests.stop_pipeline(self._stack.pipeline, identify(connection), retire=True)
        say("The stream is asked to stop for good; the DAG tears down.")

    def _catch_up(self) -> None:
        """Wait until everything is published that is committed now."""
        with connect(self._stack.dsn) as connection:
            row = connection.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
        target = int(row[0]) if row else 0

        def caught_up() -> bool:
            self._look()
            seen = self._seen
            reported = [seen.position, seen.job.position if seen.job else ""] if seen else [""]
            return all(position and int(position.partition("/")[0], 16) >= target for position in reported)

        until(caught_up, timeout=STALLED, otherwise=lambda: "the stream did not reach the end of the WAL", pause=0.5)
        self._show()


def _check_overlap(seen: status.PipelineReport | None) -> None:
    """Check that the snapshot overlapped with the writers, and print how.

    :raises DemoFailed: there was no overlap.
    """
    if seen is None or (job := seen.job) is None:
        raise DemoFailed("No job has ever reported.")
    counters = job.counters
    boundary = seen.tables[0].boundary
    in_progress = len([x for x in boundary.split(":")[2].split(",") if x])
    skipped = counters.get("skipped_transactions", 0)
    published = counters.get("transactions", 0) - skipped
    say(
        f"At the boundary {boundary} {in_progress} transactions were in progress; {skipped:,} were skipped, since the "
        f"snapshot has them; {published:,} were published after it. {counters.get('dead_letters', 0)} dead letters."
    )
    if not (in_progress and skipped and published > 0):
        raise DemoFailed("The snapshot did not overlap with the writers, so this run proves nothing.")


def _check_gone(stack: DemoStack) -> None:
    """Check that the teardown has dropped slot and publications."""
    with connect(stack.dsn) as connection:
        left = [f"slot {s.name}" for s in slot.states(connection)]
        left += [f"publication {n}" for n in publication.names(SLOT) if publication.read(connection, n)]
    if left:
        raise DemoFailed(f"The teardown left {', '.join(left)}.")
    say("The teardown has dropped the slot and both publications.")
