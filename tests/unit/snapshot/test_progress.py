"""How far a snapshot is, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.postgres.snapshot import LAST_BLOCK
from airflow_bottledwater.snapshot import progress
from airflow_bottledwater.snapshot.progress import SnapshotMeter, SnapshotProgress
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Plan, Progress, plan_key, progress_key
from tests.support import wire as w

LARGE = replace(w.table(("id", w.plain(w.INT4)), oid=1), name="large", pages=100)
SMALL = replace(w.table(("id", w.plain(w.INT4)), oid=2), name="small", pages=0)


def state(*done: tuple[int, int, Progress]) -> PipelineState:
    found = PipelineState()
    found.apply(
        {
            plan_key(1): Plan(1, "", ((0, 40, 0), (40, LAST_BLOCK, 1))),
            plan_key(2): Plan(2, "", ((0, LAST_BLOCK, 0),)),
            **{progress_key(oid, number): record for oid, number, record in done},
        }
    )
    return found


FIRST = (1, 0, Progress(4000, 40, True, 0, 1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, to be moved by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_progress_is_measured_by_blocks_and_the_pace_is_of_this_attempt(clock: list[float]) -> None:
    meter = SnapshotMeter([LARGE, SMALL], state(FIRST))
    clock[0] += 10
    # half a range, and no more than the table has
    found = meter.update(state(FIRST, (1, 1, Progress(2000, 70, False, 1, 2))))
    assert found == SnapshotProgress(6000, 1, 70 * 8192, 100 * 8192, 200.0, 10.0)
    clock[0] += 10
    whole = state(FIRST, (1, 1, Progress(5000, LAST_BLOCK, True, 1, 2)), (2, 0, Progress(3, LAST_BLOCK, True, 0, 2)))
    found = meter.update(whole)
    assert (found.rows, found.bytes, found.total_bytes, found.seconds_left) == (9003, 100 * 8192, 100 * 8192, 0.0)


def test_nothing_is_promised_before_anything_is_done(clock: list[float]) -> None:
    meter = SnapshotMeter([LARGE], state())
    clock[0] += 5
    assert meter.update(state()).seconds_left is None


def test_a_line_now_and_then_and_a_summary_by_table(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    meter = SnapshotMeter([SMALL, LARGE], state(FIRST))
    clock[0] += 9
    meter.update(state(FIRST))
    assert caplog.messages == []
    clock[0] += 1
    meter.update(state(FIRST, (1, 1, Progress(2000, 70, False, 1, 2))))
    assert caplog.messages == ["Snapshot: 6,000 rows (200 a second), 573 kB of 819 kB, about 10 s left."]
    caplog.clear()
    meter.sum_up(state(FIRST, (1, 1, Progress(6000, LAST_BLOCK, True, 1, 2))), 3)
    assert caplog.messages == [
        "Snapshot of 2 tables: 6,000 rows and 3 dead letters, 492 kB in 10 s (600 rows a second); 4,000 rows were "
        "there before.",
        "  public.large          10,000 rows     819 kB",
        "  public.small               0 rows        0 B",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.04, "40 ms"), (9.94, "9.9 s"), (99, "99 s"), (100, "2 min"), (5999, "100 min"), (7200, "2.0 h")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (8192, "8.2 kB"), (819200, "819 kB"), (10**12, "1.0 TB"), (10**16, "10000 TB")],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert progress.size(count) == text
