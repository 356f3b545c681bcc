"""The one publish core, with a broker that fails in every way at every step: under the stream and under a snapshot's
lane.

Whatever happens, what a ``read_committed`` consumer finds in the end is each row once, in order, with its progress; or
an error, and nothing more than what precedes it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import (
    BottledWaterError,
    CredentialsRefused,
    Outage,
    RecordError,
    Refused,
    StateError,
    StopRequested,
    TakenOver,
)
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused, TooSlow
from airflow_bottledwater.kafka.publisher import Records, keyed, tombstones
from airflow_bottledwater.kafka.topics import Topic
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import copy as pg_copy
from airflow_bottledwater.postgres import snapshot as pg_snapshot
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.snapshot import ExportedSnapshot
from airflow_bottledwater.publish import session as module
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.reject import oversized
from airflow_bottledwater.snapshot import lane
from airflow_bottledwater.snapshot.task import LaneTask, SnapshotChunk
from airflow_bottledwater.state.pinned import Pin, PinnedTable, pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import POSITION, Reached, encode, table_key
from airflow_bottledwater.stream.assembler import TransactionAssembler
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.start import Start
from tests.support import wire as w

TABLE = w.table(("id", w.plain(w.TEXT)), ("a", w.plain(w.TEXT)), key=["id"], oid=7)
PINNED = PinnedTable(TABLE, "t", "topic-id", 1, 0, 0, 3)
JOB = Job(4, "this", "stream", "host", 1, 0.0)
CLUSTER = Cluster("1", 1, "db", 160000)
SLOT = SlotRecord("slot", "1", 1, "db", 0, 1)
#: the value of a row that the broker refuses
POISON = b"poison"
STEPS = ("open", "read", "begin", "produce", "commit: before it", "commit: its answer is lost")


@dataclass
class Broker:
    """What is committed, and where it fails next.

    :param fails: step → the errors of its next calls.
    """

    committed: list[tuple[str, Any, Any]] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    fails: dict[str, list[BaseException]] = field(default_factory=dict)
    claimed_by: Job = JOB
    refused_code: int = 0
    limit: int = 1_000_000
    #: of all topics; empty if their settings may not be read
    cleanup: str = "compact"
    #: bytes of records that it takes in half of the transaction time-out
    takes: float = math.inf
    #: how many transactions were given up
    given_up: int = 0
    publishers: list[FakePublisher] = field(default_factory=list)

    def step(self, name: str) -> None:
        if self.fails.get(name):
            raise self.fails[name].pop(0)

    @property
    def left_open(self) -> int:
        """How many transactions are open."""
        return sum(publisher.begun for publisher in self.publishers)

    def rows(self) -> list[str]:
        return [json.loads(value)["a"] for topic, _, value in self.committed if topic == "t" and value is not None]

    def dead_letters(self) -> list[str]:
        return [
            json.loads(value)["columns"]["a"]
            for topic, _, value in self.committed
            if topic == "_bottledwater_dead_letters"
        ]


class FakePublisher:
    """In place of the producer over librdkafka."""

    broker: Broker

    def __init__(self, config: dict[str, str], transactional_id: str, topics: Sequence[str], **_: object) -> None:
        self._topics, self._pending = list(topics), list[tuple[str, Any, Any]]()
        self.size, self.seconds, self.begun = 0, 0.0, False
        self.broker.publishers.append(self)

    def open(self) -> None:
        self.broker.step("open")

    def close(self) -> None:
        self._pending.clear()
        self.broker.given_up += self.begun
        self.begun = False

    def begin(self, first: Records) -> None:
        self._begin()
        self.produce(first)

    def _begin(self) -> None:
        assert not self.begun
        self.broker.step("begin")
        self._pending.clear()
        self.size, self.begun = 0, True

    @contextlib.contextmanager
    def transaction(self, *, divisible: bool = True) -> Iterator[None]:
        if not self.begun:
            self._begin()
        try:
            yield from self._transact(divisible)
        finally:
            self.begun = False

    def _transact(self, divisible: bool) -> Iterator[None]:
        takes = self.broker.takes * (1 if divisible else 1.8)
        yield
        self.seconds = 30 * self.size / self.broker.takes
        if self.size > takes:
            self.broker.given_up += 1
            raise TooSlow("Kafka is slow.", int(self.broker.takes), 30.0, divisible=divisible)
        self.broker.step("commit: before it")
        if (
            any(POISON in (value or b"") for topic, _, value in self._pending if topic == "t")
            and self.broker.refused_code
        ):
            raise RecordRefused("Kafka refuses a record.", 0, self.broker.refused_code)
        for topic, key, value in self._pending:
            if topic == "state" and value is None:
                self.broker.state.pop(key.decode(), None)
            elif topic == "state":
                self.broker.state[key.decode()] = json.loads(value)
        self.broker.committed += self._pending
        self.broker.step("commit: its answer is lost")

    def produce(self, records: Records) -> None:
        self.broker.step("produce")
        if len(records) and self._topics[records.table[0]["topic"]] != "state":
            self.size += int(records.sizes().sum())
        for row in records.table:
            key, value = (
                None if row[size] < 0 else bytes(records.data[row[at] : row[at] + row[size]])
                for at, size in (("key", "key_length"), ("value", "value_length"))
            )
            self._pending.append((self._topics[row["topic"]], key, value))

    def attempt(self, records: Sequence[Records]) -> None:
        for each in records:
            self._pending.clear()
            self.produce(each)
            for i, (topic, _, value) in enumerate(self._pending):
                if topic == "t" and POISON in (value or b"") and self.broker.refused_code:
                    raise RecordRefused("Kafka refuses a record.", i, self.broker.refused_code)


class FakeTopics:
    """In place of the admin client."""

    broker: Broker

    def __init__(self, config: dict[str, str]) -> None:
        pass

    def describe(self, names: Sequence[str], **_: object) -> dict[str, Topic]:
        broker = self.broker
        return {name: Topic(name, "topic-id", 1, broker.limit, broker.cleanup, True, True) for name in names}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A broker with the state of a pipeline whose snapshot is complete."""
    made = Broker()
    made.state |= {"claim": encode(JOB), "slot": encode(SLOT), table_key(7): encode(PINNED)}
    monkeypatch.setattr(FakePublisher, "broker", made, raising=False)
    monkeypatch.setattr(FakeTopics, "broker", made, raising=False)
    monkeypatch.setattr(module, "Publisher", FakePublisher)
    monkeypatch.setattr(module, "Topics", FakeTopics)

    def read(*_: object) -> PipelineState:
        made.step("read")
        return PipelineState(json.loads(json.dumps({**made.state, "claim": encode(made.claimed_by)})))

    monkeypatch.setattr(module, "read_behind", read)
    return made


def pipeline(**changes: Any) -> Settings:
    return Settings.of(postgres="dbname=none", format="json", outage_timeout=2.0, guard_replica_lag=0, **changes)


# ------------------------------------------------------------------ the two pipelines
def batch(*transactions: Sequence[bytes], start: int = 0) -> Batch:
    """Transactions of inserts; a row's key is its value."""
    assembler = TransactionAssembler(
        Position(start), {}, lambda *_: PINNED.version, batch_bytes=10**9, largest_transaction=10**9
    )
    messages = [w.relation(7, [(c.name == "id", c.name, w.TEXT, -1) for c in TABLE.columns])]
    for n, values in enumerate(transactions, 1):
        messages += [
            w.begin(start + n * 100, n),
            *(w.insert(7, value, value) for value in values),
            w.commit(start + n * 100, start + n * 100 + 10),
        ]
    assembler.add(w.block([w.xlog(m) for m in messages]))
    assert assembler.cut() is None
    found = assembler.flush(empty=False)
    assert found is not None
    return found


def stream(broker: Broker, *transactions: Sequence[bytes], **changes: Any) -> None:
    """Publish these transactions as one batch."""
    start = Start(CLUSTER, JOB, "prefix", "state", PipelineState(dict(broker.state)), Position(0))
    publisher = StreamPublisher(pipeline(**changes), start, start.state, Backoff(2.0, report=lambda what: None))
    try:
        found = batch(*transactions)
        assert publisher.publish(found) == found.end == publisher.position
    finally:
        publisher.close()


def copied(*values: bytes) -> MessageBlock:
    rows = [struct.pack(">h", 2) + 2 * (struct.pack(">i", len(value)) + value) for value in values]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return MessageBlock(np.frombuffer(b"".join(rows), dtype=np.uint8).copy(), offsets)


class _Connection:
    def execute(self, *_: object) -> None: ...
    def cancel_safe(self, **_: object) -> None: ...
    def close(self) -> None: ...


def snapshot(broker: Broker, *ranges: Sequence[bytes], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Publish these as ranges of a lane, a block of the table for each."""
    monkeypatch.setattr(lane, "connect", lambda *_, **__: _Connection())
    monkeypatch.setattr(pg_snapshot, "begin_task", lambda *_, **__: None)
    monkeypatch.setattr(pg_snapshot, "copy_query", lambda table, columns, first, last, condition: (first, last))
    monkeypatch.setattr(
        pg_copy, "rows", lambda connection, query, idle: iter([copied(*ranges[n]) for n in range(*query)])
    )
    chunks = tuple(SnapshotChunk(7, n, n, n + 1) for n in range(len(ranges)))
    task = LaneTask(0, JOB, "prefix", "state", ExportedSnapshot(Snapshot(5, 5, ()), 1, "x"), (PINNED,), chunks)
    lane.run(pipeline(**changes), task)


Run = Callable[..., None]


@pytest.fixture(params=["stream", "snapshot"])
def publish(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Publishes groups of rows: transactions, or ranges."""
    if request.param == "stream":
        return stream

    def of_a_lane(broker: Broker, *ranges: Sequence[bytes], **changes: Any) -> None:
        snapshot(broker, *ranges, monkeypatch=monkeypatch, **changes)

    return of_a_lane


def progress(broker: Broker) -> list[tuple[str, Any]]:
    """What the state says of how far the work is, but for times."""
    return sorted(
        (key, {k: v for k, v in value.items() if k != "at"})
        for key, value in broker.state.items()
        if key == POSITION or key.startswith("progress/")
    )


GROUPS = ([b"a", b"b"], [b"c"], [b"d", b"e", b"f"])
ROWS = ["a", "b", "c", "d", "e", "f"]


# ------------------------------------------------------------------ every error at every step
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_transaction_that_is_lost_is_decided_anew_by_the_state(
    broker: Broker, publish: Run, step: str, times: int
) -> None:
    publish(broker, *GROUPS)
    expected, broker.committed = progress(broker), []
    broker.state = {key: value for key, value in broker.state.items() if key in ("claim", "slot", table_key(7))}
    broker.fails = {step: [NewProducerNeeded("lost") for _ in range(times)]}
    publish(broker, *GROUPS)
    assert len(broker.fails[step]) < times
    assert broker.rows() == ROWS
    assert progress(broker) == expected


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error",
    [Refused("no"), Outage("away"), StopRequested("stop"), ValueError("a defect")],
    ids=lambda e: type(e).__name__,
)
def test_any_other_error_ends_the_job_and_nothing_is_repeated(
    broker: Broker, publish: Run, step: str, error: BaseException
) -> None:
    broker.fails = {step: [error]}
    with pytest.raises(type(error)):
        publish(broker, *GROUPS)
    before = list(broker.committed)
    publish(broker, *GROUPS)
    assert broker.committed[: len(before)] == before
    assert broker.rows() == ROWS


@pytest.mark.parametrize("step", STEPS)
def test_a_job_that_was_taken_over_publishes_nothing_more(broker: Broker, publish: Run, step: str) -> None:
    if step.endswith("lost"):
        pytest.skip("what was committed was committed before the other job claimed the slot")
    broker.fails = {step: [NewProducerNeeded("fenced")]}
    broker.claimed_by = Job(5, "another", "stream", "elsewhere", 2, 0.0)
    with pytest.raises(TakenOver, match="elsewhere"):
        publish(broker, *GROUPS)
    assert broker.committed == []


# ------------------------------------------------------------------ rows that cannot be published
_BAD = ([b"a"], [b"b", POISON], [b"c"])


@pytest.mark.parametrize("code", [10, 87], ids=["too large", "invalid"])
def test_a_row_that_the_broker_refuses_is_a_dead_letter_alone(broker: Broker, publish: Run, code: int) -> None:
    broker.refused_code = code
    publish(broker, *_BAD, on_error="log")
    assert (broker.rows(), broker.dead_letters()) == (["a", "b", "c"], [POISON.decode()])


@pytest.mark.parametrize("step", STEPS)
def test_what_precedes_it_is_published_whatever_happens_meanwhile(broker: Broker, publish: Run, step: str) -> None:
    broker.refused_code = 87
    broker.fails = {step: [NewProducerNeeded("lost")]}
    with pytest.raises(RecordError, match="cannot be published"):
        publish(broker, *_BAD)
    assert broker.rows() == ["a"]
    assert broker.dead_letters() == []


def test_records_that_cannot_be_made_leave_no_transaction_open(broker: Broker) -> None:
    session = module.PublishSession(pipeline(), JOB, "id", pins([PINNED]), "state", Backoff(2.0))

    def records() -> Iterator[Records]:
        session.begin()
        raise Outage("The server is away.")
        yield

    with pytest.raises(Outage, match="away"):
        session.run(lambda: session.transact(records(), {}))
    assert (broker.given_up, broker.left_open) == (1, 0)


def test_work_that_ends_without_records_leaves_no_transaction_open(broker: Broker) -> None:
    session = module.PublishSession(pipeline(), JOB, "id", pins([PINNED]), "state", Backoff(2.0))
    session.run(session.begin)
    assert (broker.given_up, broker.left_open) == (1, 0)


def test_a_batch_that_publishes_nothing_leaves_no_transaction_open(broker: Broker) -> None:
    """It is begun before it is known that the first row stops the stream."""
    broker.limit = 4000
    for given_up in (0, 1):  # what precedes the row is only published once
        with pytest.raises(RecordError, match="cannot be published"):
            stream(broker, [b"x" * 5000], on_error="exit")
        assert (broker.given_up, broker.left_open, broker.rows()) == (given_up, 0, [])


def test_a_row_that_is_too_large_is_not_even_sent(broker: Broker, publish: Run) -> None:
    broker.limit = 4000
    publish(broker, [b"a"], [b"x" * 5000, b"b"], on_error="log")
    assert broker.rows() == ["a", "b"]
    assert [text[:1] for text in broker.dead_letters()] == ["x"]


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [(29, Refused, "denies Write"), (32, Outage, "time of a record")],
    ids=["denied", "clock"],
)
def test_a_refusal_that_is_no_rows_fault_sets_no_row_aside(
    broker: Broker, publish: Run, code: int, error: type[BottledWaterError], says: str
) -> None:
    broker.refused_code = code
    with pytest.raises(error, match=says):
        publish(broker, [POISON], [b"a"], on_error="log")
    assert broker.dead_letters() == []


def test_a_clock_that_a_record_shows_by_itself_is_waited_for(
    broker: Broker, publish: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several records together, the broker gives each the code of an invalid one."""
    broker.refused_code = 87

    def attempt(self: FakePublisher, records: Sequence[Records]) -> None:
        raise RecordRefused("Kafka refuses a record.", 0, 32)

    monkeypatch.setattr(FakePublisher, "attempt", attempt)
    with pytest.raises(Outage, match="time of a record"):
        publish(broker, [POISON], [b"a"], on_error="log")
    assert broker.dead_letters() == []


def test_limits_that_changed_meanwhile_are_read_again(
    broker: Broker, publish: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.refused_code = 10
    usual = FakePublisher.transaction

    def lower(self: FakePublisher, **options: bool) -> Any:
        # the limit falls while the first transaction is open
        broker.limit = min(broker.limit, 900)
        return usual(self, **options)

    monkeypatch.setattr(FakePublisher, "transaction", lower)
    publish(broker, [POISON + b"x" * 1000, b"a"], on_error="log")
    assert broker.rows() == ["a"]
    assert len(broker.committed) > 1


def test_a_skipped_position_passes_one_change_only(broker: Broker) -> None:
    broker.refused_code = 87
    bad = Position(200, 2)
    stream(broker, *_BAD, skip_position=str(bad))
    assert (broker.rows(), broker.dead_letters()) == (["a", "b", "c"], [POISON.decode()])
    broker.committed, broker.state[POSITION] = [], {"lsn": 0, "ordinal": 0, "at": 0.0}
    with pytest.raises(RecordError, match=str(bad)):
        stream(broker, *_BAD, skip_position=str(Position(200, 1)))


# ------------------------------------------------------------------ a Kafka that is slow
def _named(n: int) -> list[bytes]:
    return [b"%04d" % i for i in range(n)]


@pytest.mark.parametrize("takes", [60, 100, 250, 400, 1000, 5000, 10**9])
def test_what_kafka_does_not_take_in_time_is_published_in_smaller_transactions(
    broker: Broker, publish: Run, takes: int
) -> None:
    """A record has about 180 bytes on the wire: the smallest of these takes none in half of the time-out, the next one
    just one."""
    broker.takes = takes
    rows = _named(60)
    if takes < 250:
        with pytest.raises(BottledWaterError):
            publish(broker, [b"a"], on_error="exit")
        return
    publish(broker, *([row] for row in rows))
    assert broker.rows() == [row.decode() for row in rows]
    assert broker.given_up <= 4


def test_a_transaction_of_the_source_is_cut_only_where_kafka_does_not_take_it(broker: Broker) -> None:
    broker.takes = 5_000
    stream(broker, _named(40), _named(10), _named(10))
    assert broker.rows() == [row.decode() for n in (40, 10, 10) for row in _named(n)]
    assert broker.given_up == 2


@pytest.mark.parametrize("takes", [math.inf, 1000, 200])
def test_records_without_progress_of_their_own_are_published_in_several_transactions(
    broker: Broker, takes: float
) -> None:
    broker.takes = takes
    start = Start(CLUSTER, JOB, "prefix", "state", PipelineState(dict(broker.state)), Position(0))
    publisher = StreamPublisher(pipeline(), start, start.state, Backoff(2.0, report=lambda what: None))
    session = publisher._session
    keys = [(0, key) for key in _named(50)]
    done: dict[str, Any] = {POSITION: Reached(5, 0, 0.0)}
    all_keys = [tombstones(session.index["t"], part) for part in (keys[:20], keys[20:])]
    session.run(lambda: session.transact(all_keys, done, several=True))
    published = [key for topic, key, _ in broker.committed if topic == "t"]
    assert published == [key for _, key in keys]
    assert (broker.given_up > 0) == (takes < math.inf)
    assert session.state.position == Position(5)
    publisher.close()


def test_what_is_left_of_a_state_is_not_taken_for_all_of_it(broker: Broker, publish: Run) -> None:
    """Its claim is written again by each job; what is written once may have expired."""
    del broker.state["slot"]
    with pytest.raises(StateError, match="does not know slot 'bottledwater'"):
        publish(broker, [b"1"])
    assert not broker.committed


def _session(broker: Broker) -> module.PublishSession:
    return module.PublishSession(pipeline(), JOB, "id", {"t": Pin("topic-id", 1, keyed=True)}, "state", Backoff(2.0))


def test_a_right_that_is_taken_away_changes_no_topic(broker: Broker) -> None:
    """What was known of it is more than Kafka's defaults: rows that it takes must not be rejected."""
    broker.limit = 10_000_000
    session = _session(broker)
    broker.limit, broker.cleanup = 1_000_000, ""
    assert not session.compare_topics()
    assert session.largest_record == 10_000_000 and session.described["t"].cleanup == "compact"
    broker.limit, broker.cleanup = 2_000_000, "compact"
    assert session.compare_topics() and session.largest_record == 2_000_000


def test_topics_that_cannot_be_compared_for_long_are_told(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _session(broker)
    session.compare_topics()
    ask, refused = session._ask, CredentialsRefused("Kafka refuses the connection.", "Check user and password.")
    monkeypatch.setattr(session, "_ask", Mock(side_effect=refused))
    assert not session._compared_aside(now=True) and not session.unchecked(0.0)
    assert session._uncompared is not None
    began = session._uncompared[1] - 121
    session._uncompared = refused, began
    # while all of Kafka was away, nothing could be compared
    assert not session.unchecked(began + 60)
    # since the first look that has failed
    assert not session._compared_aside(now=True)
    (told,) = session.unchecked(began)
    assert told.kind == "topics-unchecked" and "refuses the connection" in told.reason
    assert "restart the job" in told.remedy
    monkeypatch.setattr(session, "_ask", ask)
    session._compared_aside(now=True)
    assert not session.unchecked(0.0)


@pytest.mark.parametrize(
    ("cleanup", "said"), [("compact", "is 4,000"), ("", "is assumed to be 4,000.*DescribeConfigs")]
)
def test_a_limit_that_is_assumed_is_not_told_as_a_known_one(broker: Broker, cleanup: str, said: str) -> None:
    broker.limit, broker.cleanup = 4000, cleanup
    session = _session(broker)
    (found,) = oversized(session, keyed(session.index["t"], [(b"k", b"x" * 5000, 0)]))
    assert re.search(f"the topic's max.message.bytes {said}", found.reason)
