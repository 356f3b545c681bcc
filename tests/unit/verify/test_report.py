"""What the command prints of a verification, and with which code it exits."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.cli import verify as verification
from airflow_bottledwater.cli.verify import answer
from airflow_bottledwater.jobs import run_directory, submit, supervise
from airflow_bottledwater.jobs.submitted import LogTail
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.model.relation import HASHED, Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import JSON
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import executors, job
from airflow_bottledwater.spark import verify as spark_verify
from airflow_bottledwater.spark.job import EXIT_TRANSIENT, SettingsFile
from airflow_bottledwater.state.control_records import JobRecord, VerifiedRecord, encode
from airflow_bottledwater.state.verification import Difference, TableResult, Verification
from airflow_bottledwater.verify import driver
from airflow_bottledwater.verify.values import Decoded, Expectation, TopicReader


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


def test_a_sweep_is_not_all_that_is_advised_for_records_in_the_wrong_partition() -> None:
    assert found(counts={"surplus": 1}).advice().endswith("snapshot --tables public.a --sweep")
    assert "delete 'a', and start again with a snapshot." in found(counts={"wrong partition": 1}).advice()


def test_what_was_not_settled_is_told_with_what_may_hinder_it() -> None:
    for unsettled in ({"unsettled": 1}, {"unexamined": 1}):
        assert "a transaction that writes to the table was open" in found(**unsettled).advice()
    assert found(unexamined=1, older=5).advice().endswith(": bottledwater snapshot --tables public.a")
    assert found(verified=False, reason="it is paused").advice().endswith(
        "(public.a: it is paused). If that is meant, set allow_unverified: such tables are then accepted."
    )  # fmt: skip


#: what is done to a table, or found of it
VERDICTS: dict[str, dict[str, Any]] = {
    "equal": {}, "different": {"counts": {"missing": 1}}, "unsettled": {"unsettled": 1},
    "not verified": {"verified": False},
}  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.dictionaries(st.sampled_from("abc"), st.sampled_from(sorted(VERDICTS)), min_size=1)
        ),
        max_size=8,
    )
)
def test_a_weaker_verification_takes_nothing_back(runs: list[tuple[bool, dict[str, str]]]) -> None:
    known, different, unproved, last = VerifiedRecord(), set[str](), set[str](), 0
    for number, (sample, verdicts) in enumerate(runs, 1):
        tables = [TableResult(name, name, 7, **VERDICTS[verdict]) for name, verdict in verdicts.items()]
        whole = len(tables) == 3
        known = Verification(0.5 if sample else 1.0, "0/1", 1.0, tables).known_after(
            known, all_tables=whole, now=number
        )
        for name, verdict in verdicts.items():
            if not sample:
                different.discard(name)
                unproved.discard(name)
                unproved |= {name} if verdict in ("unsettled", "not verified") else set()
            different |= {name} if verdict == "different" else set()
        last = number if whole and not sample else last
    assert (known.different, known.unverified) == (tuple(sorted(different)), tuple(sorted(unproved)))
    assert (known.at, known.rows) == (last, 21 if last else 0)


def test_tables_that_are_gone_are_forgotten_by_a_verification_of_all() -> None:
    before = VerifiedRecord(5, ("public.gone",), ("public.old",), 1.0)
    assert found().known_after(before, all_tables=True, now=2.0) == VerifiedRecord(7, at=2.0)


def test_a_report_of_many_differences_stays_small() -> None:
    many = TableResult("public.a", "a")
    many.add([MISSING] * 50)
    assert (many.counts, len(many.differences)) == ({"different": 50}, 10)
    whole = Verification(1.0, "0/1", 1.0, [many] * 50).as_json()
    assert sum(len(table["differences"]) for table in whole["tables"]) == 100


@pytest.mark.parametrize("has_folder", [True, False])
def test_what_the_job_reports_has_no_values_of_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_folder: bool
) -> None:
    result = found(counts={"different": 1}, differences=[replace(MISSING, in_topic="SECRET", key={"id": "SECRET"})])
    for place, name in ((job, "context"), (executors, "check"), (spark_verify, "warm_workers")):
        monkeypatch.setattr(place, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(driver, "run", lambda *_, **__: result)
    monkeypatch.setenv(supervise.RUN_DIRECTORY, str(tmp_path) if has_folder else "")
    own, tail = io.StringIO(), LogTail()
    for handler in (tail, logging.StreamHandler(own)):
        monkeypatch.setattr(spark_verify.log, "handlers", [*spark_verify.log.handlers, handler])
    pipeline = Settings.of(postgres="host=db")
    counts = spark_verify._work(pipeline, SettingsFile(""), False, threading.Event())
    record = JobRecord("verify", "s", outcome=Outcome(ok=True, counts=counts), log=tail.lines)
    assert "SECRET" not in str(encode(record)) and "'different': 1" in str(encode(record))
    # whoever runs it sees them
    assert ("SECRET" in own.getvalue()) is not has_folder
    if has_folder:
        run_directory.write(tmp_path, Outcome(ok=True, counts=counts))
        monkeypatch.setattr(verification.jobs, "job_folder", lambda: contextlib.nullcontext(tmp_path))
        monkeypatch.setattr(verification.jobs, "stop_by_signal", threading.Event)
        monkeypatch.setattr(verification.jobs, "follow", lambda folder, stopped: None)
        monkeypatch.setattr(submit, "command", lambda *_, **__: ["true"])
        monkeypatch.setattr(supervise, "start", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            verification.run(pipeline, "local[2]", {}, as_json=True)
        assert msgspec.json.decode(capsys.readouterr().out, type=Verification) == result


TEXT = ColumnType(25, -1, 25, -1, "b", "text")


def test_no_value_is_shown_of_a_column_that_is_masked_or_left_out() -> None:
    hashed = Column("id", replace(TEXT, form=HASHED), mask="hash:k")
    columns = (hashed, Column("cut", TEXT, mask="first:2"), Column("plain", TEXT))
    table = SourceTable(1, "public", "t", "d", ("id",), columns)
    row = ("f" * 64, "se", "plain")
    for changed in ({"cut": "secret"}, {"id": "secret", "cut": "se"}):
        record = Decoded({"id": row[0], "plain": "plain", **changed})
        (name, ours, theirs) = Expectation(table, JSON).difference(row, record) or ("", "", "")
        assert name in changed and ours in row and theirs == "another value"
    plain = Expectation(table, JSON).difference(row, Decoded({"id": row[0], "cut": "se", "plain": "other"}))
    assert plain == ("plain", "plain", "other")
    reader = TopicReader(table, JSON, None)
    assert reader.shown_key(b'{"id": "secret", "gone": "secret"}') == {"id": "another value", "gone": "another value"}
    assert reader.shown_key(b"secret") == {"bytes": "another value"}
    assert reader.shown_key(json.dumps({"id": row[0]}).encode()) == {"id": row[0]}


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
