"""The shared topic ``_bottledwater``, in which all pipelines of a Kafka have their statuses, heartbeats and requests.

A process has one client for each Kafka, whoever uses it: jobs, the command, tasks, sensors and triggers. It reads the
topic once, with one consumer, and tells its subscribers of the records that they want. :func:`read` makes none where
there is none: who asks once has nothing to listen to.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_bottledwater.errors import BottledWaterError, Outage

# confluent-kafka is imported where it is needed, since a DAG processor imports this and needs no client
if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

    from airflow_bottledwater.state.store import RawRecords

log = logging.getLogger(__name__)

#: a record that was written: its key and its value, None for a tombstone
Change = tuple[str, dict[str, Any] | None]

#: seconds without a further record after which reading to the topic's present end is given up
_READING = 60.0
#: seconds for one wait for records, after which it is seen that the client was closed
_WAITING = 0.1
#: seconds without a record after which Kafka is asked whether it answers, and the longest time between two answers over
#: which it counts as having answered: watches look more often, and no job counts as dead after so short a silence
_ASKED, _GAP = 5.0, 20.0
#: seconds without anything from Kafka after which the topic is read anew: half of the day for which Kafka keeps the
#: tombstones of records that were removed meanwhile
_AWAY = 43_200.0
#: seconds for which records may wait for the broker, and how many are written before it has to acknowledge them: far
#: fewer than fit into the producer's queue
_QUEUED, _AT_ONCE = 10.0, 1000
#: seconds for which it is known at least when a record was removed: far more than the silence after which a job counts
#: as dead. Each job and each request has a key of its own, which is never used again
_REMEMBERED = 86_400.0
#: how many changes wait for a subscriber before only the last of each key is kept
_WAIT_AT_MOST = 1000


class Subscription:
    """What one subscriber wants of the topic; it has to be closed.

    :param wants: whether the record of a key is wanted.
    """

    def __init__(self, topic: ControlTopic, wants: Callable[[str], bool]) -> None:
        self._topic, self._wants = topic, wants
        self._changes: deque[Change] = deque()

    def read(self) -> RawRecords:
        """All records of the topic at its present end, none if it does not exist yet; :meth:`poll` returns what is
        written after them.

        :raises Outage: Kafka does not answer.
        """
        self._topic.read_to_end()
        with self._topic.arrived:
            self._changes.clear()
            return dict(self._topic.records)

    def poll(self, timeout: float = 0.0) -> list[Change]:
        """The wanted records that were written since the last call, in the order in which they were; of many, only the
        last of each key.

        :param timeout: seconds to wait for the first.
        :raises Outage: Kafka does not say whether the topic exists by now.
        """
        self._topic.begin()
        with self._topic.arrived:
            if timeout:
                self._topic.arrived.wait_for(lambda: self._changes, timeout)
            found = list(self._changes)
            self._changes.clear()
            return found

    def take(self, changes: list[Change]) -> None:
        """Keep those of the changes that are wanted; called by the topic."""
        self._changes.extend(change for change in changes if self._wants(change[0]))
        if len(self._changes) > _WAIT_AT_MOST:
            self._changes = deque(last_of_each(self._changes).items())

    def close(self) -> None:
        """End the subscription."""
        self._topic.unsubscribe(self)


def last_of_each(changes: Iterable[Change]) -> dict[str, dict[str, Any] | None]:
    """The last change of each key, in the order of these."""
    found: dict[str, dict[str, Any] | None] = {}
    for key, value in changes:
        found.pop(key, None)
        found[key] = value
    return found


class ControlTopic:
    """The client of the shared topic that all its users in this process have together, by :meth:`of`; each has to close
    it once, the last one closes its connections.

    :ivar records: all records that were read, by their keys, in the order of their offsets.
    :ivar at: the offset behind the last one.
    :ivar arrived: the lock of both, notified when they change.
    :ivar lost: whether the last record that was written here was not delivered: the topic may have been deleted.
    :ivar answering: since when Kafka has answered whenever it was asked, by the monotonic clock: only from then on does
        it mean anything that a record did not change; 0 before it was asked.
    """

    _of: ClassVar[dict[str, ControlTopic]] = {}
    #: reentrant, since a signal's handler (on_kill) may need what the interrupted code has
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, kafka: Mapping[str, str]) -> None:
        self._kafka = dict(kafka)
        self._users = 0
        self._closed = False
        self._reading: threading.Thread | None = None
        self._error: Exception | None = None
        #: whether the topic is to be read from its start by another consumer, and up to where that is nothing new
        self._anew, self._known_to = False, 0
        #: when the producer was made
        self._writer: Producer | None = None
        self._made, self.lost = -math.inf, False
        self._subscriptions: list[Subscription] = []
        self._first_end = math.inf
        self._changed: dict[str, float] = {}
        self._trimmed = time.monotonic()
        self._answered = -math.inf
        #: when Kafka has answered last, by the host's clock, which goes on while the host sleeps
        self._heard = time.time()
        #: when something was read last, by the monotonic clock
        self._read_last = time.monotonic()
        #: one asks Kafka for all that wait for its answer; reentrant as above
        self._asking = threading.RLock()
        self._asked: tuple[float, Exception | None] = (-math.inf, None)
        self.records: RawRecords = {}
        self.at = 0
        self.arrived = threading.Condition(threading.RLock())
        self.answering = 0.0

    @classmethod
    def of(cls, kafka: Mapping[str, str]) -> ControlTopic:
        """The client for these properties, which is also a context manager."""
        with cls._lock:
            found = cls._of.setdefault(_key(kafka), cls(kafka))
            found._users += 1
            return found

    @classmethod
    def used(cls, kafka: Mapping[str, str]) -> bool:
        """Whether this process has a client for these properties."""
        with cls._lock:
            return _key(kafka) in cls._of

    @classmethod
    def _forked(cls) -> None:
        """Make no use of the clients of the process that has forked this one: their threads are not here."""
        cls._of, cls._lock = {}, threading.RLock()

    def __enter__(self) -> ControlTopic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End one use; the last one closes the connections. A look that is under way then ends with an error."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            # a user that comes later gets a new client
            if self._of.get(_key(self._kafka)) is self:
                del self._of[_key(self._kafka)]
            self._closed = True
        with self.arrived:
            reading, writer = self._reading, self._writer
            self.arrived.notify_all()
        if reading is not None:
            reading.join(10)
        if writer is not None:
            writer.flush(2)

    # ---------------------------------------------------------------- reading
    def subscribe(self, wants: Callable[[str], bool]) -> Subscription:
        """Ask to be told of records, beginning with those that are known; this does not wait.

        :param wants: whether the record of a key is wanted.
        """
        made = Subscription(self, wants)
        with self.arrived:
            made.take(list(self.records.items()))
            self._subscriptions.append(made)
        return made

    def unsubscribe(self, subscription: Subscription) -> None:
        """Tell a subscriber nothing more."""
        with self.arrived:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def get(self, key: str, *, now: bool = False) -> tuple[dict[str, Any] | None, float]:
        """A record as it is known (None if there is none), and when it last changed, by this process's monotonic clock
        (0 if it has not changed since the topic was first read, or was removed more than a day ago). While another
        thread asks a Kafka that did not answer, this does not wait for it: in the same threads, others are watched.

        :param now: whether to read to the present end of the topic, which also makes sure that Kafka answers.
        :raises Outage: Kafka does not answer.
        """
        self._look(now, patient=False)
        with self.arrived:
            return self.records.get(key), self._changed.get(key, 0.0)

    def all(self, *, now: bool = False) -> RawRecords:
        """All records, see :meth:`get`.

        :raises Outage: Kafka does not answer.
        """
        self._look(now)
        return self.known()

    def known(self) -> RawRecords:
        """All records that were read so far, without asking Kafka."""
        with self.arrived:
            return dict(self.records)

    def _look(self, now: bool, *, patient: bool = True) -> None:
        # one that is read anew has no record of many keys for a moment
        if now or self.at < self._first_end < math.inf or time.monotonic() - self._answered > _ASKED:
            self.read_to_end(patient=patient)

    def begin(self) -> None:
        """Begin to read as soon as the topic exists; until then, Kafka is asked from time to time.

        :raises Outage: Kafka does not answer.
        """
        if self._reading is None:
            self._look(False)

    def read_to_end(self, *, patient: bool = True) -> None:
        """Read to the present end of the topic, if it exists, which also makes sure that Kafka answers.

        :param patient: whether to wait for a thread that asks Kafka although it did not answer the last time.
        :raises Outage: Kafka does not answer.
        """
        called, (_, error) = time.monotonic(), self._asked
        away = isinstance(error, Outage) and self._answered == -math.inf
        if self._asking.acquire(blocking=patient or not away):
            try:
                began, error = self._asked
                if began < called:
                    began, error = time.monotonic(), None
                    try:
                        self._ask()
                    except Exception as failure:
                        error = failure
                    self._asked = began, error
            finally:
                self._asking.release()
        if error is not None:
            raise error

    def _ask(self) -> None:
        try:
            end = self.end()
            with self.arrived:
                reached = -1
                while self.at < end:
                    if self.at != reached:
                        reached, deadline = self.at, time.monotonic() + _READING
                    late = self._closed or time.monotonic() > deadline
                    # another error than an outage may be gone with the next attempt to read
                    if self._error is not None and (late or isinstance(self._error, BottledWaterError)):
                        raise self._error
                    if late:
                        at = self.at
                        self._begin_anew(end)
                        raise Outage(f"The topic '_bottledwater' was read to offset {at} of {end} only.")
                    self.arrived.wait(1.0)
        except BaseException:
            self._answered = -math.inf
            raise
        self._answers()

    def end(self) -> int:
        """The topic's present end; 0 if there is no such topic. From now on it is read.

        :raises Outage: Kafka does not answer.
        """
        from airflow_bottledwater.kafka.topics import Topics
        from airflow_bottledwater.state.store import CONTROL_TOPIC

        topics = Topics(self._kafka)
        if self._reading is None and CONTROL_TOPIC not in topics.describe([CONTROL_TOPIC], confirm=True):
            return 0
        end = topics.ends(CONTROL_TOPIC, 1)[0]
        with self.arrived:
            if end < self.at:
                # the topic was deleted and created again: its offsets begin anew
                self._begin_anew(end)
            self._first_end, self._known_to = min(self._first_end, end), min(self._known_to, end)
            if self._reading is None and not self._closed:
                reading = threading.Thread(target=self._read, name="control topic", daemon=True)
                reading.start()
                self._reading = reading
        return end

    def unread(self) -> tuple[float, str]:
        """Seconds since something was read last, and why nothing can be read, if that is known. Who writes hears its
        own records, too."""
        with self.arrived:
            return time.monotonic() - self._read_last, str(self._error or "")

    def read_anew(self) -> None:
        """Have the topic read by another consumer: one that is refused, or got stuck, may go on for ever. It has the
        files of certificates as they are now.

        :raises Outage: Kafka does not answer.
        """
        end = self.end()
        with self.arrived:
            # behind the end, what is read would be taken for known: the topic may have been made again
            self._begin_anew(min(end, max(self.at, self._known_to)))

    def _begin_anew(self, end: int) -> None:
        """Have the topic read from its start by another consumer: the one that has read the topic before may never get
        anything of one that was created again (https://github.com/confluentinc/librdkafka/issues/4898). One that was
        away for long does not hear of what was removed.

        :param end: the topic's.
        """
        self.records, self.at, self._anew, self._heard = {}, 0, True, time.time()
        self._first_end = self._known_to = end

    def _answers(self) -> None:
        """Kafka has answered now."""
        now = time.monotonic()
        if now - self._answered > _GAP:
            self.answering = now
        self._answered, self._heard = now, time.time()

    def _read(self) -> None:
        """Read until the client is closed, whatever goes wrong: nobody could be watched or stopped without it."""
        from airflow_bottledwater.state import store

        reader: store.Reader | None = None
        while not self._closed:
            try:
                if reader is not None and self._anew:
                    reader.close()
                    reader = None
                if reader is None:
                    self._anew = False
                    reader = store.Reader(self._kafka, store.CONTROL_TOPIC, committed=False)
                changes = reader.poll(_WAITING)
                if changes or reader.at > self.at:
                    self._arrived(changes, reader.at)
            except Exception as error:
                self._failed(error)
                time.sleep(_WAITING)
        if reader is not None:
            reader.close()

    def _arrived(self, changes: list[Change], at: int) -> None:
        with self.arrived:
            if self._anew:
                return
            if time.time() - self._heard > _AWAY:
                self._begin_anew(at)
                return
            self._error = None
            now = self._read_last = time.monotonic()
            if self.at >= self._first_end:
                self._changed.update(dict.fromkeys((key for key, _ in changes), now))
            for key, value in last_of_each(changes).items():
                self.records.pop(key, None)
                if value is not None:
                    self.records[key] = value
            if now - self._trimmed > _REMEMBERED:
                self._trimmed = now
                kept = {key: at for key, at in self._changed.items() if key in self.records or now - at <= _REMEMBERED}
                self._changed = kept
            if self._known_to:
                # of what is read once more, subscribers are told what is left of it, and no request that was answered
                changes = list(self.records.items()) if at >= self._known_to else []
                self._known_to = self._known_to if at < self._known_to else 0
            for each in self._subscriptions:
                each.take(changes)
            self.at = at
            self._answers()
            self.arrived.notify_all()

    def _failed(self, error: Exception) -> None:
        """Reading has failed; it is said once, until it works again."""
        known = type(error) is type(self._error)
        with self.arrived:
            self._error, self._answered = error, -math.inf
            self.arrived.notify_all()
        if isinstance(error, BottledWaterError) and not known:
            log.info("Statuses and requests cannot be read now: %s", error)
        elif not known:
            log.error("Statuses and requests cannot be read now, the work goes on.", exc_info=error)

    # ---------------------------------------------------------------- writing
    def write(self, records: Mapping[str, dict[str, Any] | None], *, wait: float = _QUEUED) -> None:
        """Write records, or tombstones, in this order.

        :param wait: seconds to wait until the broker has acknowledged them; 0 does not wait, and ignores failures.
        :raises Outage: it has not acknowledged one in time; others may be written.
        """
        from confluent_kafka import KafkaError, KafkaException

        from airflow_bottledwater.state.store import CONTROL_TOPIC, encode

        producer, answers = self._producer(), list["KafkaError | None"]()

        def delivered(error: KafkaError | None, _: object) -> None:
            answers.append(error)
            # a record that is too large says nothing of the producer
            self.lost = error is not None and error.code() != KafkaError.MSG_SIZE_TOO_LARGE

        for number, (key, value) in enumerate(records.items(), 1):
            try:
                producer.produce(CONTROL_TOPIC, encode(value), key.encode(), partition=0, on_delivery=delivered)
            except BufferError:
                if wait:
                    raise Outage("Kafka does not take our status records.") from None
            except KafkaException as error:
                if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                    # an idempotent producer does nothing any more after a fatal error
                    with self.arrived:
                        self._writer = None
                    self.lost = True
                raise Outage(f"Kafka's client does not take our status records: {error}.") from None
            if wait and (number % _AT_ONCE == 0 or number == len(records)):
                _confirm(producer, answers, number, wait)

    def probe(self) -> None:
        """Make sure that Kafka takes records: one that answers those who read may take nothing from those who write,
        heartbeats among it.

        :raises Outage: it does not.
        """
        from airflow_bottledwater.state.control_records import PROBE

        self.write({PROBE: None})

    def _producer(self) -> Producer:
        """The producer, or another one if it does not deliver: it may never find the topic again, as the consumer."""
        from confluent_kafka import Producer

        from airflow_bottledwater.kafka.clients import made, producer_config

        with self.arrived:
            if (before := self._writer) is not None:
                before.poll(0)  # hears what became of the records before
            if before is None or (self.lost and time.monotonic() - self._made >= _QUEUED):
                self._made = time.monotonic()
                own = {"enable.idempotence": True, "linger.ms": 0, "message.timeout.ms": int(_QUEUED * 1000)}
                self._writer = made(Producer, {**producer_config(self._kafka), **own})
            return self._writer


def _key(kafka: Mapping[str, str]) -> str:
    return json.dumps(dict(kafka), sort_keys=True)


os.register_at_fork(after_in_child=ControlTopic._forked)


def _confirm(producer: Producer, answers: list[KafkaError | None], count: int, wait: float) -> None:
    """Wait until the broker has answered for so many records; other threads may take the answers in, too."""
    deadline = time.monotonic() + wait
    while len(answers) < count and time.monotonic() < deadline:
        producer.poll(0.02)
    failed = [each for each in answers if each is not None]
    if failed or len(answers) < count:
        raise Outage(f"Kafka did not take a control record: {failed[0].str() if failed else 'no answer'}.")


def read(kafka: Mapping[str, str]) -> RawRecords:
    """All records of the shared topic, as they are now.

    :param kafka: properties of the client.
    :raises Outage: Kafka does not answer.
    """
    from airflow_bottledwater.state.store import CONTROL_TOPIC, read_records

    if ControlTopic.used(kafka):
        with ControlTopic.of(kafka) as topic:
            return topic.all(now=True)
    return read_records(kafka, CONTROL_TOPIC, committed=False)


def write(kafka: Mapping[str, str], records: Mapping[str, dict[str, Any] | None]) -> None:
    """Write some records to the shared topic, or tombstones, in this order.

    :param kafka: properties of the client.
    :raises Outage: Kafka does not take one; others may be written.
    """
    with ControlTopic.of(kafka) as topic:
        topic.write(records)
