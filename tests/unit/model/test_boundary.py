"""Which transactions a snapshot holds."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from airflow_bottledwater.model.boundary import Boundary, Snapshot, widen_xid

WRAP = 2**32


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A snapshot anywhere, often at a wrap of the 32-bit ids."""
    xmin = draw(st.one_of(st.integers(3, 2**40), st.integers(-60, 60).map(lambda d: 5 * WRAP + d)))
    running = sorted(draw(st.sets(st.integers(xmin, xmin + 50), max_size=10)) | {xmin})
    xmax = draw(st.integers(running[-1] + 1, running[-1] + 60))
    return Snapshot(xmin, xmax, tuple(running))


@given(st.integers(WRAP, 2**62), st.integers(-(2**31), 2**31 - 1))
@example(5 * WRAP, -1)
@example(5 * WRAP - 1, 1)
@example(5 * WRAP + 2**31, -(2**31))
def test_an_id_is_widened_to_the_nearest_one(near: int, distance: int) -> None:
    assert widen_xid((near + distance) & 0xFFFFFFFF, near) == near + distance


def test_an_id_from_before_the_wrap_belongs_to_the_epoch_before() -> None:
    assert widen_xid(WRAP - 1, 2 * WRAP + 3) == 2 * WRAP - 1
    assert widen_xid(3, 2 * WRAP - 5) == 2 * WRAP + 3


@given(snapshots(), st.integers(-200, 200))
def test_a_snapshot_sees_what_had_ended_when_it_was_taken(snapshot: Snapshot, distance: int) -> None:
    xid = snapshot.xmax + distance
    ended = {x for x in range(snapshot.xmin - 400, snapshot.xmax) if x not in snapshot.running}
    assert snapshot.sees(xid & 0xFFFFFFFF) == (xid in ended)


@given(snapshots())
def test_a_snapshot_is_printed_as_it_is_parsed(snapshot: Snapshot) -> None:
    assert Snapshot.parse(str(snapshot)) == snapshot


def test_postgresqls_text_of_a_snapshot_is_read() -> None:
    assert Snapshot.parse("10:20:10,14,15") == Snapshot(10, 20, (10, 14, 15))
    assert Snapshot.parse("10:10:") == Snapshot(10, 10, ())


@given(snapshots(), st.integers(0, 2**40), st.integers(-5, 5), st.integers(-100, 100), st.booleans())
def test_a_boundary_contains_what_it_sees_and_what_committed_before_it(
    snapshot: Snapshot, insert_lsn: int, lsn_distance: int, distance: int, filtered: bool
) -> None:
    boundary = Boundary(snapshot, insert_lsn, snapshot.xmin, filtered)
    xid = (snapshot.xmax + distance) & 0xFFFFFFFF
    expected = filtered and lsn_distance < 0 and snapshot.sees(xid)
    assert boundary.contains(insert_lsn + lsn_distance, xid) == expected
