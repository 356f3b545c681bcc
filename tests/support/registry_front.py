"""A front before a real schema registry: under one URL it leads to one registry or another, and gives answers that
those cannot give."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from airflow_bottledwater.local.registry import SchemaRegistry

#: method and path (without its query) → HTTP status, error code and message; None to ask the registry
Answer = Callable[[str, str], tuple[int, int, str] | None]

#: what is added to an id for what is registered again
_ANOTHER = 1_000_000
READ_ONLY = (422, 42205, "Subject is in read-only mode")


def _error(status: int, code: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"error_code": code, "message": message}).encode()


def read_only(method: str, path: str) -> tuple[int, int, str] | None:
    """What Confluent's registry answers in the mode READONLY (KafkaSchemaRegistry.checkRegisterMode)."""
    return READ_ONLY if method == "POST" and path.endswith("/versions") and "/compatibility/" not in path else None


class RegistryFront:
    """Looks like a :class:`SchemaRegistry` to those who need its URL.

    :ivar registry: whom it asks.
    :ivar answer: what it answers itself.
    :ivar asked: methods and paths of all requests.
    :ivar lost: ids that it does not know any more, as if the subjects had been deleted for good. What is registered
        again gets another id, or in the mode IMPORT, in which only schemas with ids are taken, the same.
    :ivar instead: ids that mean the schema of another id.
    :ivar importing: whether it is in the mode IMPORT.
    :ivar mode: another mode that it says that it is in; what it answers then is up to ``answer``.
    """

    def __init__(self, registry: SchemaRegistry) -> None:
        self.registry = registry
        self.answer: Answer = lambda method, path: None
        self.asked: list[tuple[str, str]] = []
        self.lost, self.importing, self.mode = set[int](), False, ""
        self.instead: dict[int, int] = {}
        #: how often each schema was registered again with another id
        self._again = dict[int, int]()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                front._handle(self)

            do_GET = do_POST = do_PUT = do_DELETE = _handle

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append((request.command, path))
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length) if length else None
        if (own := self.answer(request.command, path)) is not None:
            status, data = _error(*own)
        elif (found := re.fullmatch(r"/schemas/ids/(\d+)", path)) is not None:
            status, data = self._by_id(request, int(found[1]))
        elif (mode := "IMPORT" if self.importing else self.mode) and path.startswith("/mode"):
            status, data = 200, json.dumps({"mode": mode}).encode()
        elif request.command == "POST" and path.startswith("/subjects/"):
            status, data = self._registered(request, body or b"{}", asked_only=not path.endswith("/versions"))
        else:
            status, data = self._pass_on(request, request.path, body)
        request.send_response(status)
        request.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _by_id(self, request: BaseHTTPRequestHandler, number: int) -> tuple[int, bytes]:
        if number in self.lost:
            return _error(404, 40403, "Schema not found")
        return self._pass_on(request, f"/schemas/ids/{self.instead.get(number, number) % _ANOTHER}", None)

    def _registered(self, request: BaseHTTPRequestHandler, body: bytes, *, asked_only: bool) -> tuple[int, bytes]:
        given = json.loads(body)
        wanted = given.pop("id", None)
        if not asked_only and (wanted is not None) != self.importing:
            return _error(422, 42205, "Subject is not in import mode")
        status, data = self._pass_on(request, request.path, json.dumps(given).encode())
        if status != 200:
            return status, data
        answer = json.loads(data)
        number = answer["id"]
        known = number + _ANOTHER * self._again.get(number, 0)
        if known in self.lost and not asked_only:
            self._again[number] = wanted // _ANOTHER if self.importing else self._again.get(number, 0) + 1
            known = number + _ANOTHER * self._again[number]
            self.lost.discard(known)
        if known in self.lost:
            return _error(404, 40403, "Schema not found")
        return status, json.dumps({**answer, "id": known}).encode()

    def _pass_on(self, request: BaseHTTPRequestHandler, path: str, body: bytes | None) -> tuple[int, bytes]:
        asked = urllib.request.Request(self.registry.url + path, body, method=request.command)
        asked.add_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def fronted(registry: SchemaRegistry) -> Iterator[RegistryFront]:
    """A front before a registry."""
    front = RegistryFront(registry)
    try:
        yield front
    finally:
        front.close()
