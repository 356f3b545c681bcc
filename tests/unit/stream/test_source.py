"""When an outage of the source counts as over, and how long changes wait for others."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage, Refused, TableRefused
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.connect import MessageTooLarge
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import SLOT, LaterSchema, encode, schema_key
from airflow_bottledwater.stream import source
from tests.support import wire as w


@pytest.mark.parametrize(("lasts", "unfinished"), [(True, False), (False, False), (True, True)])
def test_an_idle_server_begins_a_new_outage_if_its_session_has_lasted_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch, lasts: bool, unfinished: bool
) -> None:
    """It sends no batch that would end it. One that always fails inside of the same transaction is another matter."""
    answers: list[Any] = [Outage("gone"), None, Outage("gone again"), None]

    def answer(self: source.ChangeSource, deadline: float, flush_empty: bool) -> None:
        self._connected = time.monotonic() - (source._LASTS + 1 if lasts else 1)
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(source.ChangeSource, "_next", answer)
    monkeypatch.setattr(source.TransactionAssembler, "unfinished", unfinished)
    record = SlotRecord("s", "7381", 1, "db", 0, 12)
    pipeline = Settings.of(postgres="dbname=none", format="json")
    changes = source.ChangeSource(pipeline, PipelineState({SLOT: encode(record)}), Position(1), Backoff(0.3))
    assert changes.next(0.1) is None
    time.sleep(0.4)
    if lasts and not unfinished:
        assert changes.next(0.1) is None
    else:
        with pytest.raises(Outage, match="gone again"):
            changes.next(0.1)


TABLE = w.table(("id", w.plain(w.TEXT)), ("a", w.plain(w.TEXT)), key=["id"], oid=7)


def test_definitions_are_those_of_the_state_as_it_is_now() -> None:
    """A new producer has read it anew."""
    record, table = SlotRecord("s", "7381", 1, "db", 0, 12), w.table(("id", w.plain(w.TEXT)), key=["id"])
    pipeline, state = Settings.of(postgres="dbname=none", format="json"), PipelineState({SLOT: encode(record)})
    changes = source.ChangeSource(pipeline, state, Position(1), Backoff(0.3))
    state.apply({schema_key(table.oid, 9): LaterSchema(table, 9)})
    assert changes._resolver._later() == {table.oid: {9: table}}
    changes.later = dict
    assert changes._resolver._later() == {}


class _Stream:
    """Small transactions that arrive at their times."""

    def __init__(self, *at: float) -> None:
        self._at = [time.monotonic() + each for each in at]

    def take(self, timeout: float) -> MessageBlock | None:
        wait = (self._at[0] if self._at else float("inf")) - time.monotonic()
        time.sleep(max(0.0, min(wait, timeout)))
        if wait > timeout:
            return None
        self._at.pop(0)
        n = 9 - len(self._at)
        row = w.insert(7, b"%d" % n, b"x")
        relation = w.relation(7, [(c.name == "id", c.name, w.TEXT, -1) for c in TABLE.columns])
        return w.block([w.xlog(m) for m in (relation, w.begin(n * 100, n), row, w.commit(n * 100, n * 100 + 10))])


@pytest.mark.parametrize(("max_delay", "batches"), [(0.0, [1, 1, 1, 1]), (0.4, [1, 2, 1])])
def test_changes_wait_for_others_for_max_delay_after_the_ones_before(
    monkeypatch: pytest.MonkeyPatch, max_delay: float, batches: list[int]
) -> None:
    monkeypatch.setattr(source.Resolver, "__call__", lambda *_: Version(TABLE, "t"))
    pipeline = Settings.of(postgres="dbname=none", format="json", max_delay=max_delay)
    record = SlotRecord("s", "7381", 1, "db", 0, 12)
    changes = source.ChangeSource(pipeline, PipelineState({SLOT: encode(record)}), Position(1), Backoff(0.3))
    began = time.monotonic()
    changes._stream = _Stream(0.0, 0.1, 0.2, 1.5)  # type: ignore[assignment]
    found, ended = [], []
    while sum(found) < 4:
        if (batch := changes.next(0.05)) is not None:
            found.append(len(batch))
            ended.append(time.monotonic() - began)
    assert found == batches
    # so that what was read of the catalog since then can be used
    assert began <= changes._resolver.arrived <= time.monotonic()
    changes._resolver._connection = session = Mock()
    changes._resolver._used = time.monotonic() - 2.0
    changes.next(0.01)
    session.close.assert_not_called()
    changes._stream = Mock()
    changes.close()  # also where a new session may lead to another server
    session.close.assert_called_once()
    if max_delay:
        assert ended[1] >= max_delay
    assert ended[-1] < 1.5 + max(max_delay, 0.3)


@pytest.mark.parametrize(("version", "remedy"), [(170005, "last minor release"), (170006, "")])
def test_a_release_that_cannot_read_its_wal_is_to_be_upgraded(version: int, remedy: str) -> None:
    """Outside of a transaction, there is no row that could be too large."""
    record = SlotRecord("s", "7381", 1, "db", 0, 12)
    pipeline = Settings.of(postgres="dbname=none", format="json")
    changes = source.ChangeSource(pipeline, PipelineState({SLOT: encode(record)}), Position(1), Backoff(0.3))
    changes._version = version
    with pytest.raises(Refused, match="alloc") as refused:
        changes._behind(MessageTooLarge("Replication: invalid memory alloc request size 1073741824."))
    assert remedy in refused.value.remedy and ("17.5" in refused.value.what) == bool(remedy)


def test_a_column_that_no_look_would_hide_holds_a_table_that_is_set_aside_already() -> None:
    record = SlotRecord("s", "7381", 1, "db", 0, 12)
    pipeline = Settings.of(postgres="dbname=none", format="json")
    changes = source.ChangeSource(pipeline, PipelineState({SLOT: encode(record)}), Position(1), Backoff(0.3))
    changes._set_aside(7, TableRefused("Its publication did not exist."))
    assert not changes.set_aside[7].held
    changes._resolver.unrecorded.add(7)
    changes._set_aside(7, TableRefused("Column 'b' was 'a'."))
    found = changes.set_aside[7]
    assert found.held and "was 'a'" in found.why
    # and the first reason counts
    changes._set_aside(7, TableRefused("Another one."))
    changes._resolver.unrecorded.clear()
    changes._set_aside(7, TableRefused("Its publication did not exist."))
    assert changes.set_aside[7] is found
