"""Requests to pause tables, and to go on with them, as the stream carries them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import TableRequest
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.stream import pausing
from airflow_bottledwater.stream.pausing import TableControl
from tests.unit.tables.test_plan import A, B, known

PAUSE, RESUME = TableRequest((1,), True, "alice", "a migration", 0.0), TableRequest((1,), False, "bob", "", 1.0)


class _Requests:
    """What was asked for."""

    def __init__(self, *_: object) -> None:
        self.open: dict[str, TableRequest] = {}
        self.complete, self.refuses = True, False

    def poll(self) -> None:
        pass

    def remove(self, request_id: str) -> None:
        if self.refuses:
            raise Outage("Kafka does not take it.")
        del self.open[request_id]


class _Publisher:
    """The state, and what was written to it."""

    def __init__(self, state: PipelineState) -> None:
        self.state, self.position, self.writes = state, Position(16, 0), 0

    def write(self, make: Callable[[PipelineState], Mapping[str, Any]]) -> None:
        self.state.apply(make(self.state))
        self.writes += 1


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> _Requests:
    made = _Requests()
    monkeypatch.setattr(pausing, "OpenRequests", lambda *_: made)
    return made


def _control() -> TableControl:
    return TableControl(Settings.of(postgres="host=h", kafka={"bootstrap.servers": "k"}, format="json"), "pipeline")


def test_requests_are_carried_out_in_their_order_and_removed_behind_that(requests: _Requests) -> None:
    control, publisher = _control(), _Publisher(known(A, B))
    assert not control.carry_out(publisher) and not control.open
    requests.open = {"aa": PAUSE}
    assert control.open and control.carry_out(publisher) and not control.open
    assert publisher.state.held == {1}
    why = publisher.state.gaps[1].why
    assert why == "was paused by alice on 1970-01-01 at 00:00 UTC (a migration)"
    requests.open = {"bb": RESUME, "cc": PAUSE}
    assert control.carry_out(publisher) and publisher.state.held == {1} and publisher.writes == 3
    # what is so already changes nothing
    requests.open = {"dd": PAUSE}
    assert not control.carry_out(publisher) and not control.open


def test_what_was_answered_before_is_not_carried_out_again(requests: _Requests) -> None:
    control, publisher = _control(), _Publisher(known(A, B))
    requests.open, requests.complete = {"aa": PAUSE}, False
    assert not control.carry_out(publisher) and not publisher.writes


def test_nothing_is_done_inside_of_a_transaction(requests: _Requests) -> None:
    control, publisher = _control(), _Publisher(known(A, B))
    requests.open, publisher.position = {"aa": PAUSE}, Position(16, 3)
    assert not control.carry_out(publisher) and not publisher.writes
    publisher.position = Position(32, 0)
    assert control.carry_out(publisher)


def test_a_later_request_is_not_removed_before_an_earlier_one(
    requests: _Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, publisher = _control(), _Publisher(known(A, B))
    requests.open, requests.refuses = {"aa": PAUSE, "bb": RESUME}, True
    assert control.carry_out(publisher) and publisher.state.held == {1} and list(requests.open) == ["aa", "bb"]
    # it waits, and then does both
    requests.refuses = False
    assert not control.carry_out(publisher) and publisher.writes == 1
    monkeypatch.setattr(pausing.time, "monotonic", lambda: 1e9)
    assert control.carry_out(publisher) and not publisher.state.held and not requests.open
