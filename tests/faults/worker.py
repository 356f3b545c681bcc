"""Jobs in processes of their own that kill or stop themselves at named points; the product knows nothing of it.

Run as a script it serves: jobs come as JSON lines on standard input, each is a fork (which saves the imports), and what
becomes of it is told on standard output. In the fork the functions around one named point are replaced; at its nth hit
a line is appended to a log, synced, and the process kills (or stops) itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from airflow_bottledwater import warm
from airflow_bottledwater.jobs.open_requests import OpenRequests
from airflow_bottledwater.jobs.snapshots import SnapshotRequests
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.producer import TransactionalProducer
from airflow_bottledwater.kafka.publisher import Publisher, Records
from airflow_bottledwater.live.chunks import LiveChunk
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.live.report import Reports
from airflow_bottledwater.live.snapshot import LiveSnapshot
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.provision import create
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot import driver
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.records import COMPLETE
from airflow_bottledwater.stream.source import ChangeSource
from airflow_bottledwater.tables import writer
from tests.support import running

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Trap:
    """What happens where.

    :param act: ``kill``, ``stop``, or ``kill-soon``: from a thread, ``delay`` seconds later.
    """

    point: str
    nth: int
    act: str
    delay: float
    log: str
    hits: int = 0
    sprung: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hit(self) -> None:
        """The point is reached."""
        with self.lock:
            self.hits += 1
            if self.hits != self.nth:
                return
            self.sprung = True
            self.write("hit")
            if self.act == "kill-soon":
                threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL if self.act == "kill" else signal.SIGSTOP)
                # another thread may be the one that takes the signal, a moment later: until then this one waits here
                time.sleep(0.2)

    def next_fires(self) -> bool:
        """Whether the next hit is the one."""
        return self.hits + 1 == self.nth

    def write(self, what: str) -> None:
        """A line that is on disk before anything else happens."""
        line = {"point": self.point, "what": what, "hit": self.hits, "pid": os.getpid(), "at": time.time()}
        with open(self.log, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


class _Here(threading.local):
    """What this thread is doing."""

    sending = False
    claiming = False
    opening = False
    chunk = False


_here = _Here()


@contextlib.contextmanager
def _doing(name: str) -> Iterator[None]:
    setattr(_here, name, True)
    try:
        yield
    finally:
        setattr(_here, name, False)


def _around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _always(*_: Any, **__: Any) -> bool:
    return True


def _before(trap: Trap, owner: Any, name: str, when: Callable[..., Any] = _always) -> None:
    """Spring the trap before a call.

    :param when: whether it is one that counts, by the call's arguments.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if when(*arguments, **named):
                trap.hit()
            return original(*arguments, **named)

        return call

    _around(owner, name, make)


def _behind(trap: Trap, owner: Any, name: str, when: Callable[..., Any] = _always) -> None:
    """Spring the trap behind a call; see :func:`_before`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            if when(*arguments, **named):
                trap.hit()
            return result

        return call

    _around(owner, name, make)


def _writes(prefix: str) -> Callable[..., bool]:
    """Whether the last argument of a call has state records whose keys begin so."""
    return lambda *arguments, **_: any(key.startswith(prefix) for key in arguments[-1])


# ------------------------------------------------------------------ the points


def _after_receive(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(self: ChangeSource, *arguments: Any, **named: Any) -> Any:
            batch = original(self, *arguments, **named)
            if batch is not None and len(batch):
                trap.hit()
            return batch

        return next_batch

    _around(ChangeSource, "next", make)


def _behind_the_beginning(trap: Trap) -> None:
    """A transaction was begun, and its records are not made yet."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: Publisher, first: Records) -> None:
            original(self, first)
            self.drain()
            trap.hit()

        return begin

    _around(Publisher, "begin", make)


def _in_the_middle_of_records(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def produce(self: Publisher, records: Records) -> None:
            if not (_here.sending and len(records) > 1):
                original(self, records)
            elif trap.next_fires():
                half = len(records) // 2
                original(self, replace(records, table=records.table[:half]))
                self.drain()
                trap.hit()
                original(self, replace(records, table=records.table[half:]))
            else:
                trap.hit()
                original(self, records)

        return produce

    _around(Publisher, "produce", make)


def _before_the_progress_record(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def transact(
            self: PublishSession, batches: Iterable[Records], progress: dict[str, Any], **options: bool
        ) -> None:
            def batches_then_hit() -> Iterator[Records]:
                yield from batches
                self._publisher.drain()
                trap.hit()

            original(self, batches_then_hit(), progress, **options)

        return transact

    _around(PublishSession, "transact", make)


def _before_commit(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def commit(self: Publisher) -> None:
            if _here.sending:
                self.drain()
                trap.hit()
            original(self)

        return commit

    _around(Publisher, "_commit", make)


def _during_commit(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def commit(handle: int, milliseconds: int) -> Any:
            if not _here.sending:
                return original(handle, milliseconds)
            trap.hit()
            mine = trap.sprung
            result = original(handle, milliseconds)
            if mine:
                trap.write("returned")  # the kill comes too late to be in the commit
                time.sleep(60)
            return result

        return commit

    _around(rd, "commit_transaction", make)


def _before_acknowledge(trap: Trap) -> None:
    _before(trap, ChangeSource, "acknowledge", lambda _, position: position.ordinal == 0)


def _inside_a_cut_transaction(trap: Trap) -> None:
    _behind(trap, ChangeSource, "acknowledge", lambda _, position: position.ordinal != 0)


def _in_the_claim(trap: Trap) -> None:
    def claiming(original: Callable[..., Any]) -> Callable[..., Any]:
        def send(self: Claim, values: dict[str, Any]) -> None:
            with _doing("claiming"):
                original(self, values)

        return send

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: TransactionalProducer, messages: Any) -> Any:
            failed = original(self, messages)
            if _here.claiming:
                assert self._producer is not None
                self._producer.flush()
                trap.hit()
            return failed

        return begin

    _around(Claim, "_send", claiming)
    _around(TransactionalProducer, "_begin", make)


def _before_the_first_initialisation(trap: Trap) -> None:
    """The claim stands and was read; the job's own id was not initialised yet."""
    _before(trap, rd, "init_transactions", lambda *_: _here.opening)


def _between_ranges(trap: Trap) -> None:
    _behind(trap, PublishSession, "transact", _writes("progress/"))


def _before_complete(trap: Trap) -> None:
    _before(trap, Claim, "write", lambda _, values: COMPLETE in values)


def _before_a_chunk(trap: Trap) -> None:
    _before(trap, LiveSnapshot, "_publish")


def _in_a_chunk(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def records(self: LiveSnapshot, *arguments: Any) -> Iterator[Records]:
            for each in original(self, *arguments):
                yield each
                self._session._publisher.drain()
                trap.hit()

        return records

    _around(LiveSnapshot, "_records", make)


def _behind_a_chunk(trap: Trap) -> None:
    _behind(trap, PublishSession, "transact", _writes("live/"))


def _during_the_commit_of_a_chunk(trap: Trap) -> None:
    """The broker commits; its answer does not arrive any more."""

    def transacting(original: Callable[..., Any]) -> Callable[..., Any]:
        def transact(
            self: PublishSession, batches: Iterable[Records], progress: dict[str, Any], **options: bool
        ) -> None:
            # whether it is one of a chunk is only known behind its records
            def batches_then_note() -> Iterator[Records]:
                yield from batches
                _here.chunk = any(key.startswith("live/") for key in progress)

            original(self, batches_then_note(), progress, **options)

        return transact

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def commit(handle: int, milliseconds: int) -> Any:
            if not _here.chunk:
                return original(handle, milliseconds)
            _here.chunk = False
            trap.hit()
            return original(handle, milliseconds)

        return commit

    _around(PublishSession, "transact", transacting)
    _around(rd, "commit_transaction", make)


def _before_swept_keys_are_handed_over(trap: Trap) -> None:
    """The sweep has read the topic and the table."""
    _before(trap, LiveReader, "_hand_over", lambda _, chunk: chunk.stale)


def _in_swept_keys(trap: Trap) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def records(self: LiveSnapshot, chunk: LiveChunk, *arguments: Any) -> Iterator[Records]:
            for each in original(self, chunk, *arguments):
                yield each
                if chunk.stale:
                    self._session._publisher.drain()
                    trap.hit()

        return records

    _around(LiveSnapshot, "_records", make)


def _behind_swept_keys(trap: Trap) -> None:
    _behind(trap, LiveSnapshot, "_publish", lambda _, chunk, *__: chunk.stale)


def _behind_the_publication(trap: Trap) -> None:
    """A table was added to the publication, and nothing of it is recorded."""
    _behind(trap, publication, "extend")


def _behind_the_topic(trap: Trap) -> None:
    """A table's topic and its owner are there, and nothing else is recorded."""
    for module in (create, writer):
        _behind(trap, module, "pin")


def _before_the_steps_are_recorded(trap: Trap) -> None:
    """What the steps need is made, and the stream is about to record them."""
    _before(trap, writer, "records")


def _before_a_pause_is_recorded(trap: Trap) -> None:
    """A job has heard that a table is to be paused, or to go on."""
    for name in ("hold", "release"):
        _before(trap, writer, name)


def _behind_the_record_of_a_pause(trap: Trap) -> None:
    _behind(trap, PublishSession, "transact", _writes("gap/"))


def _before_the_end_of_a_pause_is_told(trap: Trap) -> None:
    _before(trap, OpenRequests, "remove")


def _before_the_end_is_reported(trap: Trap) -> None:
    _before(trap, Reports, "tell", lambda _, __, state, *___, **____: state == "finished")


def _before_the_request_is_removed(trap: Trap) -> None:
    _before(trap, SnapshotRequests, "remove")


STREAM_POINTS: dict[str, Callable[[Trap], None]] = {
    "received": _after_receive,
    "begun": _behind_the_beginning,
    "mid-batch": _in_the_middle_of_records,
    "before-position": _before_the_progress_record,
    "before-commit": _before_commit,
    "in-commit": _during_commit,
    "before-acknowledge": _before_acknowledge,
    "in-cut-transaction": _inside_a_cut_transaction,
    "in-claim": _in_the_claim,
    "before-init": _before_the_first_initialisation,
}
LIVE_POINTS: dict[str, Callable[[Trap], None]] = {
    "before-chunk": _before_a_chunk,
    "in-chunk": _in_a_chunk,
    "in-commit-of-chunk": _during_the_commit_of_a_chunk,
    "behind-chunk": _behind_a_chunk,
    "before-swept": _before_swept_keys_are_handed_over,
    "in-swept": _in_swept_keys,
    "behind-swept": _behind_swept_keys,
    "before-report": _before_the_end_is_reported,
    "before-removal": _before_the_request_is_removed,
}
#: of a table that is followed from now on
FOLLOWING_POINTS: dict[str, Callable[[Trap], None]] = {
    "before-steps": _before_the_steps_are_recorded,
    "behind-publication": _behind_the_publication,
    "behind-topic": _behind_the_topic,
}
#: of a table that is paused, or goes on
PAUSE_POINTS: dict[str, Callable[[Trap], None]] = {
    "behind-pause": _behind_the_record_of_a_pause,
    "before-pause": _before_a_pause_is_recorded,
    "before-answer": _before_the_end_of_a_pause_is_told,
}
SNAPSHOT_POINTS: dict[str, Callable[[Trap], None]] = {
    "in-range": _in_the_middle_of_records,
    "before-progress": _before_the_progress_record,
    "before-commit": _before_commit,
    "in-commit": _during_commit,
    "between-ranges": _between_ranges,
    "in-claim": _in_the_claim,
    "before-init": _before_the_first_initialisation,
    # last: it is reached when all ranges are done
    "before-complete": _before_complete,
}


def _note_what_is_done() -> None:
    def sending(original: Callable[..., Any]) -> Callable[..., Any]:
        def transact(self: PublishSession, *arguments: Any, **options: bool) -> None:
            with _doing("sending"):
                original(self, *arguments, **options)

        return transact

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_session(self: PublishSession, **named: Any) -> Any:
            with _doing("opening"):
                return original(self, **named)

        return open_session

    _around(PublishSession, "transact", sending)
    _around(PublishSession, "open", opening)


# ------------------------------------------------------------------ the processes


def work(job: dict[str, Any]) -> int:
    """Run a job, in the fork; 0, or 1 and the error in the output."""
    pipeline = Settings.read(Path(job["pipeline"]))
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    if job["point"]:
        of_stream = STREAM_POINTS | LIVE_POINTS | FOLLOWING_POINTS | PAUSE_POINTS
        points = SNAPSHOT_POINTS if job["kind"] == "snapshot" else of_stream
        points[job["point"]](Trap(job["point"], job["nth"], job["act"], job["delay"], job["log"]))
        _note_what_is_done()
    try:
        if job["kind"] == "snapshot":
            driver.run(pipeline, running.in_threads(pipeline), stopped=stopped)
        else:
            running.run_stream(pipeline, bounded=job["bounded"], stopped=stopped)
    except BaseException as error:
        traceback.print_exc()
        print(f"ended: {type(error).__name__}: {error}")
        return 1
    print("ended: in order")
    return 0


def _fork(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = work(job)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Fork jobs and report them until standard input ends."""
    warm.warm_up()
    running: dict[int, int] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                job = json.loads(line)
                pid = _fork(job)
                running[pid] = job["id"]
                _tell(id=job["id"], pid=pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            _tell(id=running.pop(pid), code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
