"""HMAC-SHA-256 of values: the hash function of FIPS 180-4 (https://doi.org/10.6028/NIST.FIPS.180-4, 6.2) and RFC 2104,
with the states behind both padded keys computed beforehand, so that a short value takes two blocks.

Processors that have instructions for SHA-256 take a ninth of the time with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.compiled import (
    callee,
    compiled,
    generated,
    has_instructions,
    inlined,
    instruction,
    ir,
    memcpy,
    types,
)
from airflow_bottledwater.encoding.kernels.reading import i16, i32, i64
from airflow_bottledwater.encoding.kernels.text import uuid
from airflow_bottledwater.encoding.kernels.writing import integer, store_word
from airflow_bottledwater.encoding.layout import WORD

#: bytes of a block, and of the hexadecimal digits of a hash
BLOCK, DIGITS = 64, 64
#: how a value becomes the text that is hashed: its bytes, its decimal digits, or its 36 characters
AS_TEXT, AS_INTEGER, AS_UUID = 0, 1, 2

#: the words of the scratch memory: the states behind the inner and the outer padded key, that of the value, and the
#: message schedule
INNER, OUTER, STATE, SCHEDULE, WORDS = 0, 8, 16, 24, 88
#: its bytes: a block, and the text of a value
ROOM = 192
_TEXT = 128

_PRIMES = [n for n in range(2, 312) if all(n % k for k in range(2, n))]


def _root(n: int, power: int) -> int:
    """The greatest integer whose power is not above n."""
    low, high = 0, 1 << (n.bit_length() // power + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**power <= n else (low, middle - 1)
    return low


#: the first 32 bits of the fractional parts of the roots of the first primes: cube roots, and square roots of the first
#: eight (FIPS 180-4, 4.2.2 and 5.3.3)
CONSTANTS = np.array([_root(n << 96, 3) & 0xFFFFFFFF for n in _PRIMES], dtype=np.uint32)
INITIAL = np.array([_root(n << 64, 2) & 0xFFFFFFFF for n in _PRIMES[:8]], dtype=np.uint32)


@generated
def _with_instructions(typingctx: Any, state: Any, block: Any, out: Any) -> Any:
    """The compression of one block by the processor's own instructions, with addresses of eight words, 64 bytes and
    eight words (https://www.intel.com/content/dam/develop/external/us/en/documents/
    intel-sha-extensions-white-paper-402097.pdf)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, octets = ir.VectorType(ir.IntType(32), 4), ir.VectorType(ir.IntType(8), 16)

        def place(address: Any, offset: int, kind: Any) -> Any:
            return builder.inttoptr(builder.add(address, ir.Constant(address.type, offset)), kind.as_pointer())

        def lanes(one: Any, other: Any, *numbers: int) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), list(numbers))
            return builder.shuffle_vector(one, other, mask)

        rounds, first, second = (
            instruction(builder, f"llvm.x86.{name}", words, [words] * operands)
            for name, operands in (("sha256rnds2", 3), ("sha256msg1", 2), ("sha256msg2", 2))
        )
        at, data, to = arguments
        low, high = (builder.load(place(at, offset, words), align=1) for offset in (0, 16))
        # the instructions take the words as (f, e, b, a) and (h, g, d, c)
        one = before_one = lanes(high, low, 1, 0, 5, 4)
        other = before_other = lanes(high, low, 3, 2, 7, 6)
        message: list[Any] = []
        for i in range(16):
            if i < 4:
                read = builder.load(place(data, 16 * i, octets), align=1)
                swapped = lanes(read, read, *(4 * (k // 4) + 3 - k % 4 for k in range(16)))
                message.append(builder.bitcast(swapped, words))
            else:
                sum_of = builder.call(first, [message[i - 4], message[i - 3]])
                sum_of = builder.add(sum_of, lanes(message[i - 2], message[i - 1], 1, 2, 3, 4))
                message.append(builder.call(second, [sum_of, message[i - 1]]))
            constants = ir.Constant(words, [int(each) for each in CONSTANTS[4 * i : 4 * i + 4]])
            mixed = builder.add(message[i], constants)
            other = builder.call(rounds, [other, one, mixed])
            one = builder.call(rounds, [one, other, lanes(mixed, mixed, 2, 3, 0, 0)])
        one, other = builder.add(one, before_one), builder.add(other, before_other)
        builder.store(lanes(one, other, 3, 2, 7, 6), place(to, 0, words), align=1)
        builder.store(lanes(one, other, 1, 0, 5, 4), place(to, 16, words), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _octets(builder: Any, address: Any) -> Any:
    """The 32 bytes of a state, as a vector (of a little-endian processor)."""
    kind = ir.VectorType(ir.IntType(8), 32)
    raw = builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
    return builder.shuffle_vector(raw, raw, _numbers(4 * (k // 4) + 3 - k % 4 for k in range(32)))


def _numbers(numbers: Iterable[int]) -> Any:
    found = list(numbers)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(found)), found)


@generated
def _write_octets(typingctx: Any, state: Any, out: Any) -> Any:
    """Write the 32 bytes of the state at an address to another one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        octets = _octets(builder, arguments[0])
        builder.store(octets, builder.inttoptr(arguments[1], octets.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@generated
def _write_digits(typingctx: Any, state: Any, out: Any) -> Any:
    """Write the 64 hexadecimal digits of the state at an address to another one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        octets, wide = _octets(builder, arguments[0]), ir.VectorType(ir.IntType(8), 64)

        def all_of(number: int, kind: Any) -> Any:
            return ir.Constant(kind, [number] * kind.count)

        high, low = builder.lshr(octets, all_of(4, octets.type)), builder.and_(octets, all_of(15, octets.type))
        digits = builder.shuffle_vector(high, low, _numbers(k // 2 + (32 if k % 2 else 0) for k in range(64)))
        letters = builder.icmp_unsigned(">", digits, all_of(9, wide))
        shown = builder.select(letters, all_of(ord("a") - 10, wide), all_of(ord("0"), wide))
        builder.store(builder.add(digits, shown), builder.inttoptr(arguments[1], wide.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@inlined
def _turned(x, n):
    return np.uint32((x >> np.uint32(n)) | (x << np.uint32(32 - n)))


@compiled
def compress_plain(words, source, b, p):
    """Continue the state at ``source`` with the 64 bytes from ``p`` on; the result is at :data:`STATE`."""
    for i in range(16):
        at = p + 4 * i
        words[SCHEDULE + i] = (
            (np.uint32(b[at]) << np.uint32(24))
            | (np.uint32(b[at + 1]) << np.uint32(16))
            | (np.uint32(b[at + 2]) << np.uint32(8))
            | np.uint32(b[at + 3])
        )
    for i in range(SCHEDULE + 16, SCHEDULE + 64):
        x, y = words[i - 15], words[i - 2]
        small = _turned(x, 7) ^ _turned(x, 18) ^ (x >> np.uint32(3))
        large = _turned(y, 17) ^ _turned(y, 19) ^ (y >> np.uint32(10))
        words[i] = np.uint32(np.uint32(words[i - 16] + small) + np.uint32(words[i - 7] + large))
    b0, b1, b2, b3 = words[source], words[source + 1], words[source + 2], words[source + 3]
    b4, b5, b6, b7 = words[source + 4], words[source + 5], words[source + 6], words[source + 7]
    s0, s1, s2, s3, s4, s5, s6, s7 = b0, b1, b2, b3, b4, b5, b6, b7
    for i in range(64):
        one = np.uint32(s7 + (_turned(s4, 6) ^ _turned(s4, 11) ^ _turned(s4, 25)))
        chosen = np.uint32(((s4 & s5) ^ (~s4 & s6)) + CONSTANTS[i])
        one = np.uint32(one + np.uint32(chosen + words[SCHEDULE + i]))
        two = np.uint32((_turned(s0, 2) ^ _turned(s0, 13) ^ _turned(s0, 22)) + ((s0 & s1) ^ (s0 & s2) ^ (s1 & s2)))
        s7, s6, s5, s4 = s6, s5, s4, np.uint32(s3 + one)
        s3, s2, s1, s0 = s2, s1, s0, np.uint32(one + two)
    words[STATE], words[STATE + 1] = np.uint32(b0 + s0), np.uint32(b1 + s1)
    words[STATE + 2], words[STATE + 3] = np.uint32(b2 + s2), np.uint32(b3 + s3)
    words[STATE + 4], words[STATE + 5] = np.uint32(b4 + s4), np.uint32(b5 + s5)
    words[STATE + 6], words[STATE + 7] = np.uint32(b6 + s6), np.uint32(b7 + s7)


@inlined
def compress_fast(words, source, b, p):
    """The same by the processor's instructions."""
    _with_instructions(words.ctypes.data + 4 * source, b.ctypes.data + p, words.ctypes.data + 4 * STATE)


#: whether the processor that is compiled for has the instructions; compiled code is kept by processor
HAS_INSTRUCTIONS = has_instructions("sha")
compress = compress_fast if HAS_INSTRUCTIONS else compress_plain


@inlined
def _clear(room):
    """Clear a block: in whole words, since a processor waits where it reads together what was written in parts."""
    for i in range(np.uint64(0), np.uint64(BLOCK), np.uint64(WORD)):
        store_word(np.uint64(0), room, i)


@inlined
def _finish(words, room, used, total):
    """Pad the block that ``room`` begins with, of which so many bytes are used, the others being 0, and take it in.

    :param total: bytes of the whole message.
    """
    room[used] = 0x80
    if used >= BLOCK - 8:
        compress(words, STATE, room, 0)
        _clear(room)
    bits, length = np.uint64(total) * np.uint64(8), np.uint64(0)
    for i in range(8):  # the last byte first
        length |= ((bits >> np.uint64(8 * i)) & np.uint64(255)) << np.uint64(56 - 8 * i)
    store_word(length, room, np.uint64(BLOCK - 8))
    compress(words, STATE, room, 0)


@callee
def hmac_hex(words, room, b, p, n, out, o):
    """Write the hexadecimal digits of the HMAC of ``n`` bytes; returns the next position.

    :param words: scratch memory of :data:`WORDS` words, with the states behind both padded keys.
    :param room: scratch memory of :data:`ROOM` bytes.
    """
    for i in range(8):
        words[STATE + i] = words[INNER + i]
    end = p + n
    while end - p >= BLOCK:
        compress(words, STATE, b, p)
        p += BLOCK
    _clear(room)
    memcpy(room.ctypes.data, b.ctypes.data + p, np.int64(end - p))
    _finish(words, room, end - p, BLOCK + n)
    _clear(room)
    _write_octets(words.ctypes.data + 4 * STATE, room.ctypes.data)
    for i in range(8):
        words[STATE + i] = words[OUTER + i]
    _finish(words, room, 32, BLOCK + 32)
    _write_digits(words.ctypes.data + 4 * STATE, out.ctypes.data + o)
    return o + DIGITS


@callee
def hash_value(words, room, form, b, p, n, out, o):
    """Write the digits of the hash of a value's text; returns the next position, or -1 if the value is malformed.

    :param form: how the value becomes a text: :data:`AS_TEXT`, :data:`AS_INTEGER` or :data:`AS_UUID`.
    """
    if form == AS_TEXT:
        return hmac_hex(words, room, b, p, n, out, o)
    if form == AS_UUID:
        if n != 16:
            return np.int64(-1)
        return hmac_hex(words, room, room, _TEXT, uuid(b, p, room, _TEXT) - _TEXT, out, o)
    if n != 2 and n != 4 and n != 8:
        return np.int64(-1)
    value = np.int64(i16(b, p)) if n == 2 else np.int64(i32(b, p)) if n == 4 else i64(b, p)
    return hmac_hex(words, room, room, _TEXT, integer(value, room, _TEXT) - _TEXT, out, o)


def scratch(secret: bytes) -> npt.NDArray[np.uint32]:
    """Scratch memory with the states behind both padded keys (RFC 2104, 2).

    :param secret: the key.
    """
    secret = hashlib.sha256(secret).digest() if len(secret) > BLOCK else secret
    words = np.zeros(WORDS, dtype=np.uint32)
    for at, pad in ((INNER, 0x36), (OUTER, 0x5C)):
        padded = np.frombuffer(bytes(byte ^ pad for byte in secret.ljust(BLOCK, b"\0")), dtype=np.uint8).copy()
        words[at : at + 8] = INITIAL
        compress_plain(words, at, padded, 0)
        words[at : at + 8] = words[STATE : STATE + 8]
    return words
