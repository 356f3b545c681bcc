"""A job that does not answer: in which order it loses its slot and its processes."""

from __future__ import annotations

import pytest

from airflow_bottledwater.errors import BottledWaterError, Outage, SlotInUse, TakenOver
from airflow_bottledwater.jobs import fence
from airflow_bottledwater.pipeline.settings import Settings

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
