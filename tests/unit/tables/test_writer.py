"""The records with which tables are held, and go on."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from unittest.mock import Mock

import pytest

from airflow_bottledwater.model.attached import AttachedTable
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.partitions import KnownPartition, Partition, changes, followed
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    COMPLETE,
    Complete,
    Gap,
    LiveProgress,
    Partitions,
    attached_key,
    encode,
    gap_key,
    live_key,
    partitions_key,
)
from airflow_bottledwater.tables import writer
from airflow_bottledwater.tables.names import NewNames
from airflow_bottledwater.tables.plan import PINNING, Do, Step, plan
from airflow_bottledwater.tables.writer import PreparedSteps, hold, release
from tests.unit.tables.test_plan import PIPELINE, A, B, known, seen, table

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


def test_nothing_is_read_of_a_held_table_that_gets_the_topic_of_one_that_is_being_read() -> None:
    state = known(A, B)
    state.apply(
        {
            COMPLETE: Complete((1, 2), False, 0.0),
            gap_key(2): replace(WHY, held=True),
            live_key("its"): LiveProgress((1,), required=True),
        }
    )
    steps = [each for each in plan(PIPELINE, state, seen(table(2, "a"))) if each.do is not Do.NOTHING]
    assert {(each.oid, each.do) for each in steps} == {(1, Do.STOP), (2, Do.MOVE)}
    state.apply(writer.records(PIPELINE, prepared_of(steps, random.Random(1)), state))
    assert state.held == {2} and state.lives["its"].tables == ()


C = table(3, "a")
HANDED_OVER = {
    "a staging table takes the name": seen(table(2, "a")),
    "a swap": seen(table(2, "a"), table(1, "b")),
    "a rotation": seen(table(1, "old"), C, B),
    "created again": seen(C, B),
    "a chain": seen(table(1, "b"), table(2, "c"), C),
    "not wanted any more": seen(C, unwanted=(table(1, "archived"),)),
}
PART = Partition(1, 7, 1, "public", "p", "r", "p", True, "d", [], 77, 1, False, "700", False, "701")
OF_PARTITIONS = {
    "attached": Step(1, "public.a", "a", "has parts", Do.READ_PARTS, parts=(PART,)),
    "below": Step(1, "public.a", "a", "is a partition", Do.BELOW, root="public.b"),
    "apart": Step(1, "public.a", "a", "was detached", Do.APART),
}


def carried_out_twice(state: PipelineState, prepared: PreparedSteps) -> None:
    """As when the first transaction was committed, and nobody knows it: they are made of the state behind it."""
    once = read_again(state, writer.records(PIPELINE, prepared, state))
    twice = read_again(once, writer.records(PIPELINE, prepared, once))
    assert without_time(twice) == without_time(once)


def read_again(state: PipelineState, values: dict[str, object]) -> PipelineState:
    """The state behind a transaction, as it is in the topic."""
    raw = dict(state.raw)
    for key, value in values.items():
        raw.pop(key, None)
        if value is not None:
            raw[key] = json.loads(json.dumps(encode(value)))  # type: ignore[arg-type]
    return PipelineState(raw)


def without_time(state: PipelineState) -> dict[str, object]:
    return {**state.raw, COMPLETE: {**state.raw[COMPLETE], "at": 0}}


def prepared_of(steps: list[Step], some: random.Random) -> PreparedSteps:
    tables = {each.oid: each for look in HANDED_OVER.values() for each in look.tables.values()}
    pinned = {
        each.oid: PinnedTable(tables[each.oid], each.topic, "id", 1, 0, 0, 800) for each in steps if each.do in PINNING
    }
    swept = frozenset(oid for oid in pinned if some.random() < 0.5)
    dropped = frozenset(each.oid for each in steps if each.do is Do.STOP and some.random() < 0.5)
    return PreparedSteps(tuple(steps), pinned, swept=swept, dropped=dropped, retry=some.random() < 0.5)


def with_lives(state: PipelineState, some: random.Random) -> PipelineState:
    """With live snapshots that read any of the tables, or were to, and tables that are held."""
    state.apply({COMPLETE: Complete(tuple(sorted(state.tables)), False, 0.0)})
    for number in range(some.randrange(4)):
        oids = some.choice([(1,), (2,), (1, 2), (2, 1)])
        progress = LiveProgress(oids, required=some.random() < 0.7, sweep=some.random() < 0.5, upto=some.randrange(3))
        state.apply({live_key(f"l{number}"): replace(progress, ended=some.choice(["", "", "failed", "finished"]))})
    for oid in state.tables:
        if some.random() < 0.2:
            state.apply({gap_key(oid): Gap("was paused", held=True)})
    return state


@pytest.mark.parametrize("case", HANDED_OVER)
def test_steps_whose_outcome_is_unknown_are_carried_out_once(case: str) -> None:
    for seed in range(100):
        some = random.Random(f"{case} {seed}")
        state = with_lives(known(A, B), some)
        steps = [each for each in plan(PIPELINE, state, HANDED_OVER[case]) if each.do is not Do.NOTHING]
        some.shuffle(steps)
        carried_out_twice(state, prepared_of(steps, some))


@pytest.mark.parametrize("case", OF_PARTITIONS)
def test_steps_of_partitions_whose_outcome_is_unknown_are_carried_out_once(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "shared", lambda *_: {})
    for seed in range(10):
        some = random.Random(f"{case} {seed}")
        state = with_lives(known(A, B), some)
        if case == "apart":
            state.apply({attached_key(1): AttachedTable("public.b")})
        carried_out_twice(state, prepared_of([OF_PARTITIONS[case]], some))


def test_names_that_are_written_again_are_recorded_once() -> None:
    """A write whose transaction is lost is done again from the state as it is then, which may have it."""
    state = known(replace(A, sent=((1, "id"),)))
    names = NewNames({1: ((2, "a"),)})
    for _ in range(2):
        state.apply(names.records(state, [1], []))
        assert state.tables[1].table.sent == ((1, "id"), (2, "a"))


def test_publications_are_read_once_for_all_new_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have thousands of tables, if thousands are taken in."""
    there = [publication.Published(name, False, True, True, True, True, {}) for name in publication.names("s")]
    read, added = list[str](), list[str]()
    monkeypatch.setattr(publication, "existing", lambda _, name: read.append(name) or there)
    monkeypatch.setattr(publication.locks, "in_rounds", lambda *_, what, **__: added.append(what))
    state, look = known(A), seen(A, B, table(4, "c"))
    steps = [each for each in plan(PIPELINE, state, look) if each.do in PINNING]
    tables, unfit = writer._publish(Mock(), PIPELINE, state, look, steps)
    assert not unfit and tables.keys() == {2, 4} and read == ["s"]
    assert [what.partition(" in ")[0] for what in added] == ["Adding public.b", "Adding public.c"]


def partition(oid: int, filenode: int, xmin: str) -> Partition:
    return Partition(1, oid, 1, "public", f"p{oid}", "r", "p", True, "d", [], filenode, 1, False, xmin, True, "700")


def test_the_files_of_a_table_that_was_truncated_whole_are_recorded() -> None:
    """With one partition that has its first file, it would look as if only the others had been truncated."""
    state, root = known(A), replace(A, partitioned=True)
    before = {oid: KnownPartition(f"public.p{oid}", oid, "700") for oid in (7, 8)}
    state.apply({COMPLETE: Complete((1,), False, 0.0), partitions_key(1): Partitions(before)})
    truncated = [partition(7, 17, "800"), partition(8, 18, "800")]
    assert not changes(state.partitions[1], root, truncated)
    prepared = PreparedSteps(followed={1: (before, followed(before, root, truncated))})
    carried_out_twice(state, prepared)
    state.apply(writer.records(PIPELINE, prepared, state))
    today = [*truncated, partition(9, 9, "801")]
    state.apply({partitions_key(1): Partitions(followed(state.partitions[1], root, today))})
    assert {oid: each.filenode for oid, each in state.partitions[1].items()} == {7: 17, 8: 18, 9: 9}
    assert not changes(state.partitions[1], root, today)
    # of one alone, PostgreSQL sends nothing
    (found,) = changes(state.partitions[1], root, [truncated[0], partition(8, 28, "802"), today[2]])
    assert found[0] == "public.p8"


def test_a_table_that_is_truncated_whole_is_known_by_all_of_its_partitions() -> None:
    """Of one that was attached, a live snapshot may record the file of before behind the look that has recorded those
    of the others; what it marks, since rows that it has published are gone, is told."""
    root, today = replace(A, partitioned=True), [partition(oid, oid + 10, "800") for oid in (7, 8, 9)]
    known = {oid: KnownPartition(f"public.p{oid}", oid + 10, "700") for oid in (7, 8)}
    assert not changes({**known, 9: KnownPartition("public.p9", 9, "700")}, root, today)
    mark = {9: KnownPartition("public.p9", 0, "700")}
    for marked, there in (({**known, **mark}, today), (mark, today[2:])):
        assert [name for name, *_ in changes(marked, root, there)] == ["public.p9"]
        assert followed(marked, root, there)[9].filenode == 0


def test_what_was_recorded_of_a_partition_since_the_look_stays() -> None:
    """A live snapshot with a sweep has read the file that it has now, or one that is gone by then."""
    state = known(A)
    before = {oid: KnownPartition("p", oid, "700") for oid in (7, 8, 9)}
    found = {**{oid: each._replace(filenode=oid + 10) for oid, each in before.items()}, 6: KnownPartition("p", 6)}
    since = {7: before[7], 8: before[8]._replace(filenode=28)}
    state.apply({COMPLETE: Complete((1,), False, 0.0), partitions_key(1): Partitions(since)})
    state.apply(writer.records(PIPELINE, PreparedSteps(followed={1: (before, found)}), state))
    assert {oid: each.filenode for oid, each in state.partitions[1].items()} == {6: 6, 7: 17, 8: 28}
