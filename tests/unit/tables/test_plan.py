"""What is to be done about each table, by what is known and what the catalog shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.model.attached import AttachedTable
from airflow_bottledwater.model.relation import CatalogKey, Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres.coverage import Coverage, Publication
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import COVERAGE, Former, Gap, attached_key, former_key, gap_key, table_key
from airflow_bottledwater.tables.look import CatalogLook
from airflow_bottledwater.tables.plan import Do, Unfit, plan

PIPELINE = Settings.of(postgres="host=h", kafka={"bootstrap.servers": "k"}, slot="s", format="json")
PUBLICATIONS = {name: Publication(oid, "1", 10, False, "insert") for oid, name in ((1, "s"), (2, "s_unkeyed"))}
INT, TEXT = (ColumnType(oid, -1, oid, -1, "b", name) for oid, name in ((23, "int"), (25, "text")))


def table(oid: int, name: str, *key: str) -> SourceTable:
    columns = (Column("id", INT), Column("other", INT), Column("text", TEXT))
    return SourceTable(oid, "public", name, "d", key or ("id",), columns, key_problem="it has no primary key")


def keyless(oid: int, name: str) -> SourceTable:
    return replace(table(oid, name), key=())


def known(*tables: SourceTable, former: tuple[str, ...] = (), gaps: tuple[int, ...] = ()) -> PipelineState:
    """Tables that are followed under their names."""
    found = PipelineState()
    found.apply({table_key(each.oid): PinnedTable(each, each.name, "id", 1, 0, 0, 700) for each in tables})
    found.apply({former_key(each): Former(99, each) for each in former})
    found.apply({gap_key(oid): Gap("lacks changes") for oid in gaps})
    found.apply({COVERAGE: Coverage({}, {each.oid: frozenset({each.oid + 900}) for each in tables})})
    return found


def seen(
    *tables: SourceTable, unwanted: tuple[SourceTable, ...] = (), rows: dict[int, set[int]] | None = None
) -> CatalogLook:
    everything = [*tables, *unwanted]
    covered = {each.oid: frozenset({each.oid + 900}) for each in everything}
    covered |= {oid: frozenset(some) for oid, some in (rows or {}).items()}
    covered = {oid: some for oid, some in covered.items() if some}
    return CatalogLook(
        frozenset(each.oid for each in tables),
        frozenset(),
        {each.oid: each for each in everything},
        Coverage(PUBLICATIONS, covered),
    )


def steps(
    before: PipelineState, now: CatalogLook, unfit: dict[int, Unfit] | None = None, **settings: Any
) -> dict[int, Any]:
    return {each.oid: (each.do, each.topic) for each in plan(PIPELINE.with_(**settings), before, now, unfit)}


A, B = table(1, "a"), table(2, "b")


def test_what_is_as_it_is_meant_needs_nothing() -> None:
    assert steps(known(A, B), seen(A, B)) == {}
    # neither does a table that was renamed
    assert steps(known(A, B), seen(table(1, "renamed"), B)) == {}
    # nor one that the settings do not name any more
    assert steps(known(A, B), seen(A, unwanted=(B,))) == {}


def test_what_was_dropped_is_not_followed_any_more_so_that_its_topic_may_go() -> None:
    assert steps(known(A, B), seen(A)) == {2: (Do.STOP, "")}
    # but while it tells that another table cannot get the topic; without a key that may come later
    assert steps(known(A, B), seen(A, keyless(3, "b"))) == {3: (Do.NOTHING, "b")}
    assert steps(known(A, keyless(2, "b")), seen(A)) == {}


def test_a_table_that_got_its_key_behind_its_taking_in_is_told() -> None:
    """As pg_restore gives it: its topic has inserts only for ever."""
    (step,) = plan(PIPELINE, known(A, keyless(2, "b")), seen(A, B))
    assert (step.do, step.topic, step.problem.kind) == (Do.NOTHING, "b", "not-complete")
    assert "has one now (id)" in step.why and "its updates and deletes are not sent" in step.why
    assert 'run: ALTER PUBLICATION "s_unkeyed" DROP TABLE ONLY "public"."b"; and' in step.remedy
    full = replace(keyless(2, "b"), identity="f")
    (step,) = plan(PIPELINE, known(A, full), replace(seen(A, B), members=frozenset({2})))
    assert "its deletes are not sent" in step.why and 'PUBLICATION "s" DROP' in step.remedy
    (step,) = plan(PIPELINE.with_(create_publication=False), known(A, keyless(2, "b")), seen(A, B))
    assert "another topic_prefix" in step.remedy and "take it out of the publication, too" in step.remedy
    # none is missing without one, nor to an outbox, whose records have other keys
    outbox = replace(keyless(2, "b"), outbox=True)
    assert steps(known(A, keyless(2, "b")), seen(A, keyless(2, "b"))) == {} == steps(known(A, outbox), seen(A, outbox))


def test_what_neither_the_settings_nor_a_publication_name_is_not_followed_any_more() -> None:
    away = seen(A, unwanted=(B,), rows={2: set()})
    assert steps(known(A, B), away) == {2: (Do.STOP, "")}
    # but not what was dropped with its publication, was taken out since it could not stay, or cannot be published
    assert steps(known(A, B), replace(away, coverage=Coverage({}, away.coverage.tables))) == {2: (Do.READ, "b")}
    assert steps(known(A, B), seen(A, unwanted=(keyless(2, "b"),), rows={2: set()})) == {2: (Do.NOTHING, "b")}
    hindered = replace(away, hindered={2: "b is not as it has to be."})
    assert steps(known(A, B), hindered) == {2: (Do.NOTHING, "b")}
    # one of which only the changes are not decoded can be let go as it is
    assert steps(known(A, B), replace(hindered, undecoded=frozenset({2}))) == {2: (Do.STOP, "")}
    assert steps(known(A, B), replace(away, kept=frozenset({2}))) == {2: (Do.READ, "b")}


@pytest.mark.parametrize(("new_tables", "expected"), [("add", {2: (Do.STOP, "")}), ("stop", {}), ("ignore", {})])
def test_a_partition_that_is_detached_is_none_of_the_new_tables_when_it_is_attached_again(
    new_tables: str, expected: dict[int, Any]
) -> None:
    before, away = known(A, B), seen(A, unwanted=(B,), rows={2: set()})
    before.apply({COVERAGE: Coverage({}, {1: frozenset({901}), 2: frozenset({(740 << 32) + 902})})})
    assert steps(before, away, new_tables=new_tables) == expected
    assert steps(before, seen(A, B, rows={2: {(745 << 32) + 902}}), new_tables=new_tables) == {2: (Do.READ, "b")}
    # one that was in the publication by itself was taken out
    assert steps(known(A, B), away, new_tables=new_tables) == {2: (Do.STOP, "")}


@pytest.mark.parametrize("gap", ["added again", "another key", "changes were left out", "paused", "no key"])
def test_what_is_followed_is_kept_right_also_if_the_settings_do_not_name_it_any_more(gap: str) -> None:
    now = {"another key": table(2, "b", "other"), "no key": keyless(2, "b")}.get(gap, B)
    before = known(A, B, gaps=(2,) if gap == "changes were left out" else ())
    if gap == "paused":
        before.apply({gap_key(2): Gap("was paused by alice", held=True, paused=True, at=5.0)})
    rows: dict[int, set[int]] = {2: {950}} if gap == "added again" else {}
    expected = Do.NOTHING if gap in ("paused", "no key") else Do.READ
    assert steps(before, seen(A, unwanted=(now,), rows=rows)) == {2: (expected, "b")}


def test_a_new_table_is_followed_if_it_can_be() -> None:
    assert steps(known(A), seen(A, B)) == {2: (Do.FOLLOW, "b")}
    assert steps(known(A), seen(A, B), {2: Unfit("has no rights")}) == {2: (Do.NOTHING, "b")}
    assert steps(known(A), seen(A, B), new_tables="ignore") == {}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param((table(2, "a"),), {1: (Do.STOP, ""), 2: (Do.MOVE, "a")}, id="a staging table takes the name"),
        pytest.param((table(2, "a"), table(1, "b")), {1: (Do.MOVE, "b"), 2: (Do.MOVE, "a")}, id="a swap"),
        pytest.param((table(1, "old"), table(3, "a"), B), {1: (Do.MOVE, "old"), 3: (Do.FOLLOW, "a")}, id="a rotation"),
        pytest.param((table(3, "a"), B), {1: (Do.STOP, ""), 3: (Do.FOLLOW, "a")}, id="created again"),
        pytest.param(
            (table(1, "b"), table(2, "c"), table(3, "a")),
            {1: (Do.MOVE, "b"), 2: (Do.MOVE, "c"), 3: (Do.FOLLOW, "a")},
            id="a chain",
        ),
    ],
)
def test_a_topic_goes_to_the_table_that_bears_its_name(now: tuple[SourceTable, ...], expected: object) -> None:
    assert steps(known(A, B), seen(*now)) == expected


def test_a_renamed_table_that_is_not_wanted_leaves_its_topic() -> None:
    assert steps(known(A), seen(table(3, "a"), unwanted=(table(1, "archived"),))) == {
        1: (Do.STOP, ""),
        3: (Do.FOLLOW, "a"),
    }


def test_a_topic_stays_where_it_is_while_the_table_that_bears_its_name_cannot_get_it() -> None:
    before, rotated = known(A), seen(table(1, "old"), table(3, "a"))
    assert steps(before, rotated, {3: Unfit("has no rights")}) == {3: (Do.NOTHING, "a")}
    # of a table without a key it cannot be told what the topic has
    assert steps(before, seen(table(1, "old"), keyless(3, "a"))) == {3: (Do.NOTHING, "a")}
    for there, comes, remedy in (
        (A, keyless(3, "a"), "Give the table a primary key, or rename it"),
        (keyless(1, "a"), table(3, "a"), "Rename the table: then it gets a topic of its own, if"),
        (keyless(1, "a"), keyless(3, "a"), "Rename the table: then it gets a topic of its own, if"),
    ):
        (step,) = plan(PIPELINE, known(there), seen(comes))
        assert step.do is Do.NOTHING and step.remedy.startswith(remedy)
    # one that cannot get a topic of its own leaves the one that it has
    assert steps(before, rotated, {1: Unfit("has no rights")}) == {1: (Do.STOP, "old"), 3: (Do.FOLLOW, "a")}


def test_an_outbox_can_follow_another_one_since_no_event_is_a_version_of_another() -> None:
    def outbox(oid: int, name: str) -> SourceTable:
        return replace(keyless(oid, name), outbox=True)

    before, ours = known(outbox(1, "a")), {"table_options": {"*": Table(outbox="{table}")}}
    for there in ((), (outbox(1, "old"),)):
        now = seen(outbox(3, "a"), unwanted=there)
        assert steps(before, now, **ours) == {1: (Do.STOP, ""), 3: (Do.FOLLOW, "a")}
        assert steps(before, now, {3: Unfit("create_slot takes it in")}, **ours) == {3: (Do.NOTHING, "a")}
    # one that is renamed and still wanted keeps its topics
    assert 1 not in steps(before, seen(outbox(1, "old"), outbox(3, "a")), **ours)
    assert steps(before, seen(table(3, "a"))) == {3: (Do.NOTHING, "a")}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param((table(1, "old"), table(3, "a"), B), {1: (Do.STOP, "old"), 3: (Do.FOLLOW, "a")}, id="a rotation"),
        pytest.param((table(2, "a"), table(1, "b")), {1: (Do.STOP, "b"), 2: (Do.MOVE, "a")}, id="an exchange"),
        pytest.param((table(1, "b"), table(2, "c")), {1: (Do.NOTHING, "b")}, id="a chain"),
    ],
)
def test_a_table_whose_new_name_would_show_more_gets_no_other_topic(
    now: tuple[SourceTable, ...], expected: object
) -> None:
    hindered = {1: "public.b was public.a. Put its options under the new name."}
    looked = replace(seen(*now), hindered=hindered)
    assert steps(known(A, B), looked) == expected
    # also not as a new one, at the next look
    if expected[1][0] is Do.STOP:  # type: ignore[index]
        before = known(*(each for each in now if each.oid != 1))
        assert [(each.oid, each.do) for each in plan(PIPELINE, before, looked)] == [(1, Do.NOTHING)]


def test_a_topic_that_had_rows_is_never_forgotten() -> None:
    assert steps(known(A, former=("b",)), seen(table(1, "b"))) == {1: (Do.MOVE, "b")}


def test_two_tables_never_get_one_topic() -> None:
    found = steps(known(), seen(table(3, "a b"), table(4, "a_20_b")))
    assert sorted(do.name for do, _ in found.values()) == ["FOLLOW", "NOTHING"]


@pytest.mark.parametrize("gap", ["taken out", "added again", "another key", "changes were left out"])
def test_what_a_topic_lacks_is_read_again(gap: str) -> None:
    rows: dict[int, set[int]] = {"taken out": {1: set()}, "added again": {1: {950}}}.get(gap, {})
    now = table(1, "a", "other") if gap == "another key" else A
    before = known(A, gaps=(1,) if gap == "changes were left out" else ())
    assert steps(before, seen(now, rows=rows)) == {1: (Do.READ, "a")}
    assert steps(before, seen(now, rows=rows), {1: Unfit("has no rights")}) == {1: (Do.NOTHING, "a")}


def test_a_table_without_a_key_any_more_gets_nothing_until_it_has_one() -> None:
    (step,) = plan(PIPELINE, known(A), seen(keyless(1, "a"), rows={1: set()}))
    assert (step.do, step.problem.kind, step.problem.subject) == (Do.NOTHING, "not-complete", "public.a")
    assert "no primary key" in step.problem.reason and "Give it its key again" in step.problem.remedy
    assert steps(known(A), seen(A, rows={1: set()})) == {1: (Do.READ, "a")}


@pytest.mark.parametrize(("identity", "what"), [("d", "changes"), ("n", "updates and deletes")])
def test_a_table_without_a_key_says_what_its_topic_lacks(identity: str, what: str) -> None:
    (step,) = plan(PIPELINE, known(A), seen(replace(keyless(1, "a"), identity=identity)))
    assert f"gets none of its {what}" in step.why


CATALOG_KEY = CatalogKey((1,), (500, 501), (600, 700))


@pytest.mark.parametrize(
    ("now", "before", "after", "other"),
    [
        pytest.param(CatalogKey((3,), (500,)), "d", "d", True, id="another column"),
        pytest.param(CatalogKey((1,), (502,), (601, 700)), "d", "d", False, id="made again"),
        pytest.param(CatalogKey((1,), (502,), (601, 701)), "d", "d", True, id="made again with other rows"),
        pytest.param(CatalogKey((1,), (502,), (601, 0)), "d", "d", True, id="made again with another file"),
        pytest.param(CatalogKey((1,), (500, 501), (601, 701)), "d", "d", False, id="other rows"),
        pytest.param(CatalogKey((1,), (502,), (600, 700)), "f", "d", True, id="made again under FULL"),
        pytest.param(CatalogKey((1,), (502,), (600, 700)), "d", "f", True, id="FULL now"),
        pytest.param(CatalogKey((1,), (501, 502)), "f", "f", False, id="one of two"),
        pytest.param(None, "f", "f", False, id="not known"),
    ],
)
def test_another_key_whose_columns_have_the_same_names_is_noticed(
    now: CatalogKey | None, before: str, after: str, other: bool
) -> None:
    was = replace(A, catalog_key=CATALOG_KEY, identity=before)
    found = steps(known(was), seen(replace(A, catalog_key=now, identity=after)))
    assert found == ({1: (Do.READ, "a")} if other else {})
    # the state of an earlier release
    assert not CatalogKey((1,), (500, 501)).rewritten(CATALOG_KEY)


def test_a_gap_of_a_table_without_a_key_cannot_be_closed() -> None:
    (step,) = plan(PIPELINE, known(keyless(1, "a")), seen(keyless(1, "a"), rows={1: {950}}))
    assert step.do is Do.NOTHING and "cannot be brought there without a key" in step.why
    assert "leave the table out of tables, and take it out of the publication, too" in step.remedy
    # one of both is not enough
    left_out = seen(unwanted=(keyless(1, "a"),), rows={1: {950}})
    assert steps(known(keyless(1, "a")), left_out) == {1: (Do.NOTHING, "a")}
    assert steps(known(keyless(1, "a")), seen(unwanted=(keyless(1, "a"),), rows={1: set()})) == {1: (Do.STOP, "")}


def test_the_plan_is_done_when_it_is_carried_out() -> None:
    """Whatever comes up, nothing is left to be done behind it."""
    before = known(A, B)
    found = plan(PIPELINE, before, seen(table(1, "b"), table(3, "a"), unwanted=(table(2, "away"),)))
    tables = {1: table(1, "b"), 3: table(3, "a"), 2: table(2, "away")}
    for step in found:
        if step.do is Do.STOP:
            before.apply({table_key(step.oid): None})
        else:
            before.apply({table_key(step.oid): PinnedTable(tables[step.oid], step.topic, "id", 1, 0, 0, 700)})
    assert len({each.topic for each in before.tables.values()}) == len(before.tables)
    assert steps(before, seen(table(1, "b"), table(3, "a"), unwanted=(table(2, "away"),))) == {}


@pytest.mark.parametrize("wanted", [True, False])
def test_a_table_that_becomes_a_partition_and_is_detached_again_is_moved_once(wanted: bool) -> None:
    root = replace(table(3, "p"), partitioned=True)
    before = known(A, root)
    now = seen(A, root) if wanted else seen(root, unwanted=(A,))
    # as its root's, none of its changes are sent under its own name
    below = replace(now, below={1: "public.p"}, coverage=Coverage({}, {3: frozenset({903})}))
    for look, move, record in ((below, Do.BELOW, AttachedTable("public.p")), (now, Do.APART, None)):
        assert steps(before, look) == {1: (move, "a")}
        before.apply({attached_key(1): record})
        assert steps(before, look) == {}


def test_nothing_is_done_about_a_table_that_is_held_until_a_person_lets_it_go_on() -> None:
    before = known(A, B)
    before.apply({gap_key(1): Gap("was paused by alice", held=True, paused=True, at=5.0)})
    before.apply({gap_key(2): Gap("has a change that cannot be published", held=True, at=6.0)})
    lost_key = keyless(1, "a")
    for now in (seen(A, B), seen(lost_key, B), seen(A, B, rows={1: {7}})):
        paused, aside = plan(PIPELINE, before, now)
        assert (paused.do, aside.do) == (Do.NOTHING, Do.NOTHING)
    assert (paused.problem.kind, paused.problem.since) == ("paused", 5.0)
    assert paused.problem.reason == "It was paused by alice: its topic gets none of its changes."
    assert paused.problem.remedy.startswith("Let it go on (bottledwater resume-table --tables public.a)")
    assert (aside.problem.kind, aside.problem.since) == ("set-aside", 6.0)
    assert aside.problem.remedy.startswith("Mend the cause. Let it go on")
    attached = replace(seen(A, B), attached={1: []})
    assert {step.do for step in plan(PIPELINE, before, attached)} == {Do.NOTHING}
    # then it is like any other gap
    before.apply({gap_key(1): Gap("was paused by alice", paused=True), gap_key(2): None})
    assert steps(before, seen(A, B)) == {1: (Do.READ, "a")}
