"""What is wrong with a pipeline, by its records."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.jobs import pipelines
from airflow_bottledwater.jobs.pipelines import HealthLimits
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state.control_records import (
    StatusRecord,
    VerifiedRecord,
    encode,
    status_key,
    verified_key,
)
from tests.support.status import status_of

NAME = "1/d/orders"
NOW = 100_000.0


def reported(state: str = "streaming", ago: float = 1.0, **more: Any) -> StatusRecord:
    return status_of(state, **{"slot": "orders", "at": NOW - ago, **more})


def wrong(status: StatusRecord, verified: VerifiedRecord | None = None, *, alive: bool = True, **limits: Any) -> str:
    records = {verified_key(NAME): encode(verified)} if verified is not None else {}
    return " ".join(pipelines.wrong(NAME, status, records, HealthLimits(**limits), alive=alive, now=NOW))


LASTING = [Problem("not-followed", "public.a", "It has no key.", "Add one.", since=NOW - 500)]
NEW = [Problem("not-followed", "public.a", "It has no key.", since=NOW - 5)]


@pytest.mark.parametrize(
    ("status", "alive", "says"),
    [
        (reported(), True, ""),
        (reported(), False, "has not reported for 1 s"),
        (reported("waiting", error="Kafka is away"), True, "Kafka is away"),
        (reported(problems=LASTING), True, "public.a: It has no key. Add one."),
        (reported(problems=NEW), True, ""),
        (reported("starting"), True, "is starting since"),
        (reported("failed", permanent=True, error="schema refused"), True, "failed for good 1 s ago: schema refused"),
        (
            reported("stopped", error="The slot is lost."),
            True,
            "No job could begin 1 s ago: The slot is lost.",
        ),
        # it is submitted again
        (reported("failed", 599, error="away"), True, ""),
        (reported("failed", 601, error="away"), True, "none has followed: away"),
        # by the clock of a host that is ahead, nothing ever is long ago
        (reported("failed", -599, error="away"), True, ""),
        (reported("failed", -10_800, error="away"), True, "is 10800 s ahead of this host's"),
        # a snapshot, which a stream follows
        (reported("finished", 599, kind="snapshot"), True, ""),
        (reported("finished", 601, kind="snapshot"), True, "The snapshot job has finished"),
        # a bounded run, which another one follows
        (reported("finished", 3599), True, ""),
        (reported("finished", problems=NEW), True, "public.a: It has no key."),
        (reported("finished", 3601), True, "The last bounded run ended 60 minutes ago"),
        # nobody has asked the pipeline to stop
        (reported("stopped", 601, stopped_by="task"), True, "was stopped with its task 10 minutes ago, and none"),
        (reported("stopped", 601, stopped_by="replacement"), True, "was stopped to be replaced"),
        (reported("stopped", 601), True, "was stopped 10 minutes ago"),
        (reported("stopped", 599, stopped_by="replacement"), True, ""),
        # somebody has
        (reported("stopped", 1e6, stopped_by="request"), True, ""),
        (reported("failed", 1e6, permanent=True, error="x", stopped_by="request"), True, ""),
        (reported("stopped", 1e6, stopped_by="task", retired=True), True, ""),
        (reported(repeats=3), True, "3 jobs in a row have ended without publishing anything"),
        (reported(repeats=2), True, ""),
    ],
)
def test_a_pipeline_that_is_not_as_it_is_meant_is_red(status: StatusRecord, alive: bool, says: str) -> None:
    found = wrong(status, alive=alive)
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize(
    ("status", "alive"),
    [
        (reported("failed", permanent=True, error="no answer"), True),
        (reported("stopped", error="no answer"), True),
        # the server and the job's host have died together
        (reported(), False),
    ],
    ids=["failed", "not begun", "killed"],
)
def test_a_pipeline_without_a_job_may_be_one_whose_source_is_gone(status: StatusRecord, alive: bool) -> None:
    found = wrong(status, alive=alive)
    # what deletes its state is read of first: most of them can go on
    assert "operations.html#a-source-that-is-gone" in found and "--forget-cluster" not in found


def test_what_people_limit_is_red_beyond_it() -> None:
    letters = reported(counters={"dead_letters": 9, "open_dead_letters": 3})
    assert wrong(letters, dead_letters=None) == wrong(letters, dead_letters=3) == ""
    assert "3 dead letters are open, more than 2" in wrong(letters, dead_letters=2)
    old = VerifiedRecord(5, at=NOW - 7200)
    assert wrong(reported(), old) == wrong(reported(), old, unverified=7200) == ""
    assert "Verified last 2 hours ago" in wrong(reported(), old, unverified=7199)
    # however often a job has begun since
    since = reported("finished", first=NOW - 7200)
    assert wrong(since, unverified=7200) == "" and "Never verified" in wrong(since, unverified=7199)
    # only tables that were named, or samples
    assert "Never verified" in wrong(since, VerifiedRecord(), unverified=7199)
    assert "found differences in public.a" in wrong(reported(), VerifiedRecord(5, ("public.a",), at=NOW - 5))
    assert "could not prove that the topics of public.a are" in wrong(reported(), VerifiedRecord(5, (), ("public.a",)))


def test_a_stream_that_is_behind_is_red_without_its_source() -> None:
    behind = reported(lag=5_000_000, delay=90.0)
    assert wrong(behind) == wrong(behind, lag=5_000_000, delay=90) == wrong(reported(lag=0, delay=0.0), lag=0) == ""
    # it has begun long ago, and cannot measure
    assert wrong(reported()) == wrong(reported(), delay=9, silence=NOW) == wrong(reported("waiting"), delay=9) == ""
    assert "How far the stream is behind is not known" in wrong(reported(), delay=9)
    assert "is 5.0 MB and 90 s behind; 5.0 MB are allowed" in wrong(behind, lag=4_999_999)
    assert "is 5.0 MB and 90 s behind; 6.0 MB and 89 s are allowed" in wrong(behind, lag=6_000_000, delay=89)
    # what was measured last by a job that is dead, or has ended
    assert "behind" not in wrong(behind, alive=False, lag=0)
    assert wrong(reported("finished", lag=5, delay=9.0), lag=0) == ""


def test_a_slot_is_looked_at() -> None:
    slot = SlotState("orders", "pgoutput", "logical", "d", 5, 1, "reserved", 100, 100, None)
    assert (
        pipelines.wrong_slot(slot, reported(), HealthLimits())
        == pipelines.wrong_slot(slot, reported(), HealthLimits(lag=100))
        == []
    )
    assert "100 bytes behind" in pipelines.wrong_slot(slot, reported(), HealthLimits(lag=99))[0]
    assert "no slot 'orders'" in pipelines.wrong_slot(None, reported(), HealthLimits())[0]
    # one that was stopped on request keeps its WAL; one that was retired is to be dropped
    stopped, retired = reported("stopped", stopped_by="request"), reported("stopped", retired=True)
    assert "was stopped on request: start it again" in pipelines.wrong_slot(slot, stopped, HealthLimits(lag=99))[0]
    assert [pipelines.wrong_slot(each, stopped, HealthLimits()) for each in (None, slot)] == [[], []]
    assert "was stopped on request" in pipelines.unread(slot, stopped)
    assert "drop it with 'bottledwater drop-slot'" in pipelines.wrong_slot(slot, retired, HealthLimits())[0]
    just = replace(retired, at=time.time())
    assert pipelines.wrong_slot(None, retired, HealthLimits()) == pipelines.wrong_slot(slot, just, HealthLimits()) == []
    lost = SlotState("orders", "pgoutput", "logical", "d", None, 1, "lost", 0, 0, None, invalidated="wal_removed")
    assert "orders" in pipelines.wrong_slot(lost, reported(), HealthLimits())[0]


def test_pipelines_are_chosen_by_slot_or_name_and_none_is_missed() -> None:
    other = reported(slot="shop")
    records = {status_key(NAME): encode(reported()), status_key("2/e/shop"): encode(other), "status/3/x/y": {"a": 1}}
    assert set(pipelines.statuses(records)) == {NAME, "2/e/shop"}
    assert set(pipelines.statuses(records, ["ord*"])) == {NAME}
    found = pipelines.statuses(records, ["2/e/*", "nobody"])
    assert set(found) == {"2/e/shop"} and pipelines.missing(found, ["2/e/*", "nobody"]) == ["nobody"]
