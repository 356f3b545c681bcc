"""What is reported of a live snapshot: its progress, pace and remaining time are right, or absent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.live import report
from airflow_bottledwater.live.remaining import BLOCK, SWEEPING, RemainingSize
from airflow_bottledwater.live.report import Reports
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import SnapshotReport, decode
from airflow_bottledwater.state.records import LiveProgress


class Told:
    """The reports on one live snapshot of tables 1, which has 10 blocks, and 2, whose partitions 3 and 4 have 6 and 4,
    by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.written = 1000.0, list[SnapshotReport]()
        monkeypatch.setattr(report.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(report.ControlTopic, "of", lambda _: SimpleNamespace(write=self._write))
        self.reports = Reports(Settings.of(postgres="host=db"), "pipeline")
        self.reading = self.new_reading()

    def new_reading(self, *tables: int) -> Any:
        extent, sizes = RemainingSize(), {1: {1: (77, 10)}, 2: {3: (77, 6), 4: (77, 4)}}
        extent._parts = {oid: sizes[oid] for oid in tables or sizes}
        return SimpleNamespace(extent=extent, waits_for="")

    def _write(self, records: dict[str, Any], wait: float) -> None:
        (raw,) = records.values()
        found = decode(SnapshotReport, raw)
        assert found is not None
        self.written.append(found)

    def tell(self, state: str, *, seconds: float = 60.0, reading: Any = "its own", **progress: Any) -> SnapshotReport:
        self.now += seconds
        self.reports.tell(
            "id", state, LiveProgress((1, 2), **progress), self.reading if reading == "its own" else reading
        )
        return self.written[-1]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_progress_and_remaining_time_are_of_all_tables(told: Told) -> None:
    first = told.tell("reading")
    assert (first.total_bytes, first.seconds_left, first.rows_per_second) == (20 * BLOCK, None, 0.0)
    found = told.tell("reading", seconds=10, part=1, filenode=77, upto=5, rows=100, bytes=5 * BLOCK)
    assert (found.bytes, found.total_bytes) == (5 * BLOCK, 20 * BLOCK)
    assert (found.rows_per_second, found.seconds_left) == (10.0, 30.0)
    found = told.tell("reading", seconds=30, done=1, read={3: 77}, part=4, filenode=77, upto=1, bytes=17 * BLOCK)
    assert (found.total_bytes, found.seconds_left) == (20 * BLOCK, pytest.approx(3 / 17 * 40))


def test_a_job_that_goes_on_knows_what_is_left_and_has_its_own_pace(told: Told) -> None:
    # it has not seen the first table
    told.reading = told.new_reading(2)
    told.tell("reading", done=1, part=3, filenode=77, upto=2, rows=1000, bytes=12 * BLOCK)
    found = told.tell("reading", seconds=2, done=1, part=3, filenode=77, upto=4, rows=1010, bytes=14 * BLOCK)
    assert (found.total_bytes, found.rows_per_second, found.seconds_left) == (20 * BLOCK, 5.0, 6.0)


def test_a_table_that_is_read_again_from_its_start_is_not_done_early(told: Told) -> None:
    told.tell("reading", part=1, filenode=77, upto=8, bytes=8 * BLOCK)
    found = told.tell("reading", part=1, filenode=76, upto=8, bytes=8 * BLOCK)
    assert found.total_bytes == (8 + 20) * BLOCK
    found = told.tell("reading", part=1, filenode=77, upto=2, bytes=10 * BLOCK)
    assert found.total_bytes == (10 + 18) * BLOCK


def test_sizes_that_are_not_known_are_not_reported(told: Told) -> None:
    told.reading = told.new_reading(1)
    told.tell("reading")
    found = told.tell("reading", part=1, filenode=77, upto=5, rows=60, bytes=5 * BLOCK)
    assert (found.total_bytes, found.seconds_left, found.rows_per_second) == (0, None, 1.0)


def test_inside_a_table_that_is_read_by_key_nothing_is_known(told: Told) -> None:
    told.tell("reading")
    found = told.tell("reading", filenode=4711, key=("5",), rows=60)
    assert (found.total_bytes, found.seconds_left, found.rows_per_second) == (0, None, 1.0)
    assert told.tell("reading", done=1, rows=90, bytes=10 * BLOCK).total_bytes == 20 * BLOCK


@pytest.mark.parametrize("state", ["paused", "cancelled", "failed"])
def test_one_of_which_nothing_is_read_has_no_pace_and_no_remaining_time(told: Told, state: str) -> None:
    told.tell("reading")
    told.tell("reading", part=1, filenode=77, upto=5, rows=100, bytes=5 * BLOCK)
    found = told.tell(state, reading=None, part=1, filenode=77, upto=5, rows=100, bytes=5 * BLOCK)
    assert (found.total_bytes, found.rows_per_second, found.seconds_left) == (0, 0.0, None)


def test_what_waits_has_no_pace(told: Told) -> None:
    told.tell("reading")
    told.reading.waits_for = "a lock"
    found = told.tell("reading", part=1, filenode=77, upto=5, rows=100, bytes=5 * BLOCK)
    assert (found.state, found.what, found.rows_per_second, found.seconds_left) == ("waiting", "a lock", 0.0, None)


def test_a_pause_does_not_count_for_the_pace(told: Told) -> None:
    told.tell("reading")
    told.tell("paused", reading=None, seconds=1000, part=1, filenode=77, upto=5, rows=100, bytes=5 * BLOCK)
    told.reading = told.new_reading()
    told.tell("reading", part=1, filenode=77, upto=5, rows=100, bytes=5 * BLOCK)
    found = told.tell("reading", seconds=10, part=1, filenode=77, upto=10, rows=200, bytes=10 * BLOCK)
    assert (found.rows_per_second, found.seconds_left) == (10.0, 20.0)


def test_the_sweep_has_progress_but_no_pace(told: Told) -> None:
    told.tell("reading")
    found = told.tell("sweeping", filenode=SWEEPING, rows=500, bytes=10 * BLOCK)
    assert (found.total_bytes, found.rows_per_second, found.seconds_left) == (20 * BLOCK, 0.0, None)


def test_what_has_finished_is_whole(told: Told) -> None:
    found = told.tell("finished", reading=None, done=2, rows=500, bytes=20 * BLOCK)
    assert (found.bytes, found.total_bytes, found.rows_per_second) == (20 * BLOCK, 20 * BLOCK, 0.0)


def test_a_report_names_so_many_tables_that_it_fits_into_a_record(told: Told) -> None:
    tables: Any = {n: SimpleNamespace(table=SimpleNamespace(qualified=f"public.t{n}")) for n in range(2000)}
    told.reports.tell("other", "sweeping", LiveProgress(tuple(tables)), None, tables)
    assert told.written[-1].tables == [*(f"public.t{n}" for n in range(500)), "and 1,500 others"]
