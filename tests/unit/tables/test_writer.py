"""The records with which tables are held, and go on."""

from __future__ import annotations

from airflow_bottledwater.state.records import Gap, LiveProgress, gap_key, live_key
from airflow_bottledwater.tables.writer import hold, release
from tests.unit.tables.test_plan import A, B, known

WHY = Gap("was paused by alice", paused=True, at=5.0)


def test_a_table_is_held_and_goes_on() -> None:
    state = known(A, B)
    state.apply(hold(state, {1: WHY}))
    assert state.held == {1} and state.gaps == {1: Gap("was paused by alice", held=True, paused=True, at=5.0)}
    # who has held it first, and why, stays; and it is written again, which only a job can do that has the slot
    again = hold(state, {1: Gap("has a change that cannot be published")})
    assert again == {gap_key(1): state.gaps[1]}
    state.apply(release(state, [1, 2]))
    assert not state.held and state.gaps == {1: WHY}
    # what it lacks is not forgotten, whatever is asked for then
    state.apply(release(state, [1]))
    assert state.gaps == {1: WHY}
    assert hold(state, {99: WHY}) == {gap_key(99): None}


def test_keys_that_were_accepted_stay_so() -> None:
    state = known(A)
    state.apply({gap_key(1): Gap("gets keys of other bytes", accepted=True)})
    state.apply(hold(state, {1: WHY}))
    assert state.accepted == {1}
    state.apply(release(state, [1]))
    assert state.accepted == {1} and not state.held


def test_what_is_being_read_of_it_is_given_up() -> None:
    state = known(A, B)
    state.apply(
        {
            live_key("both"): LiveProgress((2, 1), filenode=7, upto=5),
            live_key("its"): LiveProgress((1,), sweep=True, required=True),
            live_key("other"): LiveProgress((2,)),
        }
    )
    state.apply(hold(state, {1: WHY}))
    assert {each: progress.tables for each, progress in state.lives.items()} == {"both": (2,), "its": (), "other": (2,)}
    assert state.lives["both"].upto == 5
