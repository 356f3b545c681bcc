"""How outages are waited out."""

from __future__ import annotations

import threading

import pytest

from airflow_bottledwater import backoff as module
from airflow_bottledwater import errors
from airflow_bottledwater.backoff import Backoff


def test_waiting_ends_when_the_job_is_asked_to() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(errors.StopRequested):
        Backoff(None, stopped).wait("a broker")


def test_waiting_ends_at_its_limit_and_says_for_what_it_waited() -> None:
    told: list[str] = []
    backoff = Backoff(0.0, report=told.append)
    backoff.wait("the broker is away")
    with pytest.raises(errors.Outage, match="the broker is away"):
        backoff.wait("the broker is away")
    assert told == ["the broker is away"]


def test_a_server_that_answered_begins_a_new_outage() -> None:
    backoff = Backoff(0.0, report=lambda what: None)
    backoff.wait("x")
    backoff.over()
    backoff.wait("x")


def test_an_outage_lasts_until_something_works_however_long_one_attempt_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    stopped = threading.Event()
    monkeypatch.setattr(stopped, "wait", lambda pause: False)
    backoff = Backoff(300.0, stopped, report=lambda what: None)
    with pytest.raises(errors.Outage, match=r"a broker, for 3\d\d s \(since \d\d:\d\d:\d\d UTC\)"):
        for _ in range(20):
            backoff.wait("a broker")
            now += 45.0
    backoff.over()
    backoff.wait("a broker")
    now += 290.0
    backoff.wait("a broker")


def test_refused_credentials_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    backoff = Backoff(None, report=lambda what: None)
    backoff.wait(errors.CredentialsRefused("no"))
    now += 21.0
    with pytest.raises(errors.CredentialsRefused):
        backoff.wait(errors.CredentialsRefused("no"))


def test_an_outage_is_said_at_its_beginning_every_minute_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module.time, "time", lambda: now)
    stopped = threading.Event()
    monkeypatch.setattr(stopped, "wait", lambda pause: False)
    backoff = Backoff(300.0, stopped)
    for _ in range(70):
        now += 1.0
        backoff.wait("Kafka does not answer.")
    backoff.over()
    backoff.over()
    assert caplog.messages == [
        "Waiting since 00:00:01 UTC until 00:05:01 UTC at most (outage_timeout): Kafka does not answer.",
        "Waiting since 00:00:01 UTC until 00:05:01 UTC at most (outage_timeout): Kafka does not answer.",
        "The outage is over, after 69 s.",
    ]
