"""Jobs in processes of their own (``faults/worker.py``), watched from the test, and a broker behind a proxy that loses
answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.topics import Flow
from tests.support.waiting import until

WORKER = Path(__file__).parents[1] / "faults" / "worker.py"


class Job:
    """A job that was started.

    :param point: where it kills or stops itself; empty: nowhere.
    """

    def __init__(self, folder: Path, number: int, point: str) -> None:
        self.point, self.pid = point, 0
        self.code: int | None = None
        self._output, self._log = folder / f"{number}.output", folder / f"{number}.log"
        self.started = threading.Event()
        self._ended = threading.Event()

    def ended(self, code: int) -> None:
        """Called when it has."""
        self.code = code
        self._ended.set()

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code; negative: the signal that ended it."""
        assert self._ended.wait(seconds), f"it still runs after {seconds:.0f} s: {self.output}"
        assert self.code is not None
        return self.code

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    @property
    def output(self) -> str:
        """What it has written."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def outcome(self) -> str:
        """How it says that it ended."""
        lines = [line for line in self.output.splitlines() if line.startswith("ended: ")]
        return lines[-1].removeprefix("ended: ") if lines else ""

    @property
    def hits(self) -> list[dict[str, Any]]:
        """The lines of its log."""
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def killed_at_its_point(self, seconds: float = 60.0) -> float:
        """Wait for it, and check by the log that it died there; returns when."""
        code = self.wait(seconds)
        assert [h["point"] for h in self.hits if h["what"] == "hit"] == [self.point], (code, self.point, self.output)
        assert code == -signal.SIGKILL, (code, self.output)
        return float(self.hits[0]["at"])

    def stopped_at_its_point(self, seconds: float = 60.0) -> None:
        """Wait until it has stopped there."""
        until(lambda: not self.running or (self.hits and self._stat() == "T"), f"stop at {self.point}", seconds)
        assert self.running, (self.point, self.output)

    def _stat(self) -> str:
        text = Path(f"/proc/{self.pid}/stat").read_text()
        return text[text.rindex(")") + 2]

    def signal(self, number: int) -> None:
        """Send it a signal if it still runs."""
        if self.running:
            os.kill(self.pid, number)

    def resume(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def stop(self, seconds: float = 60.0) -> None:
        """Ask it to end, and wait."""
        self.signal(signal.SIGTERM)
        assert self.wait(seconds) == 0, self.output


class Jobs:
    """Starts jobs; all of them end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._server = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        flow: Flow,
        kind: str,
        *,
        point: str = "",
        nth: int = 1,
        act: str = "kill",
        delay: float = 0.0,
        bounded: bool = False,
    ) -> Job:
        """Start a snapshot or a stream.

        :param point: of ``faults/worker.py``; it acts at the nth hit.
        """
        number = next(self._numbers)
        job = self._jobs[number] = Job(self._folder, number, point)
        request = {
            "id": number,
            "pipeline": str(flow.pipeline.write(self._folder)),
            "kind": kind,
            "point": point,
            "nth": nth,
            "act": act,
            "delay": delay,
            "bounded": bounded,
            "log": str(self._folder / f"{number}.log"),
            "output": str(self._folder / f"{number}.output"),
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        assert job.started.wait(300)  # the first one may compile
        return job

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            told = json.loads(line)
            job = self._jobs[told["id"]]
            if "pid" in told:
                job.pid = told["pid"]
                job.started.set()
            else:
                job.ended(told["code"])

    def end(self) -> None:
        """Kill what still runs (also what is stopped), and the server."""
        for job in self._jobs.values():
            with contextlib.suppress(ProcessLookupError):
                job.signal(signal.SIGKILL)
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)


class Proxy:
    """A TCP proxy in front of a server that can be cut off, or lose the server's answers.

    :param target: a port of this host; new connections go to the one that it is then.
    :ivar mode: ``pass``, ``hang`` (nothing goes either way) or ``deaf`` (requests arrive, answers are lost).
    :ivar rate: bytes a second that each connection carries to the server; 0 for as many as there are.
    :ivar frozen: connections of which nothing goes either way any more (:meth:`freeze`).
    """

    def __init__(self, target: int) -> None:
        self.mode, self.rate = "pass", 0.0
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        # what waits in the buffers of a slow link would count as sent
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self.frozen: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Silence the connections that are open; new ones are served."""
        self.frozen |= set(self._open)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                self._open += [client, server]
                for source, sink, answers in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._relay, args=(source, sink, answers), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16 if answers or not self.rate else 4096):
                if self.rate and not answers:
                    time.sleep(len(data) / self.rate)
                while self.mode == "hang" or source in self.frozen:
                    time.sleep(0.02)
                if not (answers and self.mode == "deaf"):
                    sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(ValueError):
                self._open.remove(each)  # closed when neither direction uses it any more

    def cut(self) -> None:
        """Close all connections; new ones are taken."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        """End."""
        self._listener.close()
        self.cut()


class Pooler(Proxy):
    """Tells PostgreSQL's clients process ids of its own, as connection poolers do, and the proxy of Neon.

    :ivar ahead: whether it opens sessions before there is a client for them, as poolers do.
    """

    ahead = False
    _kept: tuple[socket.socket, bytes] | None = None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        begin = client.recv(1 << 16)
        server, greeting = self._kept or self._session(begin)
        self._kept = self._session(begin) if self.ahead else None
        self._open += [client, server]
        client.sendall(greeting)
        threading.Thread(target=self._relay, args=(server, client, True), daemon=True).start()
        self._relay(client, server, False)

    def _session(self, begin: bytes) -> tuple[socket.socket, bytes]:
        """A session of PostgreSQL, and what it has said at its start (BackendKeyData with another process id)."""
        server, greeting = socket.create_connection(("127.0.0.1", self.target)), b""
        server.sendall(begin)
        while not greeting.endswith(b"Z\0\0\0\5I") and (more := server.recv(1 << 16)):
            greeting += more
        return server, re.sub(rb"(?s)(?<=K\0\0\0\x0c).{4}", b"\0\0\0\7", greeting)


class ProxiedBroker(KafkaBroker):
    """A broker with a second door behind a proxy; it ends transactions as soon as they time out."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            door = probe.getsockname()[1]
        self.proxy = Proxy(door)
        here = f"BROKER://127.0.0.1:{self.port}"
        self.settings |= {
            "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT",
            "listeners": f"{here},CONTROLLER://127.0.0.1:{self.controller_port},PROXIED://127.0.0.1:{door}",
            "advertised.listeners": f"{here},PROXIED://127.0.0.1:{self.proxy.port}",
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "300",
        }

    @property
    def proxied(self) -> dict[str, str]:
        """Kafka's properties for the door behind the proxy."""
        return {"bootstrap.servers": f"127.0.0.1:{self.proxy.port}"}
