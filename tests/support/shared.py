"""Servers that all processes of a run of pytest have together.

Where pytest-xdist runs the tests, its controller starts a server when the first process asks for one, and stops it when
the run has ended; a process that tests alone has servers of its own. Only the schema registry is shared. PostgreSQL
waits for all transactions of all databases before it creates a slot, also for those that a test holds open; and each
client of a Kafka reads what the jobs of all tests have written into the topic that pipelines share.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

from airflow_bottledwater.local.process import ServerProcess
from airflow_bottledwater.local.registry import SchemaRegistry

_Kind = TypeVar("_Kind", bound=ServerProcess)
#: what can be shared
_SHARED: tuple[type[ServerProcess], ...] = (SchemaRegistry,)


class Servers:
    """The servers of a run, in its controller.

    :ivar url: where other processes ask for one.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bottledwater-tests-")
        self._started: dict[str, ServerProcess] = {}
        self._asked = SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False)
        self._asked.register_function(self._start, "start")
        self.url = "http://{}:{}".format(*self._asked.server_address)
        threading.Thread(target=self._asked.serve_forever, daemon=True).start()

    def _start(self, name: str) -> str:
        """Called by one process after the other."""
        if name not in self._started:
            kind = next(kind for kind in _SHARED if kind.name == name)
            self._started[name] = kind(Path(self._folder.name) / name).start()
        return str(self._started[name].folder)

    def stop(self) -> None:
        """Stop all of them."""
        self._asked.shutdown()
        for server in self._started.values():
            server.stop()
        self._folder.cleanup()


@contextmanager
def running(kind: type[_Kind], url: str | None, folder: Path) -> Iterator[_Kind]:
    """A server of this kind.

    :param url: of :class:`Servers`; None: one of this process's own.
    :param folder: of its own server.
    """
    if url is None:
        with kind(folder) as server:
            yield server
    else:
        # an object for the same folder has the same ports, and finds the process
        yield kind(Path(cast(str, ServerProxy(url).start(kind.name))))
