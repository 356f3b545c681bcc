"""Hashes of record keys, by which keys are compared without a Python object for each."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.compiled import callee, compiled, inlined
from airflow_bottledwater.kafka.publisher import Records

#: the key of the hashes of record keys: another in each process, so that nobody can make keys that collide
_SEED = np.frombuffer(os.urandom(32), dtype=np.uint64)

_U13, _U16, _U17, _U21, _U32 = (np.uint64(n) for n in (13, 16, 17, 21, 32))
_U64, _EIGHT = np.uint64(64), np.uint64(8)


@inlined
def _rotate(x, n):
    return (x << n) | (x >> (_U64 - n))


@inlined
def _round(v0, v1, v2, v3):
    v0 += v1
    v1 = _rotate(v1, _U13) ^ v0
    v0 = _rotate(v0, _U32)
    v2 += v3
    v3 = _rotate(v3, _U16) ^ v2
    v0 += v3
    v3 = _rotate(v3, _U21) ^ v0
    v2 += v1
    v1 = _rotate(v1, _U17) ^ v2
    v2 = _rotate(v2, _U32)
    return v0, v1, v2, v3


@inlined
def _start(key0, key1):
    return (
        key0 ^ np.uint64(0x736F6D6570736575),
        key1 ^ np.uint64(0x646F72616E646F6D),
        key0 ^ np.uint64(0x6C7967656E657261),
        key1 ^ np.uint64(0x7465646279746573),
    )


@inlined
def _take(state, word):
    v0, v1, v2, v3 = state
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inlined
def _end(state):
    v0, v1, v2, v3 = state
    v2 ^= np.uint64(255)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@callee
def siphash(data, start, length, key0, key1):
    """SipHash-2-4 (Aumasson, Bernstein: https://www.aumasson.jp/siphash/siphash.pdf) of some bytes."""
    state = _start(key0, key1)
    # unsigned, so that the compiler reads eight bytes at once (encoding/kernels/reading.py)
    at, end = np.uint64(start), np.uint64(start + length)
    while end - at >= _EIGHT:
        word = np.uint64(0)
        for i in range(8):
            word |= np.uint64(data[at + np.uint64(i)]) << np.uint64(8 * i)
        state = _take(state, word)
        at += _EIGHT
    word = np.uint64(length & 255) << np.uint64(56)
    shift = np.uint64(0)
    while at < end:
        word |= np.uint64(data[at]) << shift
        shift += _EIGHT
        at += np.uint64(1)
    return _end(_take(state, word))


@callee
def siphash_number(number, key0, key1):
    """The same of the eight bytes of a number, the least significant first."""
    return _end(_take(_take(_start(key0, key1), np.uint64(number)), _EIGHT << np.uint64(56)))


@compiled
def _hash(data, starts, ends, seed, out):
    for i in range(ends.size):
        for part in range(2):
            out[i, part] = siphash(data, starts[i], ends[i] - starts[i], seed[2 * part], seed[2 * part + 1])


def _hashed(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    found = np.empty((len(ends), 2), dtype=np.uint64)
    _hash(data, starts, ends, _SEED, found)
    return found


def hash_keys(keys: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """128 bits of each key, in two columns.

    :param keys: the bytes of all keys, one after the other.
    :param ends: where each ends.
    """
    return _hashed(keys, np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1], np.ascontiguousarray(ends))


def hash_records(records: Records) -> npt.NDArray[np.uint64]:
    """128 bits of the key of each record that is to be published, the same as :func:`hash_keys` gives for a key that
    was read."""
    starts = np.ascontiguousarray(records.table["key"])
    return _hashed(records.data, starts, starts + np.maximum(records.table["key_length"], 0))
