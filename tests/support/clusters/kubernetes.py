"""A Kubernetes API server without a cluster: it records what a client creates, and pods are in the phase that a test
says.

Only the client's side is seen: nothing is scheduled, no image is pulled, no container ever runs. spark-submit's
requests were recorded with pyspark 4.2; what it does not ask for is answered with 404.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from airflow_bottledwater.local import ports

Json = dict[str, Any]
_PATH = re.compile(r"/(?:api|apis/[\w.]+)/v\d\w*/namespaces/(?P<namespace>[^/]+)/(?P<kind>\w+)(?:/(?P<name>[^/]+))?$")
#: how often a watch looks whether the server has ended
_TICK = 0.5


@dataclass
class Objects:
    """What is there, and what has happened to it. All access is under the condition, which is notified of each
    event."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    present: dict[tuple[str, str, str], Json] = field(default_factory=dict)
    created: list[Json] = field(default_factory=list)
    events: list[tuple[str, Json]] = field(default_factory=list)
    closed: bool = False

    def create(self, namespace: str, kind: str, content: Json) -> Json:
        """Add an object, with what the server adds to it."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        own = {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now}
        made = {**content, "metadata": {**content["metadata"], **own}}
        if kind == "pods":
            made["status"] = {"phase": "Pending", "containerStatuses": []}
        with self.changed:
            self.created.append(json.loads(json.dumps(made)))
            self.present[namespace, kind, made["metadata"]["name"]] = made
            return self.happened("ADDED", made)

    def happened(self, event: str, thing: Json) -> Json:
        """Note a change of an object, and return a copy of it."""
        thing["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        copy: Json = json.loads(json.dumps(thing))
        self.events.append((event, copy))
        self.changed.notify_all()
        return copy

    def watch(self, name: str | None, since: int) -> Iterator[Json]:
        """The events of the pods (or of one) from a resource version on, for ever."""
        while True:
            with self.changed:
                while since >= len(self.events) and not self.closed:
                    self.changed.wait(_TICK)
                if self.closed:
                    return
                event, thing = self.events[since]
            since += 1
            if thing["kind"] == "Pod" and name in (None, thing["metadata"]["name"]):
                yield {"type": event, "object": thing}


class FakeKubernetes:
    """The API server, on a port of this machine.

    :ivar requests: all requests, as `POST /api/v1/namespaces/jobs/pods`, in order.
    :ivar refused: which requests fail, and with which status: a regular expression for them → the status.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.refused: dict[str, int] = {}
        self._objects = Objects()
        handler = type("Handler", (_Handler,), {"server_of": self, "objects": self._objects})
        self._server = ThreadingHTTPServer((ports.HOST, 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def url(self) -> str:
        """Where it listens, without TLS."""
        return f"http://{ports.HOST}:{self._server.server_port}"

    @property
    def master(self) -> str:
        """The URL for `--master`."""
        return f"k8s://{self.url}"

    @property
    def created(self) -> list[Json]:
        """Every object as it was created, in order, also those that are gone."""
        with self._objects.changed:
            return list(self._objects.created)

    def of_kind(self, kind: str) -> list[Json]:
        """The objects of a kind (`Pod`, `ConfigMap`, …) as they were created."""
        return [thing for thing in self.created if thing["kind"] == kind]

    def pod(self, name: str) -> Json | None:
        """The pod as it is now; None if there is none."""
        with self._objects.changed:
            return next((pod for key, pod in self._objects.present.items() if key[1:] == ("pods", name)), None)

    def set_phase(self, name: str, phase: str, *, exit_code: int | None = None, reason: str = "") -> None:
        """Put a pod into a phase: Pending, Running, Succeeded, Failed or Unknown.

        :param exit_code: of its only container; by default 0 if it succeeded and 1 if it failed.
        :param reason: why it failed, as OOMKilled.
        """
        states: dict[str, Json] = {
            "Pending": {"waiting": {"reason": reason or "ContainerCreating"}},
            "Running": {"running": {}},
        }
        if phase in ("Succeeded", "Failed"):
            code = exit_code if exit_code is not None else int(phase == "Failed")
            state: Json = {"terminated": {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}}
        else:
            state = states.get(phase, {})
        with self._objects.changed:
            pod = self.pod(name)
            assert pod is not None, f"there is no pod {name}"
            container = pod["spec"]["containers"][0]
            status = {
                "name": container["name"],
                "image": container["image"],
                "state": state,
                "ready": phase == "Running",
            }
            pod["status"] = {"phase": phase, "containerStatuses": [{**status, "restartCount": 0, "imageID": ""}]}
            self._objects.happened("MODIFIED", pod)

    def delete_pod(self, name: str) -> None:
        """Remove a pod, as a drained node or an administrator does."""
        with self._objects.changed:
            for key in [key for key in self._objects.present if key[1:] == ("pods", name)]:
                self._objects.happened("DELETED", self._objects.present.pop(key))

    def start(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End, with all watches."""
        with self._objects.changed:
            self._objects.closed = True
            self._objects.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server_of: FakeKubernetes
    objects: Objects

    def do_POST(self) -> None:
        if (asked := self._asked()) is not None:
            namespace, kind, _ = asked
            self._answer(201, self.objects.create(namespace, kind, self._content()))

    def do_PATCH(self) -> None:
        """Server-side apply: what is not there is created."""
        if (asked := self._asked()) is not None:
            content = self._content()
            with self.objects.changed:
                known = self.objects.present.get(asked)
                if known is not None:
                    known.update({name: value for name, value in content.items() if name != "metadata"})
                    self._answer(200, self.objects.happened("MODIFIED", known))
                    return
            self._answer(201, self.objects.create(asked[0], asked[1], content))

    def do_GET(self) -> None:
        if (asked := self._asked()) is None:
            return
        namespace, kind, name = asked
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        if query.get("watch") == "true":
            self._watch(query)
        elif name:
            with self.objects.changed:
                found = self.objects.present.get(asked)
                self._answer(200, found) if found else self._missing()
        else:
            with self.objects.changed:
                things = [t for key, t in self.objects.present.items() if key[:2] == (namespace, kind)]
                chosen = [t for t in things if _selected(t, query.get("labelSelector", ""))]
                about = {"resourceVersion": str(len(self.objects.events))}
                self._answer(200, {"kind": "List", "apiVersion": "v1", "metadata": about, "items": chosen})

    def do_DELETE(self) -> None:
        if (asked := self._asked()) is None:
            return
        self._content()
        namespace, kind, name = asked
        with self.objects.changed:
            if not name:  # all that are selected
                selector = parse_qs(urlsplit(self.path).query).get("labelSelector", [""])[0]
                things = {k: t for k, t in self.objects.present.items() if k[:2] == (namespace, kind)}
                for key in [key for key, thing in things.items() if _selected(thing, selector)]:
                    self.objects.happened("DELETED", self.objects.present.pop(key))
                self._answer(200, {"kind": "Status", "status": "Success"})
                return
            found = self.objects.present.pop(asked, None)
            self._answer(200, self.objects.happened("DELETED", found)) if found else self._missing()

    def _asked(self) -> tuple[str, str, str] | None:
        """Namespace, kind and name of the request; None if it was answered already, as it is refused or not
        understood."""
        self.server_of.requests.append(f"{self.command} {self.path}")
        for pattern, status in self.server_of.refused.items():
            if re.search(pattern, f"{self.command} {self.path}"):
                self._content()
                self._failed(status, "refused by the test")
                return None
        match = _PATH.match(urlsplit(self.path).path)
        if match is None:
            self._content()
            self._missing()
            return None
        return match["namespace"], match["kind"], match["name"] or ""

    def _watch(self, query: dict[str, str]) -> None:
        if self.headers.get("Upgrade"):
            # a client that asks for a WebSocket falls back to plain HTTP
            self._failed(503, "no WebSockets here")
            return
        name = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part).get(
            "metadata.name"
        )
        since = int(query.get("resourceVersion") or len(self.objects.events))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in self.objects.watch(name, since):
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the client has seen enough

    def _content(self) -> Json:
        # also read where nobody looks at it: the connection is used again
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content: Json = json.loads(data) if data else {}
        return content

    def _answer(self, status: int, content: Json) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _missing(self) -> None:
        self._failed(404, f"not found: {self.path}")

    def _failed(self, status: int, message: str) -> None:
        self._answer(status, {"kind": "Status", "status": "Failure", "code": status, "message": message})

    def log_message(self, format: str, *args: Any) -> None:
        """Keep it out of the tests' output; `requests` has it."""


def _selected(thing: Json, selector: str) -> bool:
    labels = thing["metadata"].get("labels", {})
    for part in filter(None, selector.split(",")):
        name, sign, value = re.split("(!=|==|=)", part, maxsplit=1)
        if (labels.get(name) == value) == (sign == "!="):
            return False
    return True
