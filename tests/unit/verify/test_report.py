"""What the command prints of a verification, and with which code it exits."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import msgspec
import pytest

from airflow_bottledwater.cli import verify as verification
from airflow_bottledwater.cli.verify import answer
from airflow_bottledwater.jobs import submit, supervise
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark.job import EXIT_TRANSIENT
from airflow_bottledwater.state.verification import Difference, TableResult, Verification


def found(**of_table: object) -> Verification:
    return Verification(1.0, "0/1", 1.0, [TableResult("public.a", "a", 7, **of_table)])  # type: ignore[arg-type]


MISSING = Difference("different", {"id": "[7]"}, "name", "x", "y", 0, 3)


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (found(), 0),
        (found(counts={"different": 1}, differences=[MISSING]), 2),
        (found(unsettled=1), 75),
        (found(verified=False), 3),
        (found(verified=False, dropped=True), 0),
        (replace(found(verified=False), allow_unverified=True), 0),
    ],
)
def test_the_exit_code_tells_the_verdict(result: Verification, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        if code:
            with pytest.raises(SystemExit) as raised:
                answer(result, as_json=as_json)
            assert raised.value.code == code
        else:
            answer(result, as_json=as_json)
        out = capsys.readouterr().out
        if as_json:
            assert msgspec.json.decode(out, type=Verification) == result
            assert json.loads(out)["equal"] is (code == 0)
        elif code == 2:
            assert "different: id = [7]: name is y in the topic and x in the table (partition 0, offset 3)" in out
        else:
            assert result.tables[0].verdict.split()[0] in out


def test_a_report_of_many_differences_stays_small() -> None:
    many = TableResult("public.a", "a")
    many.add([MISSING] * 50)
    assert (many.counts, len(many.differences)) == ({"different": 50}, 10)
    whole = Verification(1.0, "0/1", 1.0, [many] * 50).as_json()
    assert sum(len(table["differences"]) for table in whole["tables"]) == 100


def test_a_verification_that_was_interrupted_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification.jobs, "stop_by_signal", threading.Event)
    monkeypatch.setattr(verification.jobs, "follow", lambda folder, stopped: None)
    monkeypatch.setattr(verification.jobs, "check_outcome", lambda folder, stopped: None)
    monkeypatch.setattr(submit, "command", lambda *_, **__: ["true"])
    monkeypatch.setattr(supervise, "start", lambda *_, **__: None)
    monkeypatch.setattr(supervise, "final_outcome", lambda folder: Outcome(ok=True, stopped=True))
    with pytest.raises(SystemExit) as raised:
        verification.run(Settings.of(postgres="host=db"), "local[2]", {}, as_json=False)
    assert raised.value.code == EXIT_TRANSIENT
