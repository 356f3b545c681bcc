"""Ranges of changes: what is in which."""

from __future__ import annotations

import json

import pytest

from airflow_bottledwater.model.changes import ChangeRange, TopicRange


def changes(lsns: tuple[int, int], start: tuple[int, ...], end: tuple[int, ...], topic_id: str = "i") -> ChangeRange:
    return ChangeRange("1/d/s", *lsns, {"public.a": TopicRange("p.a", topic_id, start, end)})


FIRST, SECOND = changes((10, 20), (0, 5), (4, 9)), changes((20, 30), (4, 9), (7, 9))


def test_a_range_is_json_and_can_be_made_again() -> None:
    event = FIRST.as_event()
    assert ChangeRange.of_event(json.loads(json.dumps(event))) == FIRST
    assert (event["from"], event["to"], event["records"]) == ("0/A", "0/14", 8)
    for wrong in ({}, {**event, "tables": {"a": 1}}, {**event, "from": 5}, {**event, "from": "x"}):
        with pytest.raises(ValueError, match=r"LSN|no range"):
            ChangeRange.of_event(wrong)


def test_what_earlier_ranges_have_is_left_out() -> None:
    assert SECOND.without([]) == SECOND == SECOND.without([FIRST])
    # one that came twice, one that came too late, one that begins too early
    assert FIRST.without([FIRST]).empty
    assert FIRST.without([FIRST, SECOND]) == changes((20, 20), (4, 9), (4, 9))
    assert changes((10, 30), (0, 5), (7, 9)).without([FIRST]) == SECOND
    # ends of another topic of this name are not its
    assert FIRST.without([changes((0, 50), (0, 0), (99, 99), "other")]).records == FIRST.records
    # a partition that the topic did not have then
    assert changes((10, 30), (0, 5, 0), (7, 9, 3)).without([FIRST]).tables["public.a"].start == (4, 9, 0)


def test_ranges_that_follow_each_other_are_one() -> None:
    assert FIRST.joined(SECOND) == changes((10, 30), (0, 5), (7, 9))
    assert ChangeRange().joined(FIRST) == FIRST
    with_more = ChangeRange("1/d/s", 20, 30, {**SECOND.tables, "public.b": TopicRange("p.b", "j", (0,), (2,))})
    joined = FIRST.joined(with_more)
    assert joined.tables["public.b"].start == (0,) and joined.records == 13
    # a topic that was made again begins anew
    assert FIRST.joined(changes((20, 30), (0, 0), (1, 1), "again")).records == 2


def test_ranges_of_several_pipelines_are_one_unless_their_tables_have_the_same_names() -> None:
    other = ChangeRange("2/d/s", 5, 6, {"public.b": TopicRange("q.b", "k", (1,), (3,))})
    assert FIRST.joined(other) == ChangeRange("2/d/s", 5, 6, {**FIRST.tables, **other.tables})
    # as after an upgrade of the server: the pipeline has another name, and goes on in the same topic
    upgraded = ChangeRange("2/d/s", 5, 6, SECOND.tables)
    assert FIRST.joined(upgraded).tables == FIRST.joined(SECOND).tables
    # so does a table that was renamed, and another one has its name now
    swapped = {"public.b": SECOND.tables["public.a"], "public.a": TopicRange("p.new", "n", (0,), (2,))}
    joined = FIRST.joined(ChangeRange("1/d/s", 20, 30, swapped))
    assert joined.tables == {"public.b": FIRST.joined(SECOND).tables["public.a"], "public.a": swapped["public.a"]}
    with pytest.raises(ValueError, match=r"public\.a is in topic p\.a and in topic q\.a"):
        FIRST.joined(ChangeRange("2/d/s", 5, 6, {"public.a": TopicRange("q.a", "k", (1,), (3,))}))


def test_spark_reads_the_same_offsets() -> None:
    options = FIRST.spark_options("public.a")
    assert json.loads(options["assign"]) == {"p.a": [0, 1]} and options["kafka.isolation.level"] == "read_committed"
    assert json.loads(options["startingOffsets"]) == {"p.a": {"0": 0, "1": 5}}
    assert json.loads(options["endingOffsets"]) == {"p.a": {"0": 4, "1": 9}}
    assert FIRST.spark_options("public.b")["assign"] == "{}"
