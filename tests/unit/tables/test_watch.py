"""When what is prepared for the tables may be carried out."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import replace

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Refused, SlotError
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import identity
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.state.records import SLOT
from airflow_bottledwater.tables import watch as watching
from airflow_bottledwater.tables.watch import TableWatch
from airflow_bottledwater.tables.writer import PreparedSteps
from tests.unit.tables.test_plan import seen, table

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
