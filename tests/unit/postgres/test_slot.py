"""Which slots can be used, and what is advised about one that cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from airflow_bottledwater.errors import BottledWaterError, SlotError, SlotInUse
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.slot import SlotState, check, publications

GOOD = SlotState("orders", "pgoutput", "logical", "shop", None, 0x100, "reserved", 10, 20, None)


@pytest.mark.parametrize(
    "changes", [{}, {"active_pid": 7}, {"wal_status": "extended"}, {"wal_status": "unreserved"}, {"lag": 2**40}]
)
def test_a_slot_of_ours_can_be_used(changes: dict[str, Any]) -> None:
    check(replace(GOOD, **changes), "shop")


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({"slot_type": "physical", "plugin": ""}, SlotError, "uses 'physical', not pgoutput"),
        ({"plugin": "wal2json"}, SlotError, "uses 'wal2json', not pgoutput"),
        ({"database": "other"}, SlotError, "belongs to database 'other', not 'shop'"),
        ({"wal_status": "lost"}, SlotError, r"the WAL that it needs is gone \(max_slot_wal_keep_size\)"),
        ({"invalidated": "idle_timeout"}, SlotError, "nobody read from it for idle_replication_slot_timeout"),
        ({"wal_status": "lost", "invalidated": "idle_timeout"}, SlotError, "nobody read from it"),
        ({"wal_status": "lost", "invalidated": "conflicting"}, SlotError, "the WAL that it needs is gone"),
        ({"invalidated": "a_reason_of_tomorrow"}, SlotError, "was invalidated: a_reason_of_tomorrow"),
        ({"confirmed": 0, "active_pid": 7}, SlotInUse, r"is being created by process 7.*pg_terminate_backend\(7\)"),
        ({"confirmed": 0}, SlotError, "its creation was interrupted.*nothing is lost"),
        ({"two_phase": True}, SlotError, "has two_phase"),
    ],
)
def test_a_slot_that_cannot_be_used_is_refused(
    changes: dict[str, Any], kind: type[BottledWaterError], what: str
) -> None:
    with pytest.raises(kind, match=f"(?s){what}") as refused:
        check(replace(GOOD, **changes), "shop")
    assert type(refused.value) is kind
    assert "'orders'" in refused.value.what


def test_a_slot_that_is_recorded_may_be_the_one_of_a_database_that_was_renamed() -> None:
    with pytest.raises(SlotError, match=r"of the database that is 'other' now: drop it there .*Otherwise choose"):
        check(replace(GOOD, database="other"), "shop", recorded=True)


@pytest.mark.parametrize(
    "changes", [{"plugin": "wal2json"}, {"database": "other"}, {"confirmed": 0, "active_pid": 7}], ids=str
)
def test_nobody_is_told_to_drop_what_is_not_his(changes: dict[str, Any]) -> None:
    with pytest.raises(SlotError) as refused:
        check(replace(GOOD, **changes), "shop")
    assert "rop" not in str(refused.value)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (
            'START_REPLICATION SLOT a LOGICAL 0/0 (proto_version \'1\', publication_names \'"shop","it\'\'s ""x"""\')',
            {"shop", 'it\'s "x"'},
        ),
        (
            "START_REPLICATION SLOT a LOGICAL 0/0 (\"proto_version\" '1', \"publication_names\" 'Shop, b')",
            {"shop", "b"},
        ),
        ("START_REPLICATION SLOT a PHYSICAL 0/0", set()),
        ("SELECT 'publication_names ''a'' '", set()),
        ("<insufficient privilege>", set()),
    ],
)
def test_who_streams_says_with_which_publications(command: str, named: set[str]) -> None:
    assert publications(command) == named


@pytest.mark.parametrize(
    ("version", "exports"), [(140012, True), (140013, False), (150007, True), (160004, False), (180000, False)]
)
def test_a_snapshot_is_exported_only_where_one_of_another_slot_could_be_restored(
    monkeypatch: pytest.MonkeyPatch, version: int, exports: bool
) -> None:
    asked: list[bool] = []

    def make(*_: Any, exports: bool) -> tuple[Any, tuple[str, str, None, str]]:
        asked.append(exports)
        return Mock(), ("orders", "0/100", None, "pgoutput")

    monkeypatch.setattr(slot, "_create", make)
    assert slot.create("", Mock(**{"info.server_version": version}), "orders", timeout=1) == 0x100
    assert asked == [exports]
