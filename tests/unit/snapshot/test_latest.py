"""Which record is the latest of its key: against a dict, whatever the memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_bottledwater.kafka.hashes import siphash
from airflow_bottledwater.kafka.key_table import RANGES
from airflow_bottledwater.kafka.librdkafka import MESSAGE
from airflow_bottledwater.kafka.topic_reader import KeySet, RecordBlock
from airflow_bottledwater.snapshot.latest import LatestRecords
from tests.support.callees import called
from tests.support.examples import examples


@dataclass(frozen=True)
class Message:
    key: bytes
    partition: int
    offset: int
    live: bool


class Read(RecordBlock):
    """A block as librdkafka gives it, with keys in a buffer of its own."""

    def __init__(self, given: list[Message]) -> None:
        self._buffer = np.frombuffer(b"".join(m.key for m in given) + b"\0", dtype=np.uint8)
        messages = np.zeros(len(given), dtype=MESSAGE)
        at = self._buffer.ctypes.data
        for row, m in zip(messages, given, strict=True):
            row["key"], row["key_len"], row["partition"], row["offset"] = at, len(m.key), m.partition, m.offset
            row["payload"] = 1 if m.live else 0
            at += len(m.key)
        super().__init__(messages, np.zeros(len(given), dtype=np.int64))


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(0, 0x726FDB47DD0E0E31), (1, 0x74F839C593DC67FD), (8, 0x93F5F5799A932462), (15, 0xA129CA6149BE45E5)],
)
def test_siphash_gives_its_authors_vectors(size: int, wanted: int) -> None:
    """vectors.h of https://github.com/veorq/SipHash: key 00 01 … 0f, message 00 01 …"""
    key = np.frombuffer(bytes(range(16)), dtype=np.uint64)
    assert int(called(siphash)(np.arange(max(size, 1), dtype=np.uint8), 0, size, key[0], key[1])) == wanted


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.booleans()), max_size=400),
    st.lists(st.integers(0, 400), min_size=3, max_size=3),
    st.sampled_from([16, 64, 1024]),
    st.integers(1, 50),
)
def test_every_reading_together_gives_what_the_snapshot_has_not_found(
    written: list[tuple[int, int, bool]], ends: list[int], places: int, size: int
) -> None:
    messages = [Message(b"%d" % key, part, at, live) for at, (key, part, live) in enumerate(written)]
    latest_of = {(m.key, m.partition): m for m in messages}
    found_again = {m.key for m in messages if m.live and m.offset >= ends[m.partition]}
    wanted = [m for m in latest_of.values() if m.live and m.key not in found_again]
    blocks = [messages[i : i + size] for i in range(0, len(messages), size)]
    stale: list[Message] = []
    low, readings = 0, 0
    while low < RANGES:
        latest = LatestRecords(len(messages), ends, low, places=places)
        for block in blocks:
            latest.note(Read(block))
        marked = [m for b in blocks for m, is_stale in zip(b, latest.stale(Read(b)), strict=True) if is_stale]
        assert latest.any_before() or not marked
        stale += marked
        low = latest.high
        readings += 1
    assert sorted(stale, key=lambda m: m.offset) == sorted(wanted, key=lambda m: m.offset)
    # three quarters of a table are used
    assert readings >= len(latest_of) / (places * 0.75) / 2 - 1


def test_a_key_that_the_snapshot_found_in_another_partition_is_left_alone() -> None:
    """Another program has filled the topic, and has chosen partitions otherwise."""
    block = Read([Message(b"k", 0, 1, True), Message(b"gone", 0, 2, True), Message(b"k", 1, 5, True)])
    latest = LatestRecords(3, [3, 3], 0)
    latest.note(block)
    assert latest.stale(block).tolist() == [False, True, False]


def test_keys_are_looked_for_by_their_bytes() -> None:
    block = Read(
        [Message(b"a", 0, 1, True), Message(b"", 0, 2, True), Message(b"bc", 0, 3, False), Message(b"a", 1, 4, True)]
    )
    assert [block.key(i) for i in range(4)] == [b"a", b"", b"bc", b"a"]
    assert list(block.having(KeySet({b"a", b"abc"}))) == [0, 3]
    assert list(block.having(KeySet({b"bc"}))) == [2]
    assert list(block.having(KeySet(set()))) == []
    others = {b"%d" % n for n in range(1000)}
    assert list(block.having(KeySet({b"a", b"bc", *others}))) == [0, 2, 3] and not list(block.having(KeySet(others)))
