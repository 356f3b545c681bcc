"""What a record is at its place in a topic, beside its key and value: its position, what a row that was read again
shows, and the partition that its key belongs to. Compiled, since every record of a topic is looked at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import callee, compiled, memcpy
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.topic_reader import RecordBlock

_POS, _SNAPSHOT = (np.frombuffer(name, dtype=np.uint8).copy() for name in (b"pos\0", b"snapshot\0"))
#: the characters of a position: sixteen hex digits, a slash, eight hex digits
_LENGTH, _SLASH = 25, 16
#: characters of a header ``snapshot`` at most
_LONGEST = 100


@callee
def _hex(character):
    if 48 <= character <= 57:
        return np.int64(character - 48)
    if 65 <= character <= 70:
        return np.int64(character - 55)
    return np.int64(-1)


@callee
def _position(text, lsns, ordinals, i):
    lsn = ordinal = np.uint64(0)
    for at in range(_LENGTH):
        if at == _SLASH:
            continue
        digit = _hex(text[at])
        if digit < 0:
            return
        if at < _SLASH:
            lsn = (lsn << np.uint64(4)) | np.uint64(digit)
        else:
            ordinal = (ordinal << np.uint64(4)) | np.uint64(digit)
    lsns[i], ordinals[i] = lsn, ordinal


@callee
def _lsn(text, length):
    """The LSN behind the id of a live snapshot (``3f2a91c04d7e/0/16B3748``); 0 if there is none."""
    found, part = np.uint64(0), np.uint64(0)
    shift, slashes = np.uint64(0), 0
    for back in range(length):
        character = text[length - 1 - back]
        if character == 47:
            found |= part << np.uint64(32 * slashes)
            slashes += 1
            if slashes == 2:
                return found
            part = shift = np.uint64(0)
            continue
        digit = _hex(character)
        if digit < 0 or shift > 28:
            return np.uint64(0)
        part |= np.uint64(digit) << shift
        shift += np.uint64(4)
    return np.uint64(0)


@compiled
def _read(addresses, name, scratch, text, lsns, ordinals):
    """Read a header of each record: ``snapshot`` if there are no ordinals, else ``pos``."""
    for i in range(addresses.size):
        if rd.compiled_message_headers(addresses[i], scratch.ctypes.data) != 0:
            continue
        found = rd.compiled_header_get_last(
            scratch[0], name.ctypes.data, scratch.ctypes.data + 8, scratch.ctypes.data + 16
        )
        if found != 0 or scratch[2] > text.size:
            continue
        memcpy(text.ctypes.data, scratch[1], scratch[2])
        if ordinals.size == 0:
            lsns[i] = _lsn(text, scratch[2])
        elif scratch[2] == _LENGTH:
            _position(text, lsns, ordinals, i)


@compiled
def _read_partitions(messages, count, out):
    for i in range(messages.size):
        # not the partitioner of the kernels that published the record
        out[i] = rd.msg_partitioner_murmur2(0, messages[i].key, messages[i].key_len, np.int32(count), 0, 0)


def positions(block: RecordBlock) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """LSN and ordinal of each record's header ``pos``; 0 where there is none."""
    lsns, ordinals = np.zeros(len(block), dtype=np.uint64), np.zeros(len(block), dtype=np.uint64)
    scratch, text = np.zeros(3, dtype=np.int64), np.zeros(_LENGTH, dtype=np.uint8)
    _read(block.addresses, _POS, scratch, text, lsns, ordinals)
    return lsns, ordinals


def shown(block: RecordBlock) -> npt.NDArray[np.uint64]:
    """The LSN up to which each row that was read again shows the table, by its header ``snapshot``; 0 of every other
    record."""
    lsns = np.zeros(len(block), dtype=np.uint64)
    scratch, text = np.zeros(3, dtype=np.int64), np.zeros(_LONGEST, dtype=np.uint8)
    _read(block.addresses, _SNAPSHOT, scratch, text, lsns, lsns[:0])
    return lsns


def partitions(block: RecordBlock, count: int) -> npt.NDArray[np.int64]:
    """The partition that each record's key belongs to, of so many."""
    out = np.zeros(len(block), dtype=np.int64)
    _read_partitions(block.messages, count, out)
    return out


def warm_up() -> None:
    """Compile it; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("verified records", _read_nothing)


def _read_nothing() -> None:
    nothing = RecordBlock(np.zeros(0, dtype=rd.MESSAGE), np.zeros(0, dtype=np.int64))
    positions(nothing)
    shown(nothing)
    partitions(nothing, 1)
