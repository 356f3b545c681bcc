"""Which dead letters are a pipeline's, and which of them patterns of tables mean."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.provision.letters import LetterPosition, LettersTopic
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Letters, encode, letters_key


def _table(schema: str, name: str) -> Any:
    return SimpleNamespace(table=SimpleNamespace(schema=schema, name=name, qualified=f"{schema}.{name}"))


TABLES = {1: _table("a", "t"), 2: _table("a.b", "t"), 3: _table("a", "b.t"), 5: _table("a.b", "renamed")}


@pytest.mark.parametrize(
    ("pattern", "meant"), [("a.*", {1, 3}), ("a.b.*", {2, 4, 5}), ("a.t", {1}), ("a.b.t", {2, 3, 4, 5})]
)
def test_a_schema_or_a_table_may_have_a_dot_in_its_name(pattern: str, meant: set[int]) -> None:
    topic = object.__new__(LettersTopic)
    topic._publishing = SimpleNamespace(state=SimpleNamespace(tables=TABLES))  # type: ignore[assignment]
    relations = {1: "a.t", 2: "a.b.t", 3: "a.b.t", 4: "a.b.t", 5: "a.b.t"}
    places = [LetterPosition((0, 0), "", b"", 1, "", relation, oid) for oid, relation in relations.items()]
    assert {each.oid for each in places if topic._meant(each.oid, each.relation, [pattern])} == meant


def test_what_is_no_dead_letter_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the topic, too, also under the key of a dead letter."""
    letter = {"pipeline": "7/d/s", "relation": "a.t", "oid": 1, "op": "c", "pos": "0/1", "by": "stream", "error": "bad"}
    ours, others, earlier = (json.dumps({**letter, "pipeline": f"{of}/d/s"}).encode() for of in (7, 8, 6))
    records = [
        (b"1", ours),
        (b"2", b"not json"),
        (b"3", b"{}"),
        (b"4", others),
        (b"5", ours),
        (b"5", b"\xff"),
        (b"6", b""),
        (b"7", earlier),
    ]

    class Block(list[Any]):
        messages = np.zeros(len(records), dtype=[("partition", int), ("offset", int)])

        def key(self, number: int) -> bytes:
            return records[number][0]

        def value(self, number: int) -> bytes:
            return records[number][1]

    topic = object.__new__(LettersTopic)
    topic._name, topic._topic = "7/d/s", "letters"
    # it was of another cluster before, which was upgraded for example
    counts = {letters_key(1, "stream"): encode(Letters("a.t", 1, 0, "letters", "6/d/s"))}
    topic._publishing = SimpleNamespace(state=PipelineState(counts))  # type: ignore[assignment]
    monkeypatch.setattr(topic, "blocks", lambda name: [Block(records)])
    monkeypatch.setattr(topic, "_reconcile", lambda places: None)
    assert [place.key for place in topic.places()] == [b"1", b"7"]


def test_only_the_part_of_the_topic_is_read_that_has_the_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"oid": 1, "schema": "a", "name": "t", "identity": "d", "key": [], "columns": []}
    value = json.dumps({"pos": "", "again": {"table": table, "topic": "t", "message": "", "lsn": 5}, "columns": {}})
    kind = [("partition", int), ("offset", int)]
    asked: list[Any] = []

    class Block(list[Any]):
        messages = np.array([(2, 4), (2, 5), (0, 7), (2, 9)], dtype=kind)

        def value(self, number: int) -> bytes:
            return value.encode()

    topic = object.__new__(LettersTopic)
    topic._topic, topic._tables = "letters", {}
    topic._publishing = SimpleNamespace(partitions={"letters": 3})  # type: ignore[assignment]
    monkeypatch.setattr(topic, "start", lambda _: [0, 0, 9])
    monkeypatch.setattr(topic, "blocks", lambda *of: [asked.append(of), Block(range(4))][1:])
    places = [LetterPosition(at, "", b"%d" % at[1], 1, "", "a.t", 1) for at in [(2, 9), (0, 7), (2, 4)]]
    found = topic.read(places)
    assert asked == [("letters", [7, 0, 4], [8, 0, 10])]
    assert [(each.key, each.earlier) for each in found] == [(b"9", False), (b"7", False), (b"4", True)]
    assert found[0].version.topic == "t" and found[0].table is found[1].table, "one object for all letters of a table"
    assert "columns" not in found[0].content


def test_what_matches_nothing_dismisses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is mistyped would settle nothing, and be green."""
    state = PipelineState({letters_key(9, "stream"): encode(Letters("b.gone", 3, 3))})
    topic = object.__new__(LettersTopic)
    places = [LetterPosition((0, 0), "", b"", 1, letters_key(8, "stream"), "b.dropped", 8)]
    topic._publishing = SimpleNamespace(state=SimpleNamespace(tables=TABLES, letters=state.letters))  # type: ignore[assignment]
    monkeypatch.setattr(topic, "places", lambda: places)
    for wrong in ["ordres", "a.*x", "!ordres", "dropped"]:
        with pytest.raises(SettingError, match="of tables that the pipeline has"):
            topic.dismiss(["a.t", wrong])
    assert topic.dismiss(["a.t", "!a.b.t", "b.gone"]) == 0, "known, and without open dead letters"


def test_letters_of_another_topic_prefix_are_open_until_they_are_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are missing in their own topic are gone."""
    counts = {"a.t": Letters("a.t", 3, 1, "before"), "a.u": Letters("a.u", 5, 1, "now"), "a.v": Letters("a.v", 2)}
    keys = {name: letters_key(oid, "stream") for oid, name in enumerate(counts)}
    state = PipelineState({keys[name]: encode(each) for name, each in counts.items()})
    topic = object.__new__(LettersTopic)
    topic._name, topic._topic = "7/d/s", "now"
    topic._publishing = SimpleNamespace(  # type: ignore[assignment]
        state=state, transact=lambda _, values: state.apply(values)
    )
    monkeypatch.setattr(topic, "blocks", lambda name: [])
    assert topic.dismiss(["a.u"]) == 0
    assert {key: each.open for key, each in state.letters.items()} == {
        keys["a.t"]: 2,
        keys["a.u"]: 0,
        keys["a.v"]: 0,
    }
    assert topic.dismiss(["a.t"]) == 2
    assert state.letters[keys["a.t"]].open == 0
