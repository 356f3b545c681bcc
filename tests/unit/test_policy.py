"""What is done about which error."""

from __future__ import annotations

import inspect
import pickle

import pytest

from airflow_bottledwater import errors
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.policy import ERROR_ACTIONS, ErrorAction, act, transient


def made(kind: type[errors.BottledWaterError]) -> errors.BottledWaterError:
    if kind is errors.SettingError:
        return errors.SettingError("lanes", 0, "1 to 256")
    if kind is errors.PreflightError:
        return errors.PreflightError(["this", "that"])
    if kind is errors.Interrupted:
        return errors.Interrupted(15)
    if kind is errors.JobDied:
        return errors.JobDied("what", "remedy", kind="Outage")
    if kind is errors.RecordError:
        return errors.RecordError("what", "remedy", position="p", topic="t")
    return kind("what", "remedy")


CLASSES = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.BottledWaterError)
]
EXPECTED = {
    errors.Outage: ErrorAction.WAIT,
    errors.ConnectionNotFound: ErrorAction.WAIT,
    errors.SourcePressed: ErrorAction.WAIT,
    errors.HolderEnded: ErrorAction.WAIT,
    errors.OtherBuild: ErrorAction.WAIT,
    errors.TypeAltered: ErrorAction.WAIT,
    errors.ApplicationEnded: ErrorAction.WAIT,
    errors.Interrupted: ErrorAction.WAIT,
    errors.SlotInUse: ErrorAction.WAIT,
    errors.RecordError: ErrorAction.RECORD,
    errors.StopRequested: ErrorAction.FINISH,
    errors.StaleBatch: ErrorAction.AGAIN,
    errors.BeginsAnew: ErrorAction.AGAIN,
    errors.SchemasLost: ErrorAction.AGAIN,
    errors.ChosenTopicGone: ErrorAction.AGAIN,
    errors.JobDied: ErrorAction.AGAIN,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_its_row(kind: type[errors.BottledWaterError]) -> None:
    assert any(issubclass(kind, row) for row in ERROR_ACTIONS)
    assert act(made(kind)) is EXPECTED.get(kind, ErrorAction.END)


def test_the_publishers_errors_have_their_rows() -> None:
    assert act(NewProducerNeeded("x")) is ErrorAction.REOPEN
    assert ERROR_ACTIONS[RecordRefused] is ErrorAction.RECORD


def test_an_unknown_error_ends_the_job() -> None:
    assert act(ValueError("x")) is ErrorAction.END
    assert act(KeyboardInterrupt()) is ErrorAction.END


@pytest.mark.parametrize("kind", CLASSES)
def test_only_what_passes_by_waiting_is_submitted_again(kind: type[errors.BottledWaterError]) -> None:
    passing = (
        errors.Outage,
        errors.ConnectionNotFound,
        errors.SourcePressed,
        errors.HolderEnded,
        errors.OtherBuild,
        errors.TypeAltered,
        errors.ApplicationEnded,
        errors.Interrupted,
        errors.SlotInUse,
        errors.StaleBatch,
        errors.BeginsAnew,
        errors.SchemasLost,
        errors.ChosenTopicGone,
        errors.JobDied,
    )
    assert transient(made(kind)) == (kind in passing)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_crosses_processes(kind: type[errors.BottledWaterError]) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)
