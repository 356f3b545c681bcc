"""The transactional publisher: it sends whole batches in Kafka transactions, and makes sure of every record.

One thread per publisher hands records over, serves the delivery reports and commits. A transaction counts as delivered
only if the commit succeeded and as many records were confirmed as were sent. What is done about an error depends on its
class, see
:mod:`airflow_bottledwater.policy`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.encoding.layout import RECORD, Rows
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.clients import (
    GRANT,
    Heard,
    denied,
    hear,
    refusal,
    transactional_config,
    unknown_property,
)
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused, TooSlow
from airflow_bottledwater.kafka.metadata import topic_errors
from airflow_bottledwater.kafka.room import BATCH, room
from airflow_bottledwater.kafka.topics import FOR_EVER, HOUR, CommitTimes

#: milliseconds of one attempt of a call; between two attempts, a stop is noticed
_SLICE_MS = 1000
#: milliseconds after which a record is sent though its batch is not complete. A commit sends all at once, and so does a
#: full queue, which may have an incomplete batch for each of many partitions
_LINGER_MS = 500
#: milliseconds without a confirmation after which a full queue is sent, at first; then twice as many each time
_FULL_MS = 2
#: seconds from the first record of a transaction until librdkafka asks the coordinator for the partitions that have
#: records by then (``rd_kafka_txn_schedule_register_partitions``, rdkafka_txnmgr.c). A commit that is called earlier
#: wakes the thread that waits for that, which then waits for a whole millisecond again, since it rounds up
#: (``rd_kafka_thread_main``, rdkafka.c)
_ANNOUNCED = 0.001
#: the share of the time-out after which a transaction is given up; and of one that cannot be made smaller
_IN_TIME, _AT_LAST = 0.5, 0.9
#: bytes on the wire besides key and value: the batch's header (61), the record's framing and its headers (of which 19
#: are the time's)
RECORD_OVERHEAD = 61 + 21 + 64 + 19


class _Undone(Exception):
    """Ends a transaction that is not to be committed."""


@dataclass(frozen=True, slots=True)
class Records:
    """Encoded records.

    :param table: rows of :data:`~airflow_bottledwater.encoding.layout.RECORD`; they point into ``data``.
    :param headers: which headers are sent (``HEADERS``, ``HEADER_XID`` of :mod:`~airflow_bottledwater.encoding.wire`);
        0 for none.
    :param label: the value of the header ``snapshot``, which tells rows that are read while the stream runs; empty for
        none.
    """

    table: Rows
    data: npt.NDArray[np.uint8]
    headers: int
    label: str = ""

    def __len__(self) -> int:
        return len(self.table)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Upper bounds of the records' sizes on the wire, in bytes, before compression."""
        keys, values, own = (self.table[f"{part}_length"] for part in ("key", "value", "headers"))
        found: npt.NDArray[np.int64] = np.maximum(keys, 0) + np.maximum(values, 0) + own
        return found + RECORD_OVERHEAD + len(self.label)


def single(topic: int, partition: int, key: bytes | None, value: bytes | None, timestamp: int = 0) -> Records:
    """One record without headers: an event, a dead letter or a state record.

    :param topic: the topic's index.
    :param timestamp: milliseconds since 1970; 0 for the time of sending.
    """
    table = np.zeros(1, dtype=RECORD)
    data = (key or b"") + (value or b"")
    table[0]["key_length"] = -1 if key is None else len(key)
    table[0]["value"] = len(key or b"")
    table[0]["value_length"] = -1 if value is None else len(value)
    table[0]["topic"], table[0]["partition"], table[0]["time"] = topic, partition, timestamp
    return Records(table, np.frombuffer(bytearray(data or b"\0"), dtype=np.uint8), 0)


def tombstones(topic: int, keys: Sequence[tuple[int, bytes]]) -> Records:
    """Tombstones for keys, each with its partition.

    :param topic: the topic's index.
    """
    table = np.zeros(len(keys), dtype=RECORD)
    lengths = np.array([len(key) for _, key in keys], dtype=np.int64)
    table["key_length"] = lengths
    table["key"] = np.cumsum(lengths) - lengths
    table["value_length"] = -1
    table["topic"] = topic
    table["partition"] = [partition for partition, _ in keys]
    return Records(table, np.frombuffer(bytearray(b"".join(key for _, key in keys) or b"\0"), dtype=np.uint8), 0)


#: a batch without any
NO_RECORDS = tombstones(0, [])


def keyed(topic: int, records: Sequence[tuple[bytes, bytes, int]]) -> Records:
    """Records without headers for the first partition of a topic, each with its key, its value and its timestamp.

    :param topic: the topic's index.
    """
    table = np.zeros(len(records), dtype=RECORD)
    lengths = np.array([(len(key), len(value)) for key, value, _ in records], dtype=np.int64).reshape(-1, 2)
    starts = np.cumsum(lengths).reshape(-1, 2) - lengths
    table["key_length"], table["value_length"] = lengths.T
    table["key"], table["value"] = starts.T
    table["topic"] = topic
    table["time"] = [time for _, _, time in records]
    data = b"".join(part for key, value, _ in records for part in (key, value))
    return Records(table, np.frombuffer(bytearray(data or b"\0"), dtype=np.uint8), 0)


def merged(first: Records, second: Records) -> Records:
    """Records of one batch, in the order of their rows or changes."""
    if not len(first) or not len(second):
        return first if len(first) else second
    behind = second.table.copy()
    for part in ("key", "value", "headers"):
        behind[part] += len(first.data)
    table = np.concatenate([first.table, behind])
    order = np.argsort(table["row"], kind="stable")
    return Records(table[order], np.concatenate([first.data, second.data]), first.headers, first.label)


class Publisher:
    """A producer under one transactional id.

    :param config: the user's properties of librdkafka (servers, security, tuning).
    :param transactional_id: names the work (slot and stream, or slot and lane), never the process that does it.
    :param topics: all topics that it will write to; records name them by their index.
    :param transaction_timeout: seconds after which the broker aborts a transaction whose producer is silent.
    :param waiting: called while a server is not available; it sleeps, or raises to give up.
    :param partitions: how many partitions of other topics than the state topic there are; each may have a batch under
        way.
    :param timed: for each topic, which commit times may be timestamps of its records; by default, those that a broker
        takes.
    :raises Refused: a property is no number.
    """

    def __init__(
        self,
        config: Mapping[str, str],
        transactional_id: str,
        topics: Sequence[str],
        *,
        transaction_timeout: float,
        waiting: Waiting,
        partitions: int = 1,
        timed: Sequence[CommitTimes] | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self._topics = list(topics)
        self._waiting, self._timeout = waiting, transaction_timeout
        self._config = transactional_config(
            {
                "linger.ms": str(_LINGER_MS),
                "compression.type": "lz4",
                "batch.size": "1000000",
                "batch.num.messages": str(BATCH),
                **config,
            },
            transactional_id,
            transaction_timeout,
        )
        self._config |= room(self._config, partitions)
        self._counts = rd.counters()
        self._heard = Heard()
        self._failed = rd.error_callback(functools.partial(hear, self._heard))
        self._handle = 0
        self._rkts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        usual = [(FOR_EVER, HOUR)] * len(topics)
        self._timed = np.array(usual if timed is None else timed, dtype=np.int64).reshape(-1, 2)
        self._handles = rd.handles(0, self._rkts, self._timed)
        #: when the transaction was begun; when its first record, or the last one that is announced, was handed over
        self._started, self._first, self._since = 0.0, 0.0, 0.0
        self._deadline, self._divisible = math.inf, True
        #: whether a transaction is open
        self.begun = False
        #: records and bytes that were handed over in this transaction, and seconds for which it has waited for Kafka
        self._sent, self.size, self.seconds = 0, 0, 0.0

    # ------------------------------------------------------------------ life
    def open(self) -> None:
        """Make the producer, fetch all topics' metadata and initialise: the producer that used the id before is fenced,
        and its open transaction is ended. The state must be read afterwards, before the first record is sent.

        :raises Refused: the broker denies the id, a topic does not exist or is denied, or a property is unknown.
        :raises NewProducerNeeded: the initialisation failed.
        """
        self.close()
        self._heard.refusal = ""
        rd.reset(self._counts)
        try:
            self._handle = rd.make_producer(self._config, self._counts, self._failed)
        except rd.ConfigRefused as error:
            raise unknown_property(str(error)) from None
        handles = [rd.topic_new(self._handle, t.encode(), None) for t in self._topics]
        if None in handles:
            raise unknown_property(f"of topics: {rd.name(rd.last_error())}")
        self._rkts = np.array(handles, dtype=np.int64)
        self._handles = rd.handles(self._handle, self._rkts, self._timed)
        # before the first transaction: a record for a topic without metadata registers partition -1 in the transaction
        # all at once, since of thousands, one after the other would take minutes where the broker is far away: so they
        # are only if there is no answer in time, which may be too large for a thin link
        errors = self._metadata(None) or {}
        topics = list(zip(self._topics, self._rkts, strict=True))
        left = [(topic, rkt) for topic, rkt in topics if errors.get(topic) != 0]
        # one topic is fetched once more: after the first answer, which names the brokers, librdkafka moves from the
        # bootstrap server to one of them. An initialisation before that one is connected finds no coordinator, and is
        # only repeated half a second later
        for topic, rkt in [*left, *topics[:1]]:
            self._fetch(topic, int(rkt))
        self._call(
            f"initialising transactional id {self.transactional_id!r}",
            lambda: rd.init_transactions(self._handle, _SLICE_MS),
        )

    def _metadata(self, rkt: int | None) -> dict[str, int] | None:
        """The error codes of one topic, or of all that the producer has; None if there was no answer, which was waited
        for once."""
        found = ctypes.c_void_p()
        code = rd.metadata(self._handle, 0, rkt, ctypes.byref(found), 2000)
        if not found:
            self._wait(f"Kafka does not answer: {rd.name(code)}")
            return None
        errors = topic_errors(found.value or 0)
        rd.metadata_destroy(found)
        return errors

    def _fetch(self, topic: str, rkt: int) -> None:
        unknown = 0
        while True:
            errors = self._metadata(rkt)
            if errors is None:
                unknown = 0  # the first broker that is back may not know any topic for a moment
            else:
                class_error = errors.get(topic, KafkaError.UNKNOWN_TOPIC_OR_PART)
                if class_error == 0:
                    return
                if denied(class_error):
                    raise Refused(f"Kafka denies every access to topic {topic!r}.", GRANT)
                # a topic that was just created becomes known to every broker only after a moment
                if unknown >= 50:
                    raise Refused(
                        f"Topic {topic!r} cannot be used: {rd.name(class_error)}.", "Create it, or check its name."
                    )
                unknown += 1
                time.sleep(0.1)

    def close(self) -> None:
        """Close the producer. A transaction that was begun and not gone on with is aborted; another that is open is
        ended by the next producer with this id, or by its time-out."""
        if self.begun:
            self._abort()
        if self._handle:
            rd.purge(self._handle, rd.PURGE_ALL)
            rd.poll(self._handle, 0)
            for rkt in self._rkts:
                rd.topic_destroy(int(rkt))
            rd.destroy(self._handle)
            self._handle = 0

    # ------------------------------------------------------------------ one transaction
    def begin(self, first: Records) -> None:
        """Begin the transaction that :meth:`transaction` goes on with, by a record: work that is done in the following
        millisecond costs no time, see :data:`_ANNOUNCED`.

        :raises RecordRefused: see :meth:`produce`.
        :raises NewProducerNeeded: see :meth:`produce`.
        """
        self._begin()
        self.produce(first)

    def _begin(self) -> None:
        rd.reset(self._counts)
        self._sent, self.size, self.seconds = 0, 0, 0.0
        self._started = time.monotonic()
        self._call("beginning a transaction", lambda: rd.begin_transaction(self._handle))
        self.begun = True

    @contextlib.contextmanager
    def transaction(self, *, divisible: bool = True):  # type: ignore[no-untyped-def]
        """Begin a transaction, unless one was begun; commit it at the end of the block, or abort it if the block
        raises.

        :param divisible: whether less can be published at a time; otherwise Kafka has nearly all of the time-out for
            it.
        :raises TooSlow: Kafka has not taken its records in half of the time-out.
        :raises NewProducerNeeded: the transaction could not be committed; nothing of it is visible, or its outcome is
            unknown, and only the state shows it.
        :raises RecordRefused: the broker refuses a record for good.
        :raises Refused: the broker denies the id or a topic.
        """
        if not self.begun:
            self._begin()
        self._divisible = divisible
        self._deadline = self._started + self._timeout * (_IN_TIME if divisible else _AT_LAST)
        try:
            yield self
        except NewProducerNeeded:
            raise
        except BaseException:
            self._abort()
            raise
        else:
            self._commit()
        finally:
            self.begun = False

    def produce(self, records: Records) -> None:
        """Add records to the open transaction; waits while librdkafka's queue is full.

        :raises RecordRefused: the broker refuses a record for good.
        :raises TooSlow: the queue has been full until now, half of the time-out after the transaction's beginning.
        :raises NewProducerNeeded: producing failed in another way.
        """
        if not len(records):
            return
        self._since = time.monotonic()
        try:
            self._produce(records)
        finally:
            self._note_wait()

    def _note_wait(self) -> None:
        """Add what was waited for Kafka since this was noted last, in a call that is under way."""
        now = time.monotonic()
        self.seconds, self._since = self.seconds + now - self._since, now

    def _produce(self, records: Records) -> None:
        now = int(time.time() * 1000)
        label = np.frombuffer(bytearray(records.label.encode()), dtype=np.uint8)
        i, patience = 0, _FULL_MS
        while i < len(records):
            i, code = rd.produce(self._handles, records.table, i, records.data, records.headers, label, now)
            if code == rd.QUEUE_FULL:
                if rd.poll(self._handle, patience):
                    patience = _FULL_MS
                else:
                    rd.flush(self._handle, 1)
                    patience = min(2 * patience, _SLICE_MS)
                self._raise_if_failed()
                if time.monotonic() > self._deadline:
                    self._sent += i
                    self.size += int(records.sizes()[:i].sum())
                    raise self._too_slow()
            elif code in rd.REJECTIONS:
                raise RecordRefused(
                    f"Kafka refuses a record of topic {self._topics[records.table[i]['topic']]!r}: {rd.name(code)}.",
                    i,
                    code,
                )
            elif code:
                if code == KafkaError._STATE:
                    # a partition of an earlier record was refused; a commit only says why
                    self._call("producing", lambda: rd.commit_transaction(self._handle, _SLICE_MS))
                raise NewProducerNeeded(f"Producing failed: {rd.name(code)}.")
        if not self._sent or time.monotonic() - self._first > _ANNOUNCED:
            self._first = time.monotonic()
        self._sent += len(records)
        self.size += int(records.sizes().sum())
        rd.poll(self._handle, 0)

    def attempt(self, records: Sequence[Records]) -> None:
        """Send these records in a transaction that is then aborted; the producer must not be used again.

        :raises RecordRefused: the broker refuses one of them.
        :raises NewProducerNeeded: some were not confirmed for another reason.
        """
        with contextlib.suppress(_Undone), self.transaction():
            for each in records:
                self.produce(each)
            self.drain()
            if failed := int(self._counts["failed"]):
                raise NewProducerNeeded(
                    f"{failed} records were not confirmed: {rd.name(int(self._counts['first_error']))}."
                )
            raise _Undone

    def drain(self) -> None:
        """Wait until every record of the open transaction is confirmed or refused.

        :raises RecordRefused: one was refused.
        """
        while rd.outq_len(self._handle):
            rd.flush(self._handle, 100)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        code = int(self._counts["first_error"])
        if code in rd.REJECTIONS:
            raise RecordRefused(f"Kafka refuses a record: {rd.name(code)}.", int(self._counts["first_failed"]), code)

    def _too_slow(self) -> TooSlow:
        """The error of the open transaction, which is aborted."""
        self._note_wait()
        confirmed = self.size * int(self._counts["confirmed"]) // max(1, self._sent)
        self._abort()
        divisible = self._divisible and self._sent > 1
        in_time = (
            f"half of transaction_timeout ({self._timeout:g} s)"
            if self._divisible
            else f"transaction_timeout ({self._timeout:g} s)"
        )
        raised = "" if divisible else " They cannot be published apart: raise transaction_timeout."
        return TooSlow(
            f"Kafka has confirmed {confirmed:,} of {self.size:,} bytes in {self.seconds:.0f} s, so that they cannot be "
            f"committed within {in_time}: a quota, a slow link, or an outage.{raised}",
            confirmed,
            self.seconds,
            divisible=divisible,
        )

    def _commit(self) -> None:
        self._since = time.monotonic()
        if self._sent and (left := self._first + _ANNOUNCED - self._since) > 0:
            time.sleep(left)
        try:
            self._call("committing", lambda: rd.commit_transaction(self._handle, _SLICE_MS), in_time=True)
        except (NewProducerNeeded, Refused):
            # if the commit failed because the broker refused a record, report that record
            self._raise_if_failed()
            raise
        finally:
            self._note_wait()
        if self._counts["confirmed"] != self._sent:
            raise NewProducerNeeded(f"{self._sent} records were sent but {self._counts['confirmed']} confirmed.")

    def _abort(self) -> None:
        """Abort the transaction now, so that readers need not wait for its time-out. The producer must not be used
        again: a delayed request of the aborted transaction could become part of its next one, since both have the same
        epoch in protocol v1."""
        self.begun = False
        error = rd.abort_transaction(self._handle, 5 * _SLICE_MS)
        if error:
            rd.error_destroy(error)

    def _wait(self, what: str) -> None:
        """Wait for the broker once; if it rejects the login, ``waiting`` is called with :class:`CredentialsRefused`."""
        rd.poll(self._handle, 0)
        self._waiting(self._heard.outage(what, self._config))

    def _call(self, what: str, call: Callable[[], int | None], *, in_time: bool = False) -> None:
        """Make a transactional call, and repeat it after retriable errors, which include an unknown outcome.

        :param in_time: whether to give the transaction up at its deadline, if records are not confirmed: then its end
            was not sent.
        :raises TooSlow: it was given up.
        :raises NewProducerNeeded: it failed in another way.
        :raises Refused: the broker denies the id or a topic, or allows no such time-out.
        """
        while error := call():
            code = rd.error_code(error)
            text = rd.error_string(error).decode(errors="replace")
            fatal, retriable, abort = (
                rd.error_is_fatal(error),
                rd.error_is_retriable(error),
                rd.error_txn_requires_abort(error),
            )
            rd.error_destroy(error)
            if refused := refusal(code, self.transactional_id, self._topics):
                if abort:
                    self._abort()
                raise refused
            if retriable and not fatal:
                if in_time and time.monotonic() > self._deadline and rd.outq_len(self._handle):
                    raise self._too_slow()
                self._wait(f"Kafka does not answer ({what}: {text.rstrip('.')}).")
                continue
            if in_time and int(self._counts["first_error"]) == KafkaError._MSG_TIMED_OUT:
                raise self._too_slow()  # librdkafka has given records up before the deadline came
            if abort:
                self._abort()
            raise NewProducerNeeded(f"{what[0].upper()}{what[1:]} failed: {rd.err2name(code).decode()}: {text}")
