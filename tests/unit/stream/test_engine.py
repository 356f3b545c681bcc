"""What a stream reports of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from airflow_bottledwater.errors import BeginsAnew, TopicGone
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.sampler import OTHERS
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.state import held
from airflow_bottledwater.state.control_records import StatusRecord
from airflow_bottledwater.state.records import Gap
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.engine import StreamReport, _gaps, _new_gaps
from tests.unit.tables.test_plan import known, table


def test_a_status_has_the_tables_of_which_most_is_left_out_and_the_sum_of_the_others() -> None:
    """A record that has all tables of a large publication would be refused by Kafka, and no heartbeat come any more."""
    status = StatusRecord("streaming", Job.next(None, "stream"))
    controller, watch = SimpleNamespace(status=status), SimpleNamespace(unfollowed=["public.b"], unsent={})
    report = StreamReport(cast(Any, controller), cast(Any, watch), Position(0), Meter())
    skipped = {f"public.t{number}": number for number in range(36_000)}
    report.tell_skipped(skipped)
    shown = dict(status.progress["skipped_by_table"])
    assert sum(shown.values()) == sum(skipped.values())
    assert shown.pop(OTHERS) > 0 and len(shown) == 200 and min(shown.values()) == 35_800
    assert (status.progress["not_followed"], status.progress["tables_not_followed"]) == (["public.b"], 1)
    watch.unfollowed = [f"public.tenant_{number}" for number in range(40_000)]
    report.tell_skipped({"public.a": 1})
    assert (len(status.progress["not_followed"]), status.progress["tables_not_followed"]) == (200, 40_000)
    assert status.progress["skipped_by_table"] == {"public.a": 1}
    watch.unfollowed = ["public.b"]
    watch.unsent = {"public.p": {"public.p_2": "was truncated", "public.p_1": "is gone"}}
    report.tell_skipped({})
    assert status.progress["not_followed"] == ["public.b", "public.p_1", "public.p_2"]
    assert status.progress["tables_not_followed"] == 1, "the table that these were partitions of is followed"


def test_a_table_with_a_gap_is_held_where_a_look_would_not_hide_its_column() -> None:
    """Otherwise its rows would be read again for the gap, and the column be shown."""
    plain, more = Gap("lacks changes"), held.set_aside("a column", "it had another name")
    state = known(table(1, "a"), table(2, "b"), gaps=(1, 2))
    assert not _new_gaps({1: plain, 2: plain}, state.gaps)
    assert _new_gaps({1: more, 2: plain, 3: plain}, state.gaps) == {1: more, 3: plain}
    state.apply(_gaps({1: more, 2: plain}, state))
    assert state.held == {1} and state.gaps[2] == plain
    assert not _new_gaps({1: more, 2: plain}, state.gaps)


def test_a_stream_begins_anew_without_a_topic_since_its_table_may_have_been_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around = MagicMock(__exit__=lambda *_: False)
    for name in ("reported", "stoppable", "Sampler", "guarded", "telling"):
        monkeypatch.setattr(engine, name, lambda *_: around)
    monkeypatch.setattr(
        engine, "_Follower", lambda *_: MagicMock(run=MagicMock(side_effect=TopicGone("Topic 'b' does not exist.")))
    )
    with pytest.raises(BeginsAnew, match="Topic 'b'"):
        engine.follow(MagicMock(), MagicMock())
