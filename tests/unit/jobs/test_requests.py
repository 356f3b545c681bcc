"""Which requests a job obeys."""

from __future__ import annotations

import math
from typing import Any

import pytest

from airflow_bottledwater.jobs.requests import REQUEST_HOLDS, holds
from airflow_bottledwater.jobs.snapshots import SnapshotRequests
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import (
    SnapshotReport,
    SnapshotRequest,
    StatusRecord,
    StopRequest,
    decode,
    encode,
)
from airflow_bottledwater.state.control_topic import ControlTopic
from tests.support.status import status_of

NOW = 1_000_000.0


def status(epoch: int, state: str = "streaming", *, permanent: bool = False, kind: str = "stream") -> StatusRecord:
    return status_of(state, epoch=epoch, permanent=permanent, kind=kind)


def request(epoch: int, *, age: float = 10.0) -> StopRequest:
    return StopRequest("request", epoch, at=NOW - age)


@pytest.mark.parametrize(
    ("asked", "last", "obeyed"),
    [
        pytest.param(request(7), None, True, id="to this job, before it reported"),
        pytest.param(request(7, age=10 * REQUEST_HOLDS), status(7), True, id="to this job, long ago"),
        pytest.param(request(6), status(6), True, id="to a job that died since"),
        pytest.param(request(6), status(6, "failed"), True, id="to a job that failed of an outage"),
        pytest.param(request(6), status(6, "stopped"), False, id="to a job that stopped"),
        pytest.param(request(6), status(6, "finished"), False, id="to a job that finished"),
        pytest.param(request(6), status(6, "failed", permanent=True), False, id="to a job that failed for good"),
        pytest.param(request(6, age=2 * REQUEST_HOLDS), status(6), False, id="long before a deliberate start"),
        pytest.param(request(6), status(6, "finished", kind="snapshot"), True, id="to a snapshot that finished"),
        pytest.param(request(6), status(6, "stopped", kind="snapshot"), False, id="to a snapshot that stopped"),
        pytest.param(
            request(5), status(6, "failed"), True, id="to a job before one that heard it and failed of an outage"
        ),
        pytest.param(request(5), status(6, "finished"), False, id="to a job before one that finished"),
        pytest.param(request(8), status(6), False, id="to a later job"),
        pytest.param(request(6), None, False, id="to a job that left no status"),
        pytest.param(StopRequest("task", 6), status(6), False, id="without a time"),
        pytest.param(StopRequest("request", 6, at=math.nan), status(6), False, id="at no time"),
    ],
)
def test_what_was_asked_before_a_job_listened(asked: StopRequest, last: StatusRecord | None, obeyed: bool) -> None:
    assert holds(asked, last, 7, NOW) is obeyed


class Topic:
    """The shared topic, with what is heard of it and what is written to it."""

    at = 0

    def __init__(self, *heard: tuple[str, Any]) -> None:
        self.heard, self.written = list(heard), dict[str, Any]()

    def subscribe(self, _: Any) -> Topic:
        return self

    def poll(self) -> list[tuple[str, Any]]:
        return self.heard

    def read_to_end(self) -> None:
        pass

    def known(self) -> dict[str, Any]:
        return {}

    def write(self, records: dict[str, Any], wait: float) -> None:
        self.written |= records


@pytest.mark.parametrize("more", [{"columns": ["a"]}, {"where": 7}], ids=str)
def test_a_request_of_which_not_all_is_known_is_answered_and_not_carried_out(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    asked = encode(SnapshotRequest(("a",)))
    prefix = "snapshot/1/d/shop/"
    topic = Topic(
        (f"{prefix}a", asked), (f"{prefix}b", asked | more), (f"{prefix}c", asked | more), (f"{prefix}c", None)
    )
    monkeypatch.setattr(ControlTopic, "of", lambda _: topic)
    requests = SnapshotRequests(Settings(postgres="host=db", slot="shop"), "1/d/shop")
    requests.read()
    assert list(requests.open) == ["a"] and topic.written.keys() == {"reading/1/d/shop/b", f"{prefix}b"}
    report = decode(SnapshotReport, topic.written["reading/1/d/shop/b"])
    assert report is not None and report.state == "failed" and "another version" in report.error
    assert topic.written[f"{prefix}b"] is None
