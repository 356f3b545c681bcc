"""What is counted, and how it is read: in memory, without a server."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.metrics import batch, registry
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.points import points
from airflow_bottledwater.metrics.prometheus import collector
from airflow_bottledwater.metrics.registry import DELAY_SECONDS, SECONDS
from airflow_bottledwater.metrics.sample import Distribution, Labelled, Sample, decode
from airflow_bottledwater.metrics.source import Age
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.pgoutput import DELETE, INSERT, UPDATE
from airflow_bottledwater.state.control_records import StatusRecord, VerifiedRecord, encode, status_key, verified_key

NAME = "7/shop/cdc"


def changes(*of: tuple[int, int, int, float]) -> np.ndarray:
    """Changes, each with its relation, kind, LSN and commit time in seconds."""
    found = np.zeros(len(of), dtype=CHANGE)
    for i, (relation, kind, lsn, at) in enumerate(of):
        found[i]["relation"], found[i]["kind"], found[i]["lsn"], found[i]["time"] = relation, kind, lsn, at * 1000
    return found


def versions(*names: str) -> list[Version]:
    return [Version(SourceTable(i, "public", name, (), (), "d"), name) for i, name in enumerate(names)]


def test_a_batch_is_counted_by_table_and_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch.time, "time", lambda: 100.0)
    meter = Meter()
    meter.ahead = 2.0
    of = changes((0, INSERT, 1, 101.0), (0, INSERT, 1, 101.0), (1, UPDATE, 2, 101.5), (0, DELETE, 3, 103.0))
    # one was rejected; the change of a key is two records
    batch.count(meter, of, versions("a", "b"), np.array([3, 0, 2, 2]))
    values, distributions = meter.counted()
    assert {each.labels: each.value for each in values["rows"]} == {
        ("public.a", "insert"): 1, ("public.b", "update"): 1, ("public.a", "delete"): 1
    }  # fmt: skip
    assert {each.labels: each.value for each in values["last_change_timestamp_seconds"]} == {
        ("public.a",): 103.0, ("public.b",): 101.5
    }  # fmt: skip
    # three transactions, committed 1, 0.5 and (by clocks that cannot be told apart) -1 seconds before 102
    delays = distributions[DELAY_SECONDS.name]
    assert delays.sum == 1.5 and sum(delays.counts) == 3
    assert [SECONDS[i] for i, count in enumerate(delays.counts) if count] == [0.005, 0.5, 1.0]
    assert meter.committed == 103.0


def test_no_delay_is_counted_before_the_clocks_are_compared() -> None:
    meter = Meter()
    batch.count(meter, changes((0, INSERT, 1, 5.0)), versions("a"), np.array([0]))
    batch.count(meter, changes(), versions("a"), np.array([], dtype=np.int64))
    assert meter.counted()[1] == {}


def test_durations_are_counted_in_buckets() -> None:
    meter = Meter()
    for seconds in (0.0, 0.005, 0.0051, 5000.0):
        meter.observe(registry.COMMIT_SECONDS, seconds)
    found = meter.counted()[1]["commit_duration_seconds"]
    assert (found.counts[0], found.counts[1], found.counts[-1]) == (2, 1, 1)
    assert math.isclose(found.sum, 5000.0101)


def test_a_sample_is_read_as_it_was_written() -> None:
    sample = Sample("7/d/s", "s", "j", "stream", "streaming", 1.0, 2.0, 10.0, {"rows": [Labelled(3, ("t", "insert"))]})
    assert decode(sample.encode()) == sample
    assert [decode(each) for each in (None, b"", b"{}", b"[1]", b"\xff")] == [None] * 5


def test_the_lag_in_seconds_is_the_time_since_the_wal_was_beyond_what_is_published() -> None:
    now = 0.0
    age = Age(lambda: now)
    assert age.behind(100, 100) == 0
    now = 10.0
    assert age.behind(100, 300) == 10  # nothing is known between 0 and 10
    now = 20.0
    assert age.behind(200, 500) == 15  # the WAL was at 200 in the middle between 0 and 10
    now = 30.0
    assert age.behind(500, 500) == 0
    now = 40.0
    assert age.behind(500, 501) == 10


def test_the_lag_grows_while_the_host_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = [0.0]
    monkeypatch.setattr("time.clock_gettime", lambda clock: slept[0] if clock == time.CLOCK_BOOTTIME else 0.0)
    age = Age()
    assert age.behind(100, 300) == 0
    slept[0] = 5 * 3600.0
    assert age.behind(100, 300) == 5 * 3600


def test_a_lag_from_before_the_job_is_told_by_the_last_commit() -> None:
    now = 0.0
    age = Age(lambda: now)
    assert age.behind(100, 900) == 0
    now = 10.0
    assert age.behind(200, 900) == 10
    assert age.behind(300, 900, committed_ago=3600.0) == 3600


@pytest.mark.parametrize("interval", [0.1, 1.0, 10.0])
def test_however_long_nothing_is_published_the_lag_in_seconds_grows(interval: float) -> None:
    now = 0.0
    age, looks = Age(lambda: now), 5000
    for number in range(looks):
        now = number * interval
        assert age.behind(5, 10 + number) == pytest.approx(now)
    # half of it is published then: the age is as exact as there are looks left
    assert age.behind(10 + looks // 2, 10 + looks) == pytest.approx(now / 2, rel=0.02)
    assert len(age._ends) <= 361


def read(samples: dict[str, Sample], records: dict[str, object], now: float = 1000.0) -> dict[tuple[str, str], float]:
    """What Prometheus reads, by name and the labels that are not the pipeline's."""
    text = generate_latest(collector(lambda: points(samples, records, now))).decode()
    return {
        (
            each.name,
            ",".join(f"{k}={v}" for k, v in sorted(each.labels.items()) if k not in ("system", "database", "slot")),
        ): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.labels == {**each.labels, "system": "7", "database": "shop", "slot": "cdc"}
    }


def status(**more: object) -> dict[str, object]:
    more = {"state": "streaming", "job": Job(4, "j", "stream", "h", 5, 900.0), "slot": "cdc", "at": 999.0, **more}
    record = StatusRecord(**more)  # type: ignore[arg-type]
    return {status_key(NAME): encode(record)}


def sample(at: float = 995.0) -> Sample:
    counts = [1, 2, *[0] * (len(SECONDS) - 2), 3]
    values = {
        "rows": [Labelled(3, ("t", "insert"))], "lag_bytes": [Labelled(7)], "of_a_later_version": [Labelled(1, ("x",))],
        "problems": [Labelled(1, ("x",))],
    }  # fmt: skip
    return Sample(
        NAME, "cdc", "j", "stream", "streaming", 900.0, at, 10.0, values, {"delay_seconds": Distribution(counts, 9.0)}
    )


def test_prometheus_gets_samples_and_what_the_shared_topic_says() -> None:
    records = {
        **status(
            problems=[Problem("throttled", "t", "r"), Problem("throttled", "u", "r")], counters={"open_dead_letters": 2}
        ),
        verified_key(NAME): encode(VerifiedRecord(5, ("a",), (), 940.0)),
    }
    found = read({NAME: sample()}, records)
    assert found["bottledwater_rows_total", "operation=insert,table=t"] == 3
    assert found["bottledwater_lag_bytes", ""] == 7
    assert found["bottledwater_delay_seconds_bucket", "le=0.005"] == 1
    assert found["bottledwater_delay_seconds_bucket", "le=0.01"] == 3
    assert found["bottledwater_delay_seconds_bucket", "le=1800.0"] == 3
    assert found["bottledwater_delay_seconds_bucket", "le=+Inf"] == found["bottledwater_delay_seconds_count", ""] == 6
    assert found["bottledwater_delay_seconds_sum", ""] == 9
    assert found["bottledwater_state", "state=streaming"] == 1 and found["bottledwater_state", "state=failed"] == 0
    assert found["bottledwater_problems", "kind=throttled"] == 2
    assert found["bottledwater_open_dead_letters", ""] == 2
    assert found["bottledwater_last_report_age_seconds", ""] == 1
    assert found["bottledwater_read_timestamp_seconds", ""] == 1000
    assert found["bottledwater_verified_age_seconds", ""] == 60
    assert found["bottledwater_verified_tables", "result=different"] == 1


def test_what_a_bounded_run_has_left_and_that_none_can_begin_is_seen_between_runs() -> None:
    found = read({}, status(problems=[Problem("set-aside", "t", "r")], state="finished"))
    assert found["bottledwater_problems", "kind=set-aside"] == 1 and found["bottledwater_state", "state=finished"] == 1
    found = read({}, status(problems=[Problem("set-aside", "t", "r")], state="stopped"))
    assert ("bottledwater_problems", "kind=set-aside") not in found
    found = read({}, status(state="finished", error="The slot is lost."))
    assert (found["bottledwater_state", "state=failed"], found["bottledwater_state", "state=finished"]) == (1, 0)
    # a stream has to follow a snapshot, which is no bounded run
    found = read({}, status(state="finished", job=Job(4, "j", "snapshot", "h", 5, 900.0)))
    assert (found["bottledwater_state", "state=snapshot"], found["bottledwater_state", "state=finished"]) == (1, 0)


def test_what_a_dead_job_measured_does_not_look_like_the_present() -> None:
    found = read({NAME: sample(at=969.0)}, status())
    assert ("bottledwater_lag_bytes", "") not in found
    assert found["bottledwater_wanted", ""] == 1
