"""What a stream reports of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.sampler import OTHERS
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.state.control_records import StatusRecord
from airflow_bottledwater.stream.engine import StreamReport


def test_a_status_has_the_tables_of_which_most_is_left_out_and_the_sum_of_the_others() -> None:
    """A record that has all tables of a large publication would be refused by Kafka, and no heartbeat come any more."""
    status = StatusRecord("streaming", Job.next(None, "stream"))
    controller, watch = SimpleNamespace(status=status), SimpleNamespace(unfollowed=["public.b"])
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
