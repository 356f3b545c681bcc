"""What is said of topics that lack rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from airflow_bottledwater.live.snapshots import LiveSnapshots
from airflow_bottledwater.state.records import LiveProgress, live_key
from tests.unit.tables.test_plan import A, B, known


def _live(state: Any, *, paused: bool, waits_for: str = "", stepped: bool = False) -> LiveSnapshots:
    live: Any = LiveSnapshots.__new__(LiveSnapshots)
    reading = SimpleNamespace(waits_for=waits_for, stepped=stepped)
    live._session = SimpleNamespace(state=state)
    live._requests = SimpleNamespace(open={"r": SimpleNamespace(paused=paused)})
    live._serving, live.lacking = {"r": SimpleNamespace(reading=reading)}, {}
    return live  # type: ignore[no-any-return]


def test_heartbeats_tell_what_lacks_rows_without_the_state_that_the_stream_changes() -> None:
    state = known(A, B)
    state.apply({live_key("r"): LiveProgress((2, 1, 9), done=1, required=True)})
    live = _live(state, paused=True)
    live.lacking = dict(live._lacking(["r"]))
    live._session = None  # type: ignore[assignment]
    assert [(each.subject, "is paused" in each.reason) for each in live.problems] == [("public.a", True), ("9", True)]


def test_what_waited_is_told_by_the_names_of_now_until_it_is_known_whether_it_still_does() -> None:
    state = known(A, B)
    state.apply({live_key("r"): LiveProgress((2, 1), required=True)})
    before = _live(state, paused=False, waits_for="Nobody answers.")
    found = dict(before._lacking(["r"]))
    assert found["r"][:2][0] == ["public.b", "public.a"] and found["r"][1].endswith("waits: Nobody answers.")
    state.apply({live_key("r"): LiveProgress((2, 1), done=1, required=True)})
    live = _live(state, paused=False)
    live.lacking = found
    assert dict(live._lacking(["r"])) == {"r": (["public.a"], *found["r"][1:])}
    live = _live(state, paused=False, stepped=True)
    live.lacking = found
    assert not dict(live._lacking(["r"]))
