"""Work under a snapshot while its holder is watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from airflow_bottledwater import backoff
from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, Refused, StopRequested
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres.watch import HolderWatch


class Holder:
    """A holder whose answers the test gives."""

    def __init__(self, alive: Callable[[], None] = lambda: None, waiting: Callable[[], list[str]] = list) -> None:
        self.alive, self.waiting_behind = alive, waiting


def watching(holder: Holder, stopped: threading.Event | None = None) -> HolderWatch:
    found: Any = holder
    made = HolderWatch(found, 60.0, stopped or threading.Event(), what="The snapshot", again="Run it again,")
    made._looked = 0.0
    return made


def test_a_stop_is_a_stop_although_the_work_heard_it_first_and_ended_the_session() -> None:
    stopped = threading.Event()

    def alive() -> None:
        stopped.set()
        raise Outage("The session that holds the snapshot was lost.")

    with pytest.raises(StopRequested, match="The snapshot was asked to stop"):
        watching(Holder(alive), stopped).work(lambda: time.sleep(0.5))


def test_what_is_not_waited_for_any_more_has_a_moment_to_end() -> None:
    """It still uses what the caller is going to close."""
    ended: list[float] = []

    def work() -> None:
        time.sleep(1.0)
        ended.append(time.monotonic())

    def alive() -> None:
        raise Outage("The session that holds the snapshot was lost.")

    with pytest.raises(Outage):
        watching(Holder(alive)).work(work)
    assert ended


def test_a_new_password_may_take_a_moment_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "ROTATION", 1.0)
    answers: list[Any] = []

    def waiting() -> list[str]:
        answers.append(None)
        raise CredentialsRefused("PostgreSQL refuses the connection.")

    looking = watching(Holder(waiting=waiting))
    looking.look()
    looking._looked = 0.0
    looking.look()
    time.sleep(1.1)
    looking._looked = 0.0
    with pytest.raises(Outage, match="had worked with these credentials") as ended:
        looking.look()
    assert transient(ended.value) and len(answers) == 3


@pytest.mark.parametrize("error", [Outage("PostgreSQL has no room."), Refused("The role may not connect.")], ids=str)
def test_who_waits_need_not_be_seen_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BottledWaterError
) -> None:
    """The snapshot cannot be taken again where a table has no key."""
    monkeypatch.setattr(backoff, "ROTATION", 0.2)
    now = [100.0]
    monkeypatch.setattr(backoff.time, "monotonic", lambda: now[0])
    answers: list[list[str] | None] = [None, None, []]

    def waiting() -> list[str]:
        answer = answers.pop(0) if answers else None
        if answer is None:
            raise error
        return answer

    looking = watching(Holder(waiting=waiting))
    looking.limit = 0.5
    for _ in range(4):
        looking._looked = 0.0
        looking.look()
        now[0] += 0.3
    assert caplog.text.count("nobody can see who waits") == 1
    now[0] += 0.3
    looking._looked = 0.0
    with pytest.raises(type(error)):
        looking.look()
