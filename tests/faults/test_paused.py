"""Jobs that die, or wake up too late, while a table is paused and goes on."""

from __future__ import annotations

import pytest

from airflow_bottledwater.provision import pausing
from airflow_bottledwater.state.claim import read_state
from tests.faults.worker import PAUSE_POINTS
from tests.support.faults import Jobs
from tests.support.forms import Draw
from tests.support.topics import Flow, MakeFlow, limit_records
from tests.support.waiting import until
from tests.support.writers import audit, check_last, make_tables, read_rows, state_topic, update

TABLES = ("a", "b")
#: between the request to go on and the end of the live snapshot
_GOING_ON = ("before-steps", "behind-chunk", "before-swept", "in-swept")

#: of a table whose column ``name`` has to be published, since it is too large
_OPTIONS = {"a": {"exclude": ["at"], "rename": {"name": "n", "n": "name"}, "where": "id < 1000 OR (id % 2 = 0)"}}


def _ready(flow: Flow, draw: Draw, seed: int) -> Flow:
    make_tables(flow, TABLES, 300)
    draw(flow, seed, TABLES)
    return _streamed(flow)


def _streamed(flow: Flow) -> Flow:
    flow.create()
    flow.snapshot()
    flow.stream()
    return flow


def _change(flow: Flow, first: int) -> None:
    flow.transaction(update("a", first, first + 20), update("b", first, first + 20))


def _ask(flow: Flow, *, paused: bool) -> None:
    pausing.ask(flow.pipeline, ["a"], paused=paused)


def _records(flow: Flow) -> int:
    return len(read_rows(flow, ("a",))["a"])


def _held(flow: Flow) -> bool:
    return bool(read_state(flow.pipeline, state_topic(flow)).held)


@pytest.mark.long
@pytest.mark.parametrize("point", PAUSE_POINTS)
def test_a_job_that_is_killed_while_a_table_is_paused_and_goes_on(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int, point: str
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    before = _records(flow)
    _ask(flow, paused=True)
    _change(flow, 0)
    jobs.start(flow, "stream", point=point).killed_at_its_point()
    _change(flow, 30)
    flow.stream()
    assert _held(flow) and _records(flow) == before
    audit(flow, ("b",)).check()
    _ask(flow, paused=False)
    _change(flow, 60)
    jobs.start(flow, "stream", point=point).killed_at_its_point()
    _change(flow, 90)
    flow.stream()
    assert not _held(flow)
    check_last(flow, "a")
    audit(flow, ("b",)).check()


@pytest.mark.long
@pytest.mark.parametrize("point", _GOING_ON)
def test_a_job_that_is_killed_before_all_rows_of_a_table_are_read_again(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int, point: str
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    _ask(flow, paused=True)
    flow.stream()
    flow.execute("DELETE FROM a WHERE id BETWEEN 200 AND 250")
    _change(flow, 0)
    flow.stream()
    _ask(flow, paused=False)
    jobs.start(flow, "stream", point=point).killed_at_its_point()
    _change(flow, 30)
    flow.stream()
    check_last(flow, "a")
    audit(flow, ("b",)).check()


@pytest.mark.long
def test_a_job_that_wakes_too_late_pauses_nothing(make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    _ask(flow, paused=True)
    zombie = jobs.start(flow, "stream", point="before-pause", act="stop")
    zombie.stopped_at_its_point()
    flow.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        " WHERE active AND database = current_database()"
    )
    flow.stream()
    assert _held(flow)
    _ask(flow, paused=False)
    flow.stream()
    zombie.resume()
    until(lambda: not zombie.running, "it ends")
    assert zombie.outcome.startswith("TakenOver"), zombie.output
    _change(flow, 0)
    flow.stream()
    assert not _held(flow)
    check_last(flow, "a")
    audit(flow, ("b",)).check()


@pytest.mark.long
@pytest.mark.parametrize("point", ["before-position", "before-commit", "in-commit", "before-acknowledge"])
def test_a_job_that_is_killed_while_it_sets_a_table_aside(make_flow: MakeFlow, jobs: Jobs, point: str) -> None:
    flow = make_flow(tables=TABLES, on_error="isolate", table_options=_OPTIONS)
    make_tables(flow, TABLES, 300)
    _streamed(flow)
    limit_records(flow, "a", 20_000)
    before = _records(flow)
    large = update("a", 100, 100).replace("n = n + 1", "name = repeat('x', 30000)")
    flow.transaction(update("a", 0, 5), update("b", 0, 5), large, update("b", 5, 10), update("a", 5, 10))
    jobs.start(flow, "stream", point=point).killed_at_its_point()
    _change(flow, 30)
    flow.stream()
    assert _held(flow) and _records(flow) == before
    audit(flow, ("b",)).check()
    flow.execute(large.replace("30000", "3"))
    _ask(flow, paused=False)
    flow.stream()
    assert not _held(flow)
    check_last(flow, "a")
    audit(flow, ("b",)).check()
