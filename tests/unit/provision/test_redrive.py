"""How dead letters are settled: beside no job that is alive, together, each once; and who says then how many are
open."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from airflow_bottledwater.errors import BottledWaterError, Outage, SchemaRefused, TakenOver
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.kafka.publisher import RECORD_OVERHEAD, Records, single
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.provision import letters, redrive, source_rows
from airflow_bottledwater.provision.letters import LetterPosition, LettersTopic
from airflow_bottledwater.provision.newest import Newest, key_of
from airflow_bottledwater.provision.source_rows import SourceRow, StoredDeadLetter
from airflow_bottledwater.state.records import Letters, letters_key
from tests.support import wire as w


@pytest.mark.parametrize(
    ("error", "told"), [(None, 1), (Outage("Kafka is away."), 1), (TakenOver("Another job has the slot."), 0)]
)
def test_the_status_of_a_job_that_has_taken_the_slot_over_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, error: BottledWaterError | None, told: int
) -> None:
    settled: list[Any] = []
    for name in ("_claimed", "PublishSession", "ToastResolver", "pins", "stream_id"):
        monkeypatch.setattr(redrive, name, MagicMock())
    monkeypatch.setattr(redrive, "_Letters", lambda *of: MagicMock(redrive=MagicMock(side_effect=error)))
    monkeypatch.setattr(redrive, "_tell", lambda *of: settled.append(of))
    redrive._claimed.return_value.__exit__.return_value = False  # type: ignore[attr-defined]
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        redrive.redrive(MagicMock())
    assert len(settled) == told


class Kafka:
    """Takes what a session of a redrive publishes, all or none of a transaction.

    :ivar refuses: the dead letters whose records it refuses.
    :ivar fails: what becomes of the next transactions: whether each is committed before its producer is lost.
    """

    def __init__(self, refuses: Sequence[int] = (), fails: Sequence[bool] = (), limit: float = math.inf) -> None:
        self.refuses, self.fails, self.transactions = {b"%d" % n for n in refuses}, list(fails), 0
        self.published: list[bytes] = []
        self.letters = {letters_key(1, "stream"): Letters("public.a", 1000)}
        self.state = SimpleNamespace(letters=dict(self.letters))
        self.pace, self.dead_letters = SimpleNamespace(limit=limit), 1

    def run(self, work: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(NewProducerNeeded):
                return work()
            self.state.letters = dict(self.letters)

    def transact(self, batches: Sequence[Records], closed: dict[str, Letters], *, divisible: bool) -> None:
        self.transactions += 1
        *rows, removed = batches
        keys = [key_of(each, 0) for each in rows if len(each)]
        assert divisible == (len(removed) > 1)
        if set(keys) & self.refuses:
            raise RecordRefused("Kafka refuses a record.", 0, 87)
        lost = bool(self.fails)
        if not lost or self.fails.pop(0):
            assert [key_of(removed, i) for i in range(len(removed))][: len(keys)] == keys
            self.published += keys
            self.letters.update(closed)
        if lost:
            self.pace.limit /= 2
            raise NewProducerNeeded("The outcome is unknown.")
        self.state.letters.update(closed)


def _sent(kafka: Kafka, count: int = 100) -> redrive.RedriveResult:
    letters = object.__new__(LettersTopic)
    letters._publishing = kafka  # type: ignore[assignment]
    driven = object.__new__(redrive._Letters)
    driven._publishing, driven._letters = kafka, letters  # type: ignore[assignment]
    content = {"oid": 1, "by": "stream", "relation": "public.a", "pos": "0/1"}
    result = redrive.RedriveResult()
    todo = [(StoredDeadLetter(b"%d" % n, content), single(0, 0, b"%d" % n, b"row")) for n in range(count)]
    driven._send(todo, result)
    (closed,) = kafka.letters.values()
    assert closed.closed == result.published == len(kafka.published) == len(set(kafka.published))
    assert kafka.published == sorted(kafka.published, key=int), "in their order"
    return result


def test_letters_are_sent_together_and_those_that_are_refused_stay() -> None:
    kafka = Kafka()
    assert _sent(kafka) == redrive.RedriveResult(published=100) and kafka.transactions == 1
    kafka = Kafka(refuses=[0, 57, 58, 99])
    assert _sent(kafka) == redrive.RedriveResult(published=96, failed=4)
    assert kafka.transactions < 60
    assert _sent(Kafka(refuses=range(100))) == redrive.RedriveResult(failed=100)


@pytest.mark.parametrize("fails", [[True], [False], [False, True], [True, False]])
def test_letters_are_sent_once_whatever_becomes_of_their_transaction(fails: list[bool]) -> None:
    kafka = Kafka(fails=fails, limit=20 * (RECORD_OVERHEAD * 2 + 70))
    assert _sent(kafka) == redrive.RedriveResult(published=100)
    assert kafka.transactions > 100 / 20


@pytest.mark.parametrize("portion", [1, 1 << 20])
def test_the_topics_are_looked_at_once_for_all_letters(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    monkeypatch.setattr(letters, "_PORTION_BYTES", portion)
    driven, looked, done, read = object.__new__(redrive._Letters), list[Any](), list[bytes](), list[bytes]()
    table = SimpleNamespace(outbox=False)
    contents = {b"%d" % n: {"topic": f"t{n % 2}", "again": {"table": table}} for n in range(6)}
    places = [LetterPosition((0, n), str(9 - n), b"%d" % n, 100, "", "", 1) for n in range(6)]

    def read_some(some: Sequence[LetterPosition]) -> list[StoredDeadLetter]:
        read.extend(each.key for each in some)
        return [StoredDeadLetter(each.key, contents[each.key]) for each in some]

    def ready(some: list[StoredDeadLetter], _: object) -> list[tuple[StoredDeadLetter, Records]]:
        return [(each, single(0, 0, each.key, b"")) for each in some if each.key != b"3"]  # which has failed

    driven._pipeline, driven._tables, driven._mapping = MagicMock(), {}, MagicMock()
    driven._publishing, driven._letters = MagicMock(), MagicMock(read=read_some)
    driven._publishing.run = lambda work: places  # type: ignore[method-assign]
    monkeypatch.setattr(redrive, "session", MagicMock())
    monkeypatch.setattr(redrive, "catalog", MagicMock())
    monkeypatch.setattr(driven, "_ready", ready)
    monkeypatch.setattr(driven, "_newest", looked.append)
    monkeypatch.setattr(driven, "_redrive", lambda some, *_: done.extend(each.key for each, _ in some))
    driven.redrive()
    assert looked == [{"t0": {b"0", b"2", b"4"}, "t1": {b"1", b"5"}}]
    assert done == [b"5", b"4", b"2", b"1", b"0"], "by position"
    assert len(read) == (6 + 5 if portion == 1 else 6)


def test_a_letter_of_the_stream_gives_way_to_a_later_row_that_is_published_before_it() -> None:
    """Also in another portion: a row that a live snapshot has read comes before all changes."""
    before = w.table(("k", w.plain(w.TEXT)), key=["k"], oid=1)
    after = w.table(("k", w.plain(w.TEXT)), ("x", w.plain(w.TEXT)), key=["k"], oid=1)

    def letter(name: bytes, table: SourceTable, **content: Any) -> StoredDeadLetter:
        again = {"table": table, "message": "", **content.pop("again", {})}
        return StoredDeadLetter(
            name, {"topic": "t", "oid": 1, "relation": "public.a", "by": "", **content, "again": again}
        )

    read = letter(b"read", after, op=source_rows._SNAPSHOT, pos="", again={"lsn": 500, "label": "1/0/1F4"})
    changes = [letter(str(lsn).encode(), before, op="update", pos=str(Position(lsn))) for lsn in (100, 501)]
    sent: list[tuple[bytes, int]] = []
    driven, newest, record = object.__new__(redrive._Letters), Newest(), single(0, 0, b"K", b"v")
    driven._today = {1: before}
    driven._current = lambda ready: {each.key: SourceRow(gone=None, same=True) for each, _ in ready}  # type: ignore[method-assign,assignment]
    driven._send = lambda todo, _: sent.extend((each.key, len(records)) for each, records in todo)  # type: ignore[method-assign,assignment]
    for each in (read, *changes):
        driven._redrive([(each, record)], newest, redrive.RedriveResult())
    assert sent == [(b"read", 1), (b"100", 0), (b"501", 1)]


def test_the_registry_is_asked_once_about_a_schema_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def register(*of: object) -> int:
        asked.append(of)
        raise SchemaRefused("It is incompatible.")

    monkeypatch.setattr(redrive, "register_value", register)
    driven = object.__new__(redrive._Letters)
    driven._pipeline, driven._publishing, driven._versions = MagicMock(), MagicMock(), {}
    version = Version(w.table(("k", w.plain(w.TEXT)), key=["k"], oid=1), "t")
    for _ in range(2):
        with pytest.raises(SchemaRefused, match="incompatible"):
            driven._with_schema(version)
    assert len(asked) == 1
