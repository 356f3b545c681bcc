"""A job that does not answer: in which order it loses its slot and its processes."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.errors import BottledWaterError, Outage, SlotInUse, TakenOver
from airflow_bottledwater.jobs import fence
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import StatusRecord, decode
from tests.support.status import status_of

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json")


class World:
    """What is done, in order, and which error each step raises the first time."""

    def __init__(self, **fails: BottledWaterError) -> None:
        self.done: list[str] = []
        self.fails = fails
        #: the last claim on the slot, once the job is fenced
        self.last = "ours"

    def step(self, name: str) -> None:
        self.done.append(name)
        if (error := self.fails.pop(name, None)) is not None:
            raise error

    def release(self, monkeypatch: pytest.MonkeyPatch, *, fenced: bool = True) -> list[str]:
        def fenced_by(pipeline: Settings, claim: str, why: str) -> str:
            self.step(f"fence {claim}")
            return "ours" if fenced else ""

        monkeypatch.setattr(fence, "fence", fenced_by)
        monkeypatch.setattr(fence, "free", lambda _: self.step("free"))
        monkeypatch.setattr(fence, "holds", lambda _, claim: claim == self.last)
        fence.fence_and_release(PIPELINE, "theirs", "end", lambda: self.step("end"))
        return self.done


def test_the_slot_is_free_before_the_processes_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending them may take a minute, in which nobody could use the slot; and they may connect to it once more."""
    assert World().release(monkeypatch) == ["fence theirs", "free", "end", "free"]


def test_a_job_that_has_claimed_the_slot_meanwhile_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.last = "the next one's"
    assert world.release(monkeypatch) == ["fence theirs", "free", "end"]


def test_a_job_whose_slot_is_another_ones_is_ended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World().release(monkeypatch, fenced=False) == ["fence theirs", "end"]


def test_a_job_that_keeps_connecting_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(free=SlotInUse("Its client reconnects."))
    assert world.release(monkeypatch) == ["fence theirs", "free", "end", "free"]


def test_who_cannot_be_fenced_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (Outage("Kafka is away."), TakenOver("Another one was faster.")):
        assert World(**{"fence theirs": error}).release(monkeypatch) == ["fence theirs", "end"]


class Slot:
    """A slot whose last claim is known, and the pipeline's records in the shared topic.

    :ivar dies: an error that ends the next fence behind its claim.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, state: str = "streaming") -> None:
        self.job = self.last = Job(6, "theirs", "stream", "host", 1, 0.0)
        if kind != "stream":
            self.last = Job(7, "later", kind, "host", 2, 0.0)
        self.status: StatusRecord | None = status_of(state, epoch=6)
        self.answered = self.freed = False
        self.dies: BaseException | None = None
        world = self

        class Claim:
            def __init__(self, pipeline: Settings, cluster: Cluster, why: str, backoff: object) -> None:
                self.job = world.last = Job(world.last.epoch + 1, f"by {why}", why, "host", 3, 0.0)
                if world.dies is not None:
                    raise world.dies

            def close(self) -> None:
                pass

        def write(kafka: object, changes: dict[str, Any]) -> None:
            for key, value in changes.items():
                if key.startswith("status/"):
                    self.status = decode(StatusRecord, value)
                else:
                    self.answered = value is None

        monkeypatch.setattr(fence, "_identify", lambda _: Cluster("1", 1, "db", 160000))
        monkeypatch.setattr(fence, "_claim", lambda *_: self.last)
        monkeypatch.setattr(fence, "read_status", lambda *_: self.status)
        monkeypatch.setattr(fence, "Claim", Claim)
        monkeypatch.setattr(control_topic, "write", write)
        monkeypatch.setattr(fence, "free", lambda _: setattr(self, "freed", True))


@pytest.mark.parametrize("why", ["stop", "end", "replace"])
@pytest.mark.parametrize(
    "last", ["stop", "end", "replace", "stream", "create", "drop", "redrive", "snapshot", "accept"]
)
def test_a_claim_that_only_fences_keeps_nobody_from_fencing(
    monkeypatch: pytest.MonkeyPatch, last: str, why: fence.Why
) -> None:
    """Who has made it may have died before it was carried out. A stop of the pipeline stays one, since no job is
    started behind it; and what works on the slot is left alone."""
    slot = Slot(monkeypatch, last)
    if last == "stream":
        slot.last = Job(7, "of a later job", "stream", "host", 2, 0.0)
    strength = ["stop", "end", "replace"]
    goes_on = last in strength and strength.index(why) <= strength.index(last)
    assert fence.fence(PIPELINE, "theirs", why) == (f"by {why}" if goes_on else "")
    assert slot.status is not None and slot.status.ended == goes_on
    assert slot.answered == (goes_on and why != "replace")


@pytest.mark.parametrize("error", [Outage("Kafka does not answer in time."), KeyboardInterrupt()])
def test_a_fence_that_ends_behind_its_claim_is_finished_by_the_next(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    slot = Slot(monkeypatch, "stream")
    slot.dies = error
    with pytest.raises(type(error)):
        fence.fence(PIPELINE, "theirs", "stop")
    # nothing works on it any more
    assert slot.freed == isinstance(error, Outage)
    assert slot.status is not None and slot.status.state == "streaming" and not slot.answered
    slot.dies, slot.freed = None, False
    fence.fence_and_release(PIPELINE, "theirs", "stop", lambda: None)
    assert slot.status.state == "stopped" and slot.status.stopped_by == "request" and slot.answered and slot.freed


def test_a_slot_of_which_no_claim_was_made_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(monkeypatch, "stream")

    def away(*_: object) -> None:
        raise Outage("Kafka does not answer.")

    monkeypatch.setattr(fence, "Claim", away)
    with pytest.raises(Outage):
        fence.fence(PIPELINE, "theirs", "stop")
    assert not slot.freed
