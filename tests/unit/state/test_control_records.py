"""The codec of the shared topic's records: what is written, and what is none of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.state.control_records import (
    ControlRecord,
    OwnerRecord,
    SnapshotRequest,
    StatusRecord,
    StoppedBy,
    StopRequest,
    TableRequest,
    check,
    decode,
    encode,
    is_below,
    owner_key,
    request_key,
    snapshot_key,
    snapshots_prefix,
    status_key,
    topic_owned,
)

JOB = {"epoch": 3, "id": "5f1c", "kind": "stream", "host": "h", "pid": 17, "started": 1700000000.5, "owner": None}

#: each record as it is written
STATUS = {
    "state": "streaming", "job": JOB, "slot": "orders", "on_error": "exit",
    "position": "00000000016B3748/0000000C", "counters": {"published": 7, "dead_letters": 0},
    "progress": {"skipped_by_table": {"public.a": 2}, "not_followed": ["public.b"]}, "problems": [], "error": "",
    "permanent": False, "retired": False,
    "stopped_by": "", "first": 0.0, "began": "", "behind_since": 0.0, "repeats": 0, "pressure": {}, "guard": [],
    "at": 1700000001.25, "heartbeat": 2.0,
}  # fmt: skip
REQUEST = {"by": "request", "epoch": 3, "pipeline": "", "retire": True, "interrupted": 0, "at": 1700000002.5}
OWNER = {"pipeline": "7301/shop/orders", "at": 1700000003.0, "dropped": False, "shared": False}

RECORDS: list[tuple[dict[str, Any], ControlRecord]] = [
    (
        STATUS,
        StatusRecord(
            "streaming",
            Job(3, "5f1c", "stream", "h", 17, 1700000000.5),
            slot="orders",
            on_error="exit",
            position="00000000016B3748/0000000C",
            counters={"published": 7, "dead_letters": 0},
            progress={"skipped_by_table": {"public.a": 2}, "not_followed": ["public.b"]},
            at=1700000001.25,
        ),
    ),
    (REQUEST, StopRequest("request", 3, retire=True, at=1700000002.5)),
    (OWNER, OwnerRecord("7301/shop/orders", 1700000003.0)),
]


@pytest.mark.parametrize(("raw", "record"), RECORDS, ids=["status", "request", "owner"])
def test_what_is_written_is_read_again(raw: dict[str, Any], record: ControlRecord) -> None:
    # to the byte: with the same order of the fields
    assert json.dumps(encode(record)) == json.dumps(raw)
    assert decode(type(record), json.loads(json.dumps(raw))) == record


@pytest.mark.parametrize(("raw", "record"), RECORDS, ids=["status", "request", "owner"])
def test_a_field_that_is_not_known_is_left_out(raw: dict[str, Any], record: ControlRecord) -> None:
    assert decode(type(record), {**raw, "added": {"later": 1}}) == record


def test_what_is_missing_has_its_default() -> None:
    assert decode(StatusRecord, {"state": "starting", "job": JOB}) == StatusRecord("starting", Job(**JOB))  # type: ignore[arg-type]
    assert decode(StopRequest, {"by": "task", "epoch": 6}) == StopRequest("task", 6)
    assert "at" not in encode(StopRequest("task", 6))
    assert decode(OwnerRecord, {"pipeline": "p"}) == OwnerRecord("p")


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (StatusRecord, None),
        (StatusRecord, {}),
        (StatusRecord, {"state": "stopped", "retired": True}),
        (StatusRecord, {**STATUS, "job": "x"}),
        (StatusRecord, {**STATUS, "job": {"epoch": 3}}),
        (StatusRecord, {**STATUS, "job": {**JOB, "epoch": "3"}}),
        (StatusRecord, {**STATUS, "state": None}),
        (StatusRecord, {**STATUS, "counters": {"published": "many"}}),
        (StatusRecord, {**STATUS, "at": 10**400}),
        (StatusRecord, REQUEST),
        (StopRequest, {}),
        (StopRequest, {**REQUEST, "epoch": "all"}),
        (StopRequest, {**REQUEST, "epoch": True}),
        (StopRequest, {**REQUEST, "by": ""}),
        (StopRequest, {**REQUEST, "at": "now"}),
        (OwnerRecord, {}),
        (OwnerRecord, {"pipeline": 7}),
    ],
)
def test_what_is_none_of_ours_is_as_if_it_were_not_there(kind: type[ControlRecord], raw: dict[str, Any] | None) -> None:
    assert decode(kind, raw) is None


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (TableRequest((1,), True, "ann", 4711), "why"),  # type: ignore[arg-type]
        (SnapshotRequest(("a",), 2024), "where"),  # type: ignore[arg-type]
        (SnapshotRequest(("a", 5)), "tables"),  # type: ignore[arg-type]
    ],
)
def test_what_would_not_be_read_is_refused_before_it_is_written(request_: ControlRecord, wrong: str) -> None:
    assert decode(type(request_), encode(request_)) is None
    with pytest.raises(Refused, match=rf"No job could read this {type(request_).__name__}: .*{wrong}"):
        check(request_)
    check(TableRequest((1,), True, "ann", "4711"))
    check(SnapshotRequest(("a",), "day = 1"))


@pytest.mark.parametrize(
    ("state", "permanent", "ended", "ended_in_order", "failed", "over"),
    [
        ("starting", False, False, False, False, False),
        ("snapshot", False, False, False, False, False),
        ("streaming", False, False, False, False, False),
        ("stopped", False, True, True, False, True),
        ("finished", False, True, True, False, True),
        ("failed", False, True, False, True, False),
        ("failed", True, True, False, True, True),
    ],
)
def test_which_states_are_a_jobs_last(
    state: str, permanent: bool, ended: bool, ended_in_order: bool, failed: bool, over: bool
) -> None:
    found = StatusRecord(state, Job(**JOB), permanent=permanent)  # type: ignore[arg-type]
    assert (found.ended, found.ended_in_order, found.failed, found.over) == (ended, ended_in_order, failed, over)


def test_keys() -> None:
    assert (status_key("1/d/s"), request_key("1/d/s")) == ("status/1/d/s", "request/1/d/s")
    assert owner_key("shop.a", "1/d/s") == "owner/shop.a/1/d/s"
    assert topic_owned("owner/shop.a/1/d/s") == topic_owned("owner/shop.a/1/d/s", "1/d/s") == "shop.a"
    assert not topic_owned("owner/shop.a/1/d/s", "1/d/t") and not topic_owned("owner/shop.a/1/d/s", "d/s")
    for foreign in ("status/1/d/s", "owner", "owner/", "owner/shop.a", "owner/shop.a/"):
        assert topic_owned(foreign) == topic_owned(foreign, "1/d/s") == ""


@pytest.mark.parametrize(
    ("stopped_by", "retired", "over", "wanted"),
    [
        ("", False, True, True),
        # nobody has asked the pipeline to stop
        ("task", False, True, True),
        ("replacement", False, False, True),
        ("request", False, True, False),
        ("task", True, True, False),
    ],
)
def test_who_has_stopped_a_job_says_whether_another_one_follows_and_is_wanted(
    stopped_by: StoppedBy, retired: bool, over: bool, wanted: bool
) -> None:
    found = StatusRecord("stopped", Job(**JOB), stopped_by=stopped_by, retired=retired)  # type: ignore[arg-type]
    assert (found.over, found.wanted) == (over, wanted)


def test_a_pipeline_hears_no_requests_to_one_whose_databases_name_begins_like_it() -> None:
    prefix = snapshots_prefix("7/app/shop")
    assert is_below(prefix, snapshot_key("7/app/shop", "5f1c"))
    assert not is_below(prefix, snapshot_key("7/app/shop/eu", "5f1c"))
    assert not is_below(prefix, snapshot_key("7/app/shop2", "5f1c"))
