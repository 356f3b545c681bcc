"""librdkafka's C API, from confluent-kafka's wheel, for whole batches.

A Python call for each record would cost more than everything else together. Here, a compiled loop calls
``rd_kafka_produce_batch``, or ``rd_kafka_produceva`` for records with headers or a time of their own, and a compiled
callback counts the delivery reports. Structures and numbers are those of rdkafka.h, whose ABI is stable and public.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import confluent_kafka.cimpl
import numba
import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError

from airflow_bottledwater.compiled import callback, callee, compiled, external, inlined, types
from airflow_bottledwater.encoding.kernels.reading import i32
from airflow_bottledwater.encoding.layout import Rows, int64s
from airflow_bottledwater.encoding.wire import FLAG_REREAD, FLAG_XID_SHIFT, HEADER_XID
from airflow_bottledwater.pipeline.table import MOST_HEADERS

_library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
_pointer, _int, _text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_library, name)
    function.restype, function.argtypes = result, arguments
    return function


conf_new = _function("rd_kafka_conf_new", _pointer)
conf_set = _function("rd_kafka_conf_set", _int, _pointer, _text, _text, _text, ctypes.c_size_t)
conf_destroy = _function("rd_kafka_conf_destroy", None, _pointer)
conf_set_opaque = _function("rd_kafka_conf_set_opaque", None, _pointer, _pointer)
conf_set_error_cb = _function("rd_kafka_conf_set_error_cb", None, _pointer, _pointer)
conf_set_dr_msg_cb = _function("rd_kafka_conf_set_dr_msg_cb", None, _pointer, _pointer)
new = _function("rd_kafka_new", _pointer, _int, _pointer, _text, ctypes.c_size_t)
destroy = _function("rd_kafka_destroy", None, _pointer)
topic_new = _function("rd_kafka_topic_new", _pointer, _pointer, _text, _pointer)
last_error = _function("rd_kafka_last_error", _int)
topic_destroy = _function("rd_kafka_topic_destroy", None, _pointer)
metadata = _function("rd_kafka_metadata", _int, _pointer, _int, _pointer, _pointer, _int)
metadata_destroy = _function("rd_kafka_metadata_destroy", None, _pointer)
poll = _function("rd_kafka_poll", _int, _pointer, _int)
flush = _function("rd_kafka_flush", _int, _pointer, _int)
outq_len = _function("rd_kafka_outq_len", _int, _pointer)
purge = _function("rd_kafka_purge", _int, _pointer, _int)
err2str = _function("rd_kafka_err2str", _text, _int)
err2name = _function("rd_kafka_err2name", _text, _int)
init_transactions = _function("rd_kafka_init_transactions", _pointer, _pointer, _int)
begin_transaction = _function("rd_kafka_begin_transaction", _pointer, _pointer)
commit_transaction = _function("rd_kafka_commit_transaction", _pointer, _pointer, _int)
abort_transaction = _function("rd_kafka_abort_transaction", _pointer, _pointer, _int)
error_code = _function("rd_kafka_error_code", _int, _pointer)
error_string = _function("rd_kafka_error_string", _text, _pointer)
error_is_fatal = _function("rd_kafka_error_is_fatal", _int, _pointer)
error_is_retriable = _function("rd_kafka_error_is_retriable", _int, _pointer)
error_txn_requires_abort = _function("rd_kafka_error_txn_requires_abort", _int, _pointer)
error_destroy = _function("rd_kafka_error_destroy", None, _pointer)
topic_partition_list_new = _function("rd_kafka_topic_partition_list_new", _pointer, _int)
topic_partition_list_add = _function("rd_kafka_topic_partition_list_add", _pointer, _pointer, _text, ctypes.c_int32)
topic_partition_list_destroy = _function("rd_kafka_topic_partition_list_destroy", None, _pointer)
topic_partition_list_set_offset = _function(
    "rd_kafka_topic_partition_list_set_offset", _int, _pointer, _text, ctypes.c_int32, ctypes.c_int64
)
poll_set_consumer = _function("rd_kafka_poll_set_consumer", _int, _pointer)
assign = _function("rd_kafka_assign", _int, _pointer, _pointer)
queue_get_consumer = _function("rd_kafka_queue_get_consumer", _pointer, _pointer)
queue_destroy = _function("rd_kafka_queue_destroy", None, _pointer)
consume_batch_queue = _function(
    "rd_kafka_consume_batch_queue", ctypes.c_ssize_t, _pointer, _int, _pointer, ctypes.c_size_t
)
consumer_close = _function("rd_kafka_consumer_close", _int, _pointer)
message_headers = _function("rd_kafka_message_headers", _int, _pointer, _pointer)
header_get_last = _function("rd_kafka_header_get_last", _int, _pointer, _text, _pointer, _pointer)

PRODUCER, CONSUMER = 0, 1  # rd_kafka_type_t
BEGINNING = -2  # RD_KAFKA_OFFSET_BEGINNING
PURGE_ALL = 0x1 | 0x2  # RD_KAFKA_PURGE_F_QUEUE | _INFLIGHT
QUEUE_FULL = -184  # RD_KAFKA_RESP_ERR__QUEUE_FULL

#: rd_kafka_message_t
MESSAGE = np.dtype(
    [
        ("err", np.int32),
        ("rkt", np.int64),
        ("partition", np.int32),
        ("payload", np.int64),
        ("len", np.int64),
        ("key", np.int64),
        ("key_len", np.int64),
        ("offset", np.int64),
        ("private", np.int64),
    ],
    align=True,
)
#: rd_kafka_vtype_t
_VT_RKT, _VT_PARTITION, _VT_VALUE, _VT_KEY, _VT_OPAQUE, _VT_FLAGS, _VT_TIME, _VT_HEADER = 2, 3, 4, 5, 6, 7, 8, 9
#: rd_kafka_vu_t: the type, and a union of 64 bytes, of which at most three words are used (a header's name, value and
#: length)
_ARGUMENT = np.dtype(
    {
        "names": ["vtype", "first", "second", "third"],
        "formats": [np.int64, np.int64, np.int64, np.int64],
        "offsets": [0, 8, 16, 24],
        "itemsize": 72,
    }
)
#: the arguments of one record: topic, flags, number, partition, time, key, value, six headers, and those of an outbox
_ARGUMENTS = 13 + MOST_HEADERS
#: records that are handed over by one call, each as an rd_kafka_message_t
_BATCH = 512
#: bytes for the texts of a position, an op, a time (of up to 19 digits, up to this place) and a transaction id (of up
#: to 10)
_TEXT_BYTES, _TIME_END = 72, 56
_POSITION_BYTES = 25
_COPY, _PARTITION = 0x2, 0x8  # RD_KAFKA_MSG_F_COPY, _PARTITION (each message's own)

_produce_batch = external(
    _library, "rd_kafka_produce_batch", types.int32, types.intp, types.int32, types.int32, types.intp, types.int32
)
_produceva = external(_library, "rd_kafka_produceva", types.intp, types.intp, types.intp, types.intp)
_error_code = external(_library, "rd_kafka_error_code", types.int32, types.intp)
_error_destroy = external(_library, "rd_kafka_error_destroy", types.void, types.intp)
#: for compiled code
message_destroy = external(_library, "rd_kafka_message_destroy", types.void, types.intp)
compiled_message_headers = external(_library, "rd_kafka_message_headers", types.int32, types.intp, types.intp)
compiled_header_get_last = external(
    _library, "rd_kafka_header_get_last", types.int32, types.intp, types.intp, types.intp, types.intp
)
msg_partitioner_murmur2 = external(
    _library,
    "rd_kafka_msg_partitioner_murmur2",
    types.int32, types.intp, types.intp, types.intp, types.int32, types.intp, types.intp,
)  # fmt: skip

#: names and constant values of headers, as C strings, at these places
_STRINGS = np.frombuffer(b"op\0pos\0toast\0reread\0xid\0snapshot\0time\0", dtype=np.uint8)
_AT_OP, _AT_POS, _AT_TOAST, _AT_REREAD, _AT_XID, _AT_SNAPSHOT, _AT_TIME = 0, 3, 7, 13, 20, 24, 33
_HEX = np.frombuffer(b"0123456789ABCDEF", dtype=np.uint8)

#: the counters of the delivery reports
_COUNTS = int64s("confirmed", "failed", "first_error", "first_failed")
#: the type of an error callback: void (rd_kafka_t *rk, int err, const char *reason, void *opaque)
_ERROR_CALLBACK = ctypes.CFUNCTYPE(None, _pointer, _int, _text, _pointer)

#: a broker's rejection of a record or its topic: UNKNOWN_TOPIC_OR_PARTITION, INVALID_MSG, MSG_SIZE_TOO_LARGE,
#: TOPIC_EXCEPTION, TOPIC_AUTHORIZATION_FAILED, INVALID_TIMESTAMP, POLICY_VIOLATION, INVALID_RECORD
#: (rd_kafka_resp_err_t), and librdkafka's _UNKNOWN_TOPIC, and _INVALID_DIFFERENT_RECORD for the records that only share
#: the batch of a refused one
REJECTIONS = (3, 2, 10, 17, 29, 32, 44, 87, -188, -138)


@callee
def _is_rejection(error):
    return error in REJECTIONS


@callback(types.void, types.intp, types.voidptr, types.voidptr)
def _delivered(producer, message_address, counts_address):
    """A delivery report. What fails with a refused record (its partition's sequence, the transaction's end) must not
    hide it."""
    message = numba.carray(message_address, 1, MESSAGE)[0]
    counts = numba.carray(counts_address, 1, _COUNTS)[0]
    error = np.int64(message.err)
    if error == 0:
        counts.confirmed += 1
        return
    counts.failed += 1
    rejection, known = _is_rejection(error), _is_rejection(counts.first_error)
    if known and not rejection:
        return
    if counts.first_error == 0 or (rejection and not known) or message.private < counts.first_failed:
        counts.first_error = error
        counts.first_failed = message.private


def error_callback(hear: Callable[[KafkaError], None]) -> Any:
    """The callback of :func:`make_producer` that passes on what librdkafka reports of its connections, which the calls
    themselves only report as a time-out. It is called from those that serve events, as rd_kafka_poll does.

    :param hear: must not refer to the object that has the producer, which would keep both.
    """
    return _ERROR_CALLBACK(lambda _, code, text, __: hear(KafkaError(code, (text or b"").decode(errors="replace"))))


def counters() -> Any:
    """New counters for :func:`make_producer`, by their names."""
    return np.zeros(1, dtype=_COUNTS)[0]


def reset(counts: Any) -> None:
    """Set all counters to 0."""
    for field in _COUNTS.names or ():
        counts[field] = 0


class Handles(NamedTuple):
    """The producer, its topics and the scratch memory that :func:`produce` works with.

    :param producer: the address of the rd_kafka_t.
    :param topics: the addresses of the rd_kafka_topic_t, by the topic's number.
    :param timed: for each topic, how many milliseconds a commit time may lie before and behind now to be the timestamp
        of its record; else that gets it as a header.
    :param messages: scratch memory for a batch of records.
    :param arguments: scratch memory for a record with headers or a time of its own; ``texts`` is that for the values of
        its headers.
    """

    producer: int
    topics: npt.NDArray[np.int64]
    timed: npt.NDArray[np.int64]
    messages: Rows
    arguments: Rows
    texts: npt.NDArray[np.uint8]


def handles(producer: int, topics: npt.NDArray[np.int64], timed: npt.NDArray[np.int64]) -> Handles:
    """The handles of a producer and its topics, with scratch memory of their own."""
    messages, arguments = np.zeros(_BATCH, dtype=MESSAGE), np.zeros(_ARGUMENTS, dtype=_ARGUMENT)
    return Handles(producer, topics, timed, messages, arguments, np.zeros(_TEXT_BYTES, dtype=np.uint8))


@callee
def _plain(handles, records, start, base):
    """Hand over the next records of one topic that have no headers and no time, up to a full batch; returns (next
    record, error code)."""
    messages = handles.messages
    topic = records[start].topic
    n = 0
    i = start
    while i < records.size and n < messages.size and records[i].time == 0 and records[i].topic == topic:
        record, message = records[i], messages[n]
        message.partition = record.partition
        message.payload = base + record.value if record.value_length >= 0 else 0
        message.len = max(record.value_length, 0)
        message.key = base + record.key if record.key_length >= 0 else 0
        message.key_len = max(record.key_length, 0)
        message.private = i
        n += 1
        i += 1
    made = _produce_batch(
        handles.topics[topic], np.int32(-1), np.int32(_COPY | _PARTITION), messages.ctypes.data, np.int32(n)
    )
    if made < n:
        # if the queue is full, all records that follow are refused, too (rd_kafka_produce_batch, src/rdkafka_msg.c):
        # none is skipped
        for k in range(n):
            if messages[k].err != 0:
                return start + k, np.int64(messages[k].err)
    return i, np.int64(0)


@inlined
def _argument(argument, vtype, first, second, third):
    argument.vtype = vtype
    argument.first = first
    argument.second = second
    argument.third = third


@callee
def _write_position(lsn, ordinal, texts):
    """Write a position as text: 16 hexadecimal digits, a slash, and 8 more digits."""
    for k in range(16):
        texts[k] = _HEX[(lsn >> (60 - 4 * k)) & 15]
    texts[16] = 47
    for k in range(8):
        texts[17 + k] = _HEX[(ordinal >> (28 - 4 * k)) & 15]


@callee
def _write_number(number, end, texts):
    """Write a number in decimal, up to the place ``end``; returns where it begins."""
    at = end
    while number > 0:
        at -= 1
        texts[at] = np.uint8(48 + number % 10)
        number //= 10
    return at


@callee
def _add_headers(record, headers, label, timed, arguments, n, texts):
    """Add the headers op, pos, toast, xid, time and snapshot to the arguments; returns how many arguments there are
    then."""
    names, values = _STRINGS.ctypes.data, texts.ctypes.data
    if label.size:
        _argument(arguments[n], _VT_HEADER, names + _AT_SNAPSHOT, label.ctypes.data, label.size)
        n += 1
    if headers == 0:
        return n
    _write_position(record.lsn, record.ordinal, texts)
    texts[_POSITION_BYTES] = np.uint8(record.event)
    _argument(arguments[n], _VT_HEADER, names + _AT_OP, values + _POSITION_BYTES, 1)
    _argument(arguments[n + 1], _VT_HEADER, names + _AT_POS, values, _POSITION_BYTES)
    n += 2
    # not on the tombstone of an update that changed the key, which has no value
    if record.flags & FLAG_REREAD and record.value_length >= 0:
        _argument(arguments[n], _VT_HEADER, names + _AT_TOAST, names + _AT_REREAD, 6)
        n += 1
    xid = record.flags >> FLAG_XID_SHIFT
    if headers & HEADER_XID and xid > 0:
        at = _write_number(xid, texts.size, texts)
        _argument(arguments[n], _VT_HEADER, names + _AT_XID, values + at, texts.size - at)
        n += 1
    if record.time > 0 and not timed:
        at = _write_number(record.time, _TIME_END, texts)
        _argument(arguments[n], _VT_HEADER, names + _AT_TIME, values + at, _TIME_END - at)
        n += 1
    return n


@callee
def _add_own_headers(record, data, arguments, n):
    """Add the headers that a record has of its own (kernels.outbox) to the arguments; returns how many there are
    then."""
    p = record.headers
    while p < record.headers + record.headers_length and n < arguments.size:
        name = data.ctypes.data + p + 4
        p += 4 + i32(data, p)
        length = np.int64(i32(data, p))
        # of NULL, there is no address
        _argument(arguments[n], _VT_HEADER, name, data.ctypes.data + p + 4 if length >= 0 else 0, max(length, 0))
        n += 1
        p += 4 + max(length, 0)
    return n


@callee
def _single(handles, record, i, data, headers, label, now):
    """Hand over one record with its headers and time; returns an error code."""
    arguments, base = handles.arguments, data.ctypes.data
    earliest, latest = now - handles.timed[record.topic, 0], now + handles.timed[record.topic, 1]
    timed = record.time > 0 and earliest <= record.time <= latest
    time = record.time if timed else now
    _argument(arguments[0], _VT_RKT, handles.topics[record.topic], 0, 0)
    _argument(arguments[1], _VT_FLAGS, _COPY, 0, 0)
    _argument(arguments[2], _VT_OPAQUE, i, 0, 0)
    _argument(arguments[3], _VT_PARTITION, record.partition, 0, 0)
    _argument(arguments[4], _VT_TIME, time, 0, 0)
    n = 5
    if record.key_length >= 0:
        _argument(arguments[n], _VT_KEY, base + record.key, record.key_length, 0)
        n += 1
    if record.value_length >= 0:
        _argument(arguments[n], _VT_VALUE, base + record.value, record.value_length, 0)
        n += 1
    n = _add_headers(record, headers, label, timed, arguments, n, handles.texts)
    if record.headers_length > 0:
        n = _add_own_headers(record, data, arguments, n)
    error = _produceva(handles.producer, arguments.ctypes.data, n)
    if error == 0:
        return np.int64(0)
    code = np.int64(_error_code(error))
    _error_destroy(error)
    return code


@compiled
def produce(handles, records, start, data, headers, label, now):
    """Hand the records from ``start`` on to librdkafka; returns (next record, error code).

    :param handles: see :func:`handles`.
    :param data: the bytes that the records point into.
    :param headers: 0 for none; otherwise ``op`` and ``pos`` are written, and with ``HEADER_XID`` also the transaction's
        id.
    :param label: the value of the header ``snapshot``; without it, its size is 0.
    :param now: milliseconds since 1970: the timestamp of records that have none, or one that the broker would refuse.
    """
    base = data.ctypes.data
    i = start
    while i < records.size:
        if headers == 0 and label.size == 0 and records[i].time == 0:
            i, code = _plain(handles, records, i, base)
        else:
            code = _single(handles, records[i], i, data, headers, label, now)
            i += 1 if code == 0 else 0
        if code != 0:
            return i, code
    return np.int64(records.size), np.int64(0)


class ConfigRefused(ValueError):
    """librdkafka does not know a property, or does not accept its value."""


def make_producer(config: Mapping[str, str], counts: Any, failed: Any) -> int:
    """Make a producer, an ``rd_kafka_t``, whose delivery reports are counted; returns its address.

    :param counts: the result of :func:`counters`; it must live as long as the producer.
    :param failed: the result of :func:`error_callback`, likewise.
    :raises ConfigRefused: librdkafka does not know a property, or does not accept its value.
    """
    conf = _conf(config)
    conf_set_opaque(conf, counts.__array_interface__["data"][0])
    conf_set_dr_msg_cb(conf, _delivered.address)
    conf_set_error_cb(conf, failed)
    return _new(PRODUCER, conf)


def make_consumer(config: Mapping[str, str], failed: Any) -> int:
    """An ``rd_kafka_t`` that reads.

    :param failed: the result of :func:`error_callback`; it must live as long as the consumer.
    :raises ConfigRefused: a property or its value.
    """
    conf = _conf(config)
    conf_set_error_cb(conf, failed)
    return _new(CONSUMER, conf)


def _conf(config: Mapping[str, str]) -> Any:
    message = ctypes.create_string_buffer(512)
    conf = conf_new()
    for name, value in config.items():
        if conf_set(conf, name.encode(), str(value).encode(), message, len(message)) != 0:
            conf_destroy(conf)
            raise ConfigRefused(message.value.decode(errors="replace"))
    return conf


def _new(kind: int, conf: Any) -> int:
    message = ctypes.create_string_buffer(512)
    handle = new(kind, conf, message, len(message))
    if not handle:
        conf_destroy(conf)
        raise ConfigRefused(message.value.decode(errors="replace"))
    return int(handle)


def name(code: int) -> str:
    """The name of an error code, with its meaning."""
    return f"{err2name(code).decode()} ({err2str(code).decode(errors='replace')})"
