"""The schema registry that all processes of a run of pytest have together.

Where pytest-xdist runs the tests, its controller starts it when the first process asks for it, and stops it when the
run has ended; a process that tests alone has one of its own. Other servers are not shared. PostgreSQL waits for all
transactions of all databases before it creates a slot, also for those that a test holds open; and one broker for all
takes as much processor time as one for each, since that goes into connections and requests.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import cast
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

from airflow_bottledwater.local.registry import SchemaRegistry


class SharedRegistry:
    """The registry of a run, in its controller.

    :ivar url: where other processes ask for it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bottledwater-tests-")
        self._registry = SchemaRegistry(Path(self._folder.name))
        self._asked = SimpleXMLRPCServer(("127.0.0.1", 0), logRequests=False)
        # one process after the other; it starts once only
        self._asked.register_function(lambda: str(self._registry.start().folder), "start")
        self.url = "http://{}:{}".format(*self._asked.server_address)
        threading.Thread(target=self._asked.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop it."""
        self._asked.shutdown()
        self._registry.stop()
        self._folder.cleanup()


def started(url: str) -> SchemaRegistry:
    """The registry of the run, which runs then.

    :param url: of :class:`SharedRegistry`.
    """
    # an object for the same folder has the same ports
    return SchemaRegistry(cast(str, ServerProxy(url).start()))
