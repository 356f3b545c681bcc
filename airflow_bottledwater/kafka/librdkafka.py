"""librdkafka's C API, from confluent-kafka's wheel, for whole batches.

A Python call per record costs more than everything else together; here a compiled loop calls ``rd_kafka_produce_batch``, or
``rd_kafka_produceva`` for records with headers or a time of their own, and a compiled callback counts the delivery reports.
Structures and numbers: rdkafka.h (its ABI is stable and public).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import confluent_kafka.cimpl
import numba
import numpy as np
import numpy.typing as npt

from airflow_bottledwater.compiled import compiled, external, types
from airflow_bottledwater.encoding.wire import (
    FLAG_REREAD,
    FLAG_XID_SHIFT,
    HEADER_XID,
    R_FLAGS,
    R_KEY,
    R_KEY_LEN,
    R_LSN,
    R_OP,
    R_ORDINAL,
    R_PARTITION,
    R_TIME,
    R_TOPIC,
    R_VALUE,
    R_VALUE_LEN,
)

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
topic_destroy = _function("rd_kafka_topic_destroy", None, _pointer)
metadata = _function("rd_kafka_metadata", _int, _pointer, _int, _pointer, _pointer, _int)
metadata_destroy = _function("rd_kafka_metadata_destroy", None, _pointer)
poll = _function("rd_kafka_poll", _int, _pointer, _int)
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

PRODUCER = 0  # rd_kafka_type_t
PURGE_ALL = 0x1 | 0x2  # RD_KAFKA_PURGE_F_QUEUE | _INFLIGHT
QUEUE_FULL = -184  # RD_KAFKA_RESP_ERR__QUEUE_FULL

# rd_kafka_vtype_t; rd_kafka_vu_t is the type and a union of 64 bytes: nine words
_VT_RKT, _VT_PARTITION, _VT_VALUE, _VT_KEY, _VT_OPAQUE, _VT_FLAGS, _VT_TIME, _VT_HEADER = 2, 3, 4, 5, 6, 7, 8, 9
# rd_kafka_message_t is nine words, too: err, rkt, partition, payload, len, key, key_len, offset, _private
_M_ERROR, _M_PARTITION, _M_VALUE, _M_VALUE_LEN, _M_KEY, _M_KEY_LEN, _M_OPAQUE = 0, 2, 3, 4, 5, 6, 8
_WORDS = 9
#: records handed over at once, for which there are rd_kafka_message_t
_BATCH = 512
#: bytes for the text of a position, an op and a transaction id
_TEXT_BYTES = 48
_COPY, _PARTITION = 0x2, 0x8  # RD_KAFKA_MSG_F_COPY, _PARTITION (each message's own)

_produce_batch = external(
    _library, "rd_kafka_produce_batch", types.int32, types.intp, types.int32, types.int32, types.intp, types.int32
)
_produceva = external(_library, "rd_kafka_produceva", types.intp, types.intp, types.intp, types.intp)
_error_code = external(_library, "rd_kafka_error_code", types.int32, types.intp)
_error_destroy = external(_library, "rd_kafka_error_destroy", types.void, types.intp)

#: names and constant values of headers, as C strings, at these places
_STRINGS = np.frombuffer(b"op\0pos\0toast\0reread\0xid\0", dtype=np.uint8)
_AT_OP, _AT_POS, _AT_TOAST, _AT_REREAD, _AT_XID = 0, 3, 7, 13, 20
_HEX = np.frombuffer(b"0123456789ABCDEF", dtype=np.uint8)

#: what the callbacks keep: confirmed, failed, first error, its record; refused logins
COUNT_OK, COUNT_FAILED, FIRST_ERROR, FIRST_FAILED, COUNT_REFUSED = range(5)
COUNTERS = 5
_AUTHENTICATION = -169  # RD_KAFKA_RESP_ERR__AUTHENTICATION


#: a broker's rejection of a record or its topic: UNKNOWN_TOPIC_OR_PARTITION, INVALID_MSG, MSG_SIZE_TOO_LARGE, TOPIC_EXCEPTION,
#: TOPIC_AUTHORIZATION_FAILED, INVALID_TIMESTAMP, POLICY_VIOLATION, INVALID_RECORD (rd_kafka_resp_err_t), and librdkafka's
#: _UNKNOWN_TOPIC, and _INVALID_DIFFERENT_RECORD for the records that only share the batch of a refused one
REJECTIONS = (3, 2, 10, 17, 29, 32, 44, 87, -188, -138)


@compiled
def _is_rejection(error):
    return error in REJECTIONS


@numba.cfunc(
    types.void(types.intp, types.CPointer(types.int32), types.CPointer(types.int64)), nopython=True, cache=True
)
def _delivered(producer, message, counters):
    """rd_kafka_message_t: err at 0, _private (the record's number) at 64."""
    error = message[0]
    if error == 0:
        counters[0] += 1
        return
    counters[1] += 1
    # what fails with a refused record (its partition's sequence, the transaction's end) must not hide it
    rejection, known = _is_rejection(np.int64(error)), _is_rejection(counters[2])
    if known and not rejection:
        return
    number = np.int64(np.uint32(message[16])) | (np.int64(message[17]) << 32)
    if counters[2] == 0 or (rejection and not known) or number < counters[3]:
        counters[2] = np.int64(error)
        counters[3] = number


@numba.cfunc(types.void(types.intp, types.int32, types.intp, types.CPointer(types.int64)), nopython=True, cache=True)
def _failed(producer, error, reason, counters):
    """Called from rd_kafka_poll: what the calls themselves only tell as a time-out."""
    if error == _AUTHENTICATION:
        counters[4] += 1


def scratch() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """What :func:`produce` works with: the rd_kafka_message_t of a batch or the rd_kafka_vu_t of a record, and texts of headers."""
    return np.zeros((_BATCH, _WORDS), dtype=np.int64), np.zeros(_TEXT_BYTES, dtype=np.uint8)


@compiled
def _plain(topics, records, start, count, base, words):
    """Hand over records without headers and time, as many as there are of one topic and as fit; returns (next record, error code)."""
    topic = records[start, R_TOPIC]
    n = 0
    i = start
    while i < count and n < words.shape[0] and records[i, R_TIME] == 0 and records[i, R_TOPIC] == topic:
        words[n, _M_PARTITION] = records[i, R_PARTITION]
        words[n, _M_VALUE] = base + records[i, R_VALUE] if records[i, R_VALUE_LEN] >= 0 else 0
        words[n, _M_VALUE_LEN] = max(records[i, R_VALUE_LEN], 0)
        words[n, _M_KEY] = base + records[i, R_KEY] if records[i, R_KEY_LEN] >= 0 else 0
        words[n, _M_KEY_LEN] = max(records[i, R_KEY_LEN], 0)
        words[n, _M_OPAQUE] = i
        n += 1
        i += 1
    made = _produce_batch(topics[topic], np.int32(-1), np.int32(_COPY | _PARTITION), words.ctypes.data, np.int32(n))
    if made < n:
        # a full queue refuses all that follow (rd_kafka_produce_batch, src/rdkafka_msg.c), so that nothing is left out
        for k in range(n):
            code = words[k, _M_ERROR] << 32 >> 32
            if code != 0:
                return start + k, code
    return i, np.int64(0)


@compiled
def _single(producer, topics, records, i, base, headers, now, latest, vus, texts):
    """Hand over one record with its headers and time; returns an error code."""
    names = _STRINGS.ctypes.data
    vus[0, 0] = _VT_RKT
    vus[0, 1] = topics[records[i, R_TOPIC]]
    vus[1, 0] = _VT_FLAGS
    vus[1, 1] = _COPY
    vus[2, 0] = _VT_OPAQUE
    vus[2, 1] = i
    vus[3, 0] = _VT_PARTITION
    vus[3, 1] = records[i, R_PARTITION]
    vus[4, 0] = _VT_TIME
    vus[4, 1] = records[i, R_TIME] if 0 < records[i, R_TIME] <= latest else now
    n = 5
    if records[i, R_KEY_LEN] >= 0:
        vus[n, 0] = _VT_KEY
        vus[n, 1] = base + records[i, R_KEY]
        vus[n, 2] = records[i, R_KEY_LEN]
        n += 1
    if records[i, R_VALUE_LEN] >= 0:
        vus[n, 0] = _VT_VALUE
        vus[n, 1] = base + records[i, R_VALUE]
        vus[n, 2] = records[i, R_VALUE_LEN]
        n += 1
    if headers:
        lsn, ordinal = records[i, R_LSN], records[i, R_ORDINAL]
        for k in range(16):
            texts[k] = _HEX[(lsn >> (60 - 4 * k)) & 15]
        texts[16] = 47
        for k in range(8):
            texts[17 + k] = _HEX[(ordinal >> (28 - 4 * k)) & 15]
        texts[25] = np.uint8(records[i, R_OP])
        vus[n, 0] = _VT_HEADER
        vus[n, 1] = names + _AT_OP
        vus[n, 2] = texts.ctypes.data + 25
        vus[n, 3] = 1
        vus[n + 1, 0] = _VT_HEADER
        vus[n + 1, 1] = names + _AT_POS
        vus[n + 1, 2] = texts.ctypes.data
        vus[n + 1, 3] = 25
        n += 2
        # not on the tombstone of a key change: it has no value
        if records[i, R_FLAGS] & FLAG_REREAD and records[i, R_VALUE_LEN] >= 0:
            vus[n, 0] = _VT_HEADER
            vus[n, 1] = names + _AT_TOAST
            vus[n, 2] = names + _AT_REREAD
            vus[n, 3] = 6
            n += 1
        xid = records[i, R_FLAGS] >> FLAG_XID_SHIFT
        if headers & HEADER_XID and xid > 0:
            end = texts.size
            at = end
            while xid > 0:
                at -= 1
                texts[at] = np.uint8(48 + xid % 10)
                xid //= 10
            vus[n, 0] = _VT_HEADER
            vus[n, 1] = names + _AT_XID
            vus[n, 2] = texts.ctypes.data + at
            vus[n, 3] = end - at
            n += 1
    error = _produceva(producer, vus.ctypes.data, n)
    if error == 0:
        return np.int64(0)
    code = np.int64(_error_code(error))
    _error_destroy(error)
    return code


@compiled
def produce(producer, topics, records, start, count, data, headers, now, latest, words, texts):
    """Hand records ``start`` to ``count`` to librdkafka; returns (next record, error code).

    :param headers: write ``op`` and ``pos``, and with ``HEADER_XID`` also the transaction's id.
    :param now: milliseconds; the timestamp of records that have none, or one beyond ``latest``, which the broker would refuse.
    :param words: see :func:`scratch`; ``texts`` too.
    """
    base = data.ctypes.data
    i = start
    while i < count:
        if headers == 0 and records[i, R_TIME] == 0:
            i, code = _plain(topics, records, i, count, base, words)
        else:
            code = _single(producer, topics, records, i, base, headers, now, latest, words, texts)
            i += 1 if code == 0 else 0
        if code != 0:
            return i, code
    return count, np.int64(0)


class ConfigRefused(ValueError):
    """librdkafka does not know a property, or not this value."""


def make_producer(config: Mapping[str, str], counters: npt.NDArray[np.int64]) -> int:
    """An ``rd_kafka_t`` whose delivery reports are counted in ``counters``.

    :raises ConfigRefused: a property or its value.
    """
    message = ctypes.create_string_buffer(512)
    conf = conf_new()
    for name, value in config.items():
        if conf_set(conf, name.encode(), str(value).encode(), message, len(message)) != 0:
            conf_destroy(conf)
            raise ConfigRefused(message.value.decode(errors="replace"))
    conf_set_opaque(conf, counters.ctypes.data)
    conf_set_dr_msg_cb(conf, _delivered.address)
    conf_set_error_cb(conf, _failed.address)
    handle = new(PRODUCER, conf, message, len(message))
    if not handle:
        conf_destroy(conf)
        raise ConfigRefused(message.value.decode(errors="replace"))
    return int(handle)


def name(code: int) -> str:
    """An error code with its meaning."""
    return f"{err2name(code).decode()} ({err2str(code).decode(errors='replace')})"
