"""The stream's line in the log: what it says, and how seldom."""

from __future__ import annotations

from airflow_bottledwater.metrics.line import ProgressLine
from airflow_bottledwater.metrics.meter import Meter

AT = "0000000007025DB8/00000000"


class Stream:
    """A stream with a clock of the test's own."""

    def __init__(self) -> None:
        self.now, self.published, self.letters, self.meter = 0.0, 0, 0, Meter()
        self.line = ProgressLine(self.meter, lambda: self.now)

    def after(self, seconds: int, rows: int = 0) -> list[str]:
        """The lines of these seconds, in each of which some rows are published."""
        found = []
        for _ in range(seconds):
            self.now, self.published = self.now + 1, self.published + rows
            counters = {"published": self.published, "open_dead_letters": self.letters}
            found.append(self.line.due(AT, counters))
        return [line for line in found if line]


def test_the_line_says_pace_lag_and_dead_letters_and_the_position_last() -> None:
    stream = Stream()
    stream.meter.behind, stream.letters = (1_234_567.0, 75.0), 3
    assert stream.after(11, 12_340) == [f"12,340 rows/s · 1.2 MB and 75 s behind · 3 dead letters · at {AT}"]


def test_a_line_comes_when_something_has_changed_and_every_ten_minutes() -> None:
    stream = Stream()
    stream.meter.behind = (10.0, 0.2)
    assert stream.after(11) == [f"0 rows/s · caught up · at {AT}"]
    assert stream.after(589, 5) == []
    assert stream.after(20, 5) == [f"5 rows/s · caught up · at {AT}"]
    stream.meter.behind = (5e9, 61.0)
    assert stream.after(20, 5) == [f"5 rows/s · 5.0 GB and 61 s behind · at {AT}"]
    stream.meter.behind = (4e9, 700.0)
    assert stream.after(20, 5) == []
    stream.letters = 1
    assert stream.after(20, 5) == [f"5 rows/s · 4.0 GB and 12 min behind · 1 dead letter · at {AT}"]


def test_what_is_not_measured_is_not_said() -> None:
    assert Stream().after(11, 7) == [f"7 rows/s · at {AT}"]
