"""What is done about which error."""

from __future__ import annotations

import inspect
import pickle
import threading

import pytest

from airflow_bottledwater import errors
from airflow_bottledwater.flow import policy
from airflow_bottledwater.flow.policy import ACTS, Act, Patience, act, transient
from airflow_bottledwater.kafka.publisher import NewProducerNeeded, RecordRefused


def made(kind: type[errors.BottledWaterError]) -> errors.BottledWaterError:
    if kind is errors.SettingError:
        return errors.SettingError("lanes", 0, "1 to 256")
    if kind is errors.PreflightError:
        return errors.PreflightError(["this", "that"])
    if kind is errors.Interrupted:
        return errors.Interrupted(15)
    if kind is errors.RecordError:
        return errors.RecordError("what", "remedy", position="p", topic="t")
    return kind("what", "remedy")


CLASSES = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.BottledWaterError)
]
EXPECTED = {
    errors.Outage: Act.WAIT,
    errors.Interrupted: Act.WAIT,
    errors.SlotInUse: Act.WAIT,
    errors.RecordError: Act.RECORD,
    errors.StopRequested: Act.FINISH,
    errors.StaleBatch: Act.AGAIN,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_its_row(kind: type[errors.BottledWaterError]) -> None:
    assert any(issubclass(kind, row) for row in ACTS)
    assert act(made(kind)) is EXPECTED.get(kind, Act.END)


def test_the_publishers_errors_have_their_rows() -> None:
    assert act(NewProducerNeeded("x")) is Act.REOPEN
    assert ACTS[RecordRefused] is Act.RECORD


def test_an_unknown_error_ends_the_job() -> None:
    assert act(ValueError("x")) is Act.END
    assert act(KeyboardInterrupt()) is Act.END


@pytest.mark.parametrize("kind", CLASSES)
def test_only_what_passes_by_waiting_is_submitted_again(kind: type[errors.BottledWaterError]) -> None:
    assert transient(made(kind)) == (kind in (errors.Outage, errors.Interrupted, errors.SlotInUse, errors.StaleBatch))


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_crosses_processes(kind: type[errors.BottledWaterError]) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_patience_ends_when_the_job_is_asked_to() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(errors.StopRequested):
        Patience(None, stopped).wait("a broker")


def test_patience_ends_at_its_limit_and_says_for_what_it_waited() -> None:
    told: list[str] = []
    patience = Patience(0.0, report=told.append)
    patience.wait("the broker is away")
    with pytest.raises(errors.Outage, match="the broker is away"):
        patience.wait("the broker is away")
    assert told == ["the broker is away"]


def test_a_server_that_answered_begins_a_new_outage() -> None:
    patience = Patience(0.0, report=lambda what: None)
    patience.wait("x")
    patience.over()
    patience.wait("x")


def test_an_outage_lasts_until_something_works_however_long_one_attempt_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(policy.time, "monotonic", lambda: now)
    patience = Patience(300.0, report=lambda what: None)
    with pytest.raises(errors.Outage, match=r"a broker \(for 3\d\d s\)"):
        for _ in range(20):
            patience.wait("a broker")
            now += 45.0
    patience.over()
    patience.wait("a broker")
    now += 290.0
    patience.wait("a broker")


def test_refused_credentials_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(policy.time, "monotonic", lambda: now)
    patience = Patience(None, report=lambda what: None)
    patience.wait(errors.CredentialsRefused("no"))
    now += 21.0
    with pytest.raises(errors.CredentialsRefused):
        patience.wait(errors.CredentialsRefused("no"))
