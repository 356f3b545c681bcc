"""What is refused beside a job that is alive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import SlotError, StateError
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import accept, beside, redrive
from airflow_bottledwater.state.control_records import StatusRecord
from tests.support.status import status_of

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, slot="shop", format="json")
HERE = Cluster("1", 1, "db", 160000)
#: what a person asks for that claims the slot
ASKED: dict[str, Callable[[], Any]] = {
    "redrive": lambda: redrive.redrive(PIPELINE),
    "dismiss": lambda: redrive.dismiss(PIPELINE),
    "accept_new_keys": lambda: accept.accept(PIPELINE, ["a"]),
}


class Claimed(Exception):
    """The slot would be claimed, which ends whatever job there is."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pipeline, from whose slot nobody reads: its last status and claim, and whether a job reports."""
    found = SimpleNamespace(status=None, claim=None, slot=None, reports=False)

    def claim(*_: object) -> None:
        raise Claimed

    for module in (redrive, accept):
        monkeypatch.setattr(module, "session", lambda *_: nullcontext())
        monkeypatch.setattr(module, "identify", lambda _: HERE)
        monkeypatch.setattr(module, "Claim", claim)
    monkeypatch.setattr(redrive.slot, "state", lambda *_: SimpleNamespace(active_pid=None))
    monkeypatch.setattr(beside, "read_own", lambda *_: found)
    monkeypatch.setattr(beside, "read_status", lambda *_: found.status)
    monkeypatch.setattr(beside, "ControlTopic", SimpleNamespace(of=lambda _: nullcontext()))
    reported = lambda *_: (found.status or status_of("starting")) if found.reports else None  # noqa: E731
    monkeypatch.setattr(beside, "next_status", reported)
    return found


def _claim(kind: str, epoch: int) -> Job:
    return Job(epoch, "j2", kind, "h", 6, 0.0)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("status", "claim"),
    [
        (status_of("snapshot", kind="snapshot"), _claim("snapshot", 4)),
        (status_of("streaming"), _claim("stream", 4)),
        (status_of("failed"), _claim("stream", 5)),  # it is started again, and has not reported yet
        (None, _claim("snapshot", 1)),
    ],
    ids=["snapshot", "connects", "starts-again", "starts"],
)
def test_what_would_end_a_job_that_is_alive_is_refused(
    world: SimpleNamespace, asked: str, status: StatusRecord | None, claim: Job
) -> None:
    world.status, world.claim, world.reports = status, claim, True
    with pytest.raises(StateError, match=r"is alive: its job on host h is .* Stop it first \(bottledwater stop"):
        ASKED[asked]()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("status", "claim"),
    [
        (status_of("streaming"), _claim("stream", 4)),  # it was killed
        (status_of("stopped"), _claim("stream", 4)),
        (status_of("failed"), _claim("redrive", 5)),
    ],
    ids=["killed", "stopped", "failed"],
)
def test_where_no_job_is_alive_the_slot_is_claimed(
    world: SimpleNamespace, asked: str, status: StatusRecord, claim: Job
) -> None:
    world.status, world.claim = status, claim
    with pytest.raises(Claimed):
        ASKED[asked]()


def test_the_job_of_a_copys_original_is_not_to_be_stopped(world: SimpleNamespace) -> None:
    world.status, world.claim, world.reports = status_of("streaming"), _claim("stream", 4), True
    world.slot = SimpleNamespace(name="shop", system_identifier="1", timeline=2)
    with pytest.raises(SlotError, match="For a copy, use another slot name"):
        redrive.redrive(PIPELINE)


@pytest.mark.parametrize("asked", ASKED)
def test_a_job_that_ends_while_it_is_listened_for_is_not_alive(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    world.status, world.claim = status_of("streaming"), _claim("stream", 4)
    monkeypatch.setattr(beside, "next_status", lambda *_: replace(world.status, state="stopped", job=world.claim))
    with pytest.raises(Claimed):
        ASKED[asked]()
