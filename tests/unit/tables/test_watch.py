"""When what is prepared for the tables may be carried out."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Refused, SlotError
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.coverage import Coverage
from airflow_bottledwater.state import identity
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.state.records import SLOT, LiveProgress, live_key
from airflow_bottledwater.tables import watch as watching
from airflow_bottledwater.tables.look import CatalogLook
from airflow_bottledwater.tables.plan import Do, Unfit
from airflow_bottledwater.tables.watch import TableWatch
from airflow_bottledwater.tables.writer import PreparedSteps
from tests.unit.tables.test_plan import known, seen, table

PIPELINE = Settings.of(postgres="host=h", kafka={"bootstrap.servers": "k"}, slot="s", format="json")


CLUSTER = Cluster("7", 1, "d", 160000)


def watch(prepared: PreparedSteps | None = None, known: PipelineState | None = None, **settings: object) -> TableWatch:
    made = TableWatch(PIPELINE.with_(**settings), CLUSTER, known or PipelineState(), Problems(), patient=True)
    made._prepared = prepared
    return made


def test_nothing_is_carried_out_before_its_place_or_inside_a_transaction() -> None:
    prepared = PreparedSteps(lsn=100)
    made = watch(prepared)
    assert made.waits() == 100
    assert made.due(Position(99)) is None and made.due(Position(100, 3)) is None
    assert made.due(Position(100)) is prepared
    made.carried_out(prepared, PipelineState())
    assert made.due(Position(200)) is None and made.waits() == 0


def test_with_stop_new_tables_end_the_stream() -> None:
    made = watch(new_tables="stop")
    assert made.due(Position(1)) is None
    made._new = ["public.t"]
    with pytest.raises(Refused, match="new_tables is stop"):
        made.due(Position(1))


def test_what_is_to_become_of_a_table_is_told_by_a_look_of_afterwards() -> None:
    made = watch()
    assert made.unsettled([1], 5.0) and made._again == 0.0
    made._looked = 10.0, frozenset({1, 2})
    assert made.unsettled([1], 5.0) and made.unsettled([3, 2], 5.0)
    assert not made.unsettled([3], 5.0)
    made._again = 99.0
    assert made.unsettled([3], 10.5) and made._again == 0.0


def test_asking_takes_a_tenth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch()
    made._mark, made._again = "as before", math.inf
    monkeypatch.setattr(watching, "mark", lambda _: time.sleep(0.02) or "as before")
    made._ask(None)  # type: ignore[arg-type]
    assert made._rest >= 0.18


@pytest.mark.parametrize("changed", [False, True], ids=["nothing", "another look"])
def test_looks_take_a_tenth_of_the_time_and_half_of_it_while_much_changes(
    monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """One of thousands of tables takes longer than the time between two of them."""
    made = watch()
    monkeypatch.setattr(watching, "mark", lambda _: "another")
    monkeypatch.setattr(watching, "INTERVAL", 0.1)
    made._given.set()

    def look(_: object) -> None:
        time.sleep(0.2)
        made._succeed()
        if changed:
            made.changed(PipelineState())

    monkeypatch.setattr(made, "_look", look)
    made._ask(None)  # type: ignore[arg-type]
    assert 0.2 <= made._rest < 1.0
    assert (made._again == 0.0) if changed else (made._again - time.monotonic() >= 1.7)


def test_a_look_that_fails_is_followed_by_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch()
    monkeypatch.setattr(watching, "mark", lambda _: "another")
    made._given.set()

    def look(_: object) -> None:
        time.sleep(0.1)
        raise Refused("no")

    monkeypatch.setattr(made, "_look", look)
    with pytest.raises(Refused):
        made._ask(None)  # type: ignore[arg-type]
    assert made._rest >= 0.1


def _clocked(monkeypatch: pytest.MonkeyPatch, made: TableWatch, mark: str) -> list[float]:
    """The time that a watch goes by, to be moved; nobody keeps it from looking, and each question finds this mark."""
    at = [100.0]
    monkeypatch.setattr(watching, "mark", lambda _: mark)
    monkeypatch.setattr(watching.time, "monotonic", lambda: at[0])
    made._given.set()
    return at


def test_a_look_that_fails_after_a_long_time_is_tried_again_as_soon_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch()
    at = _clocked(monkeypatch, made, "another")
    made._sees = True  # the one before has succeeded

    def check_source(*_: object) -> None:
        at[0] += 8.0
        raise Refused("no")

    monkeypatch.setattr(watching, "check_source", check_source)
    with pytest.raises(Refused):
        made._ask(Mock())
    assert made._again == 100.0 + watching.INTERVAL and made._rest == 8.0


@pytest.mark.parametrize("due", ["a new table", "a publication"])
def test_what_came_up_at_the_start_of_a_long_look_is_due_behind_its_rest(
    monkeypatch: pytest.MonkeyPatch, due: str
) -> None:
    """Not only when a tenth of the time has gone by."""
    made = watch(known=known())
    at = _clocked(monkeypatch, made, "another")
    now = seen(NEW) if due == "a new table" else replace(seen(), coverage=Coverage({}, {}))

    def look(_: object) -> None:
        at[0] += 11.0
        made._prepare(Mock(), known(), now)
        made._succeed()

    monkeypatch.setattr(made, "_look", look)
    made._ask(Mock())
    assert made._again == 111.0 + watching.LASTS and made._rest == 11.0


@pytest.mark.parametrize("last", ["succeeded", "failed"])
def test_a_question_that_finds_nothing_changed_is_a_success_behind_a_look_that_was_one(
    monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Long looks are minutes apart: one session that is refused between two of them is nothing to be told."""
    made = watch(known=known())
    at = _clocked(monkeypatch, made, "as before")

    made._succeeded = 100.0

    def check_source(*_: object) -> None:
        if last == "failed":
            raise Refused("no")

    monkeypatch.setattr(watching, "check_source", check_source)
    monkeypatch.setattr(watching, "check_standbys", lambda *_: None)
    monkeypatch.setattr(watching.writer, "filter_again", lambda *_: {})
    monkeypatch.setattr(watching, "look", lambda *_: seen())
    with pytest.raises(Refused) if last == "failed" else contextlib.nullcontext():
        made._ask(Mock())
    made._again = math.inf
    at[0] += 100.0
    made._ask(Mock())
    made._failed_to_look(Refused("no session"), False)
    assert [each.kind for each in made._problems.all()] == (["tables-unchecked"] if last == "failed" else [])
    # and it is over as soon as a question finds that
    at[0] += 100.0
    made._failed_to_look(Refused("no session"), False)
    assert made._problems.all()
    made._ask(Mock())
    assert bool(made._problems.all()) == (last == "failed")


NEW, NEW_KEYLESS = table(2, "b"), replace(table(3, "c"), key=())


def prepared_at(made: TableWatch, monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, CatalogLook]) -> list[set[int]]:
    """The oids of the tables that are checked, by look.

    :param looks: the second of each, and what it shows.
    """
    checked = list[set[int]]()

    def unfit(*given: Any) -> dict[int, Unfit]:
        checked[-1] |= {step.oid for step in given[4]}
        return {}

    def prepare(*given: Any) -> PreparedSteps:
        return PreparedSteps(tuple(given[5]))

    monkeypatch.setattr(watching.checks, "unfit", unfit)
    monkeypatch.setattr(watching.writer, "prepare", prepare)
    due = list[set[int]]()
    for at, now in looks:
        monkeypatch.setattr(watching.time, "monotonic", lambda at=at: at)
        checked.append(set())
        _, prepared = made._prepare(Mock(), known(), now)
        due.append({step.oid for step in prepared.steps} if prepared is not None else set())
    assert checked == due
    return due


def test_a_new_table_is_taken_in_when_it_has_lasted_and_one_without_a_key_when_a_restore_may_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pg_restore gives it its key last. Nothing is asked about one that may be gone in a moment."""
    made, now = watch(allow_unkeyed=True), seen(NEW, NEW_KEYLESS)
    looks = [(at, now) for at in (100.0, 102.0, 104.0, 690.0, 701.0)]
    assert prepared_at(made, monkeypatch, *looks) == [set(), set(), {2}, {2}, {2, 3}]
    # with its key it is one as all others
    made, keyed = watch(allow_unkeyed=True), seen(NEW, replace(NEW_KEYLESS, key=("id",)))
    assert prepared_at(made, monkeypatch, (100.0, now), (150.0, now), (160.0, keyed)) == [set(), {2}, {2, 3}]


def test_a_table_that_waits_for_its_key_is_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one of those that are not followed, for ten minutes."""
    made, now = watch(allow_unkeyed=True), seen(NEW, NEW_KEYLESS)
    prepared_at(made, monkeypatch, (100.0, now), (102.0, now))
    assert not caplog.messages, "it may be gone in a moment"
    prepared_at(made, monkeypatch, *((at, now) for at in (104.0, 110.0, 400.0, 701.0, 711.0)))
    (line,) = caplog.messages
    assert line.startswith("public.c: new, without a key") and line.endswith(
        "only when it has had none for 10 minutes."
    )
    # another one
    prepared_at(made, monkeypatch, (720.0, later := seen(replace(NEW_KEYLESS, oid=4, name="d"))), (730.0, later))
    assert len(caplog.messages) == 2


def test_nothing_is_carried_out_unchecked_since_the_checks_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked, now = watch(), list[int](), [100.0]

    def unfit(*given: Any) -> dict[int, Unfit]:
        asked.extend(step.oid for step in given[4])
        now[0] += 60.0
        return {}

    monkeypatch.setattr(watching.checks, "unfit", unfit)
    monkeypatch.setattr(watching.writer, "prepare", lambda *given: PreparedSteps(tuple(given[5])))
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])
    assert made._prepare(Mock(), known(), seen(NEW))[1] is None and asked == []
    now[0] -= 59.0
    assert made._prepare(Mock(), known(), seen(NEW))[1] is None and asked == []
    assert made._prepare(Mock(), known(), seen(NEW))[1] is not None and asked == [2]


def test_what_a_look_has_checked_it_does_not_check_again_since_another_table_is_unfit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, asked = watch(), list[list[int]]()

    def unfit(*given: Any) -> dict[int, Unfit]:
        asked.append([step.oid for step in given[4]])
        return {3: Unfit("is not granted")} if 3 in asked[-1] else {}

    monkeypatch.setattr(watching.checks, "unfit", unfit)
    monkeypatch.setattr(watching.writer, "prepare", lambda *given: PreparedSteps(tuple(given[5])))
    monkeypatch.setattr(watching, "LASTS", 0.0)
    steps, prepared = made._prepare(Mock(), known(), seen(NEW, table(3, "c"), table(4, "d")))
    assert asked == [[2, 3, 4], []]
    assert prepared is not None and [step.oid for step in prepared.steps] == [2, 4]
    assert [step.oid for step in steps if step.do is Do.NOTHING] == [3]


def test_what_cannot_be_made_for_one_table_has_no_other_checked_again_or_left_untried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, asked = known(table(1, "a")), list[list[int]]()
    state.apply({live_key("x"): LiveProgress((1,), required=True, ended="failed")})
    made, prepared = watch(), [PreparedSteps(unfit={3: Unfit("is locked")}), PreparedSteps()]

    def unfit(*given: Any) -> dict[int, Unfit]:
        asked.append([step.oid for step in given[4]])
        return {}

    monkeypatch.setattr(watching.checks, "unfit", unfit)
    monkeypatch.setattr(watching.writer, "prepare", lambda *_: prepared.pop(0))
    monkeypatch.setattr(watching, "LASTS", 0.0)
    made._retry_at = 1.0
    found = made._prepare(Mock(), state, seen(table(1, "a"), NEW, table(3, "c")))[1]
    assert found is not None and found.retry
    assert asked == [[2, 3], []]


def test_a_topic_passes_on_behind_what_was_committed_until_its_heir_is_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, the table that has it goes on with it."""
    before, heir = known(table(1, "a")), seen(table(2, "a"), unwanted=(table(1, "old"),))
    made, unfit = watch(known=before), dict[int, Unfit]()
    monkeypatch.setattr(watching.checks, "unfit", lambda *given: unfit if given[4] else {})
    monkeypatch.setattr(watching.writer, "prepare", lambda *given: PreparedSteps(tuple(given[5])))

    def look(at: float, lsn: int) -> PreparedSteps | None:
        monkeypatch.setattr(watching.time, "monotonic", lambda: at)
        return made._prepare(Mock(), before, replace(heir, lsn=lsn))[1]

    assert look(100.0, 10) is None
    prepared = look(110.0, 20)
    assert prepared is not None and {step.oid for step in prepared.steps} == {1, 2} and prepared.lsn == 10
    unfit[2] = Unfit("cannot be followed")
    assert look(120.0, 30) is None
    unfit.clear()
    prepared = look(130.0, 40)
    assert prepared is not None and {step.oid for step in prepared.steps} == {1, 2} and prepared.lsn == 40


@pytest.mark.parametrize("other", [{"timeline": 2}, {"system_identifier": "8"}], ids=str)
def test_another_server_behind_the_connection_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    known = PipelineState()
    known.apply({SLOT: SlotRecord("s", "7", 1, "d", consistent_point=100, oldest_xid=700)})
    made = watch(known=known)
    monkeypatch.setattr(identity, "check_primary", lambda *_: None)
    monkeypatch.setattr(identity, "identify", lambda _: replace(CLUSTER, **other))  # type: ignore[arg-type]
    made._look(None)  # type: ignore[arg-type]
    with pytest.raises(SlotError, match=r"timeline 2|another cluster"):
        made.due(Position(1))


def test_a_password_that_is_refused_beside_the_stream_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is asked only for a table that waits to be taken in; and only a new job gets today's connections."""
    made = watch()
    refused = CredentialsRefused("The schema registry denies access.", "Check user and password.")

    def look(*_: object) -> None:
        raise refused

    monkeypatch.setattr(watching, "session", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(made, "_look", look)
    made.look_now()
    (problem,) = made._problems.all()
    assert problem.kind == "tables-unchecked"
    assert problem.remedy.startswith("Check user and password. If the credentials were changed")
    made._succeeded -= 3600
    made._failed_to_look(refused, True)
    assert made.due(Position(1)) is None


def test_the_partitions_of_years_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A bounded run every five minutes has a new job each time, to which they are all new."""
    made = watch()
    gone = {f"public.p_{day:03}": "is no longer a partition of public.p (detached or dropped)" for day in range(730)}
    now = replace(seen(table(1, "new")), unsent={"public.p": gone, "public.q": {"public.q_1": "was truncated"}})
    with caplog.at_level(logging.WARNING):
        made._tell(PipelineState(), now, [])
        lines = [line for line in caplog.messages if line.startswith("Partitions of")]
        assert len(lines) == 2 and "public.p_000 is no longer" in lines[0] and ", and 727 more." in lines[0]
        assert lines[1].startswith("Partitions of public.q: public.q_1 was truncated. PostgreSQL sends no change")
        caplog.clear()
        made._tell(PipelineState(), replace(now, unsent={"public.p": {**gone, "public.p_new": "was truncated"}}), [])
    (line,) = caplog.messages
    assert line.startswith("Partitions of public.p: public.p_new was truncated. PostgreSQL")
    assert made.unfollowed == ["public.new"]
