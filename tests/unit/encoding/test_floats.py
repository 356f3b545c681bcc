"""The shortest decimal of a float, held against Python's own for doubles and against numpy's for float4."""

from __future__ import annotations

import random
import struct
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from airflow_bottledwater.encoding import wire
from tests.support import wire as w
from tests.support.callees import write_value

pytestmark = pytest.mark.slow


def written(opcode: int, value: bytes) -> str:
    out = np.zeros(200, dtype=np.uint8)
    data = np.frombuffer(bytearray(value), dtype=np.uint8)
    end = write_value(w.program_of(opcode), 0, data, 0, len(value), out, 0)
    return bytes(out[:end]).decode()


def digits(text: str) -> tuple[int, ...]:
    return Decimal(text).normalize().as_tuple().digits


def check_double(bits: int) -> None:
    (v,) = struct.unpack(">d", data := struct.pack(">Q", bits))
    if not np.isfinite(v):
        return
    text = written(wire.OP_FLOAT8, data)
    assert struct.pack(">d", float(text)) == data
    assert digits(text) == digits(repr(v))


def check_float4(bits: int) -> None:
    v = np.frombuffer(data := struct.pack(">I", bits), dtype=">f4")[0]
    if not np.isfinite(v):
        return
    text = written(wire.OP_FLOAT4, data)
    assert struct.pack(">f", np.float32(text)) == data
    assert digits(text) == digits(np.format_float_scientific(v.astype(np.float32), unique=True))


@given(st.floats(allow_nan=False).map(lambda v: struct.unpack(">Q", struct.pack(">d", v))[0]))
@example(1)
@example(2**52 - 1)
@example(2**52)
@example(0x7FEFFFFFFFFFFFFF)
@example(0x4340000000000001)
def test_a_double_is_the_shortest_that_reads_back_and_the_nearest_of_those(bits: int) -> None:
    check_double(bits)


@given(st.floats(width=32, allow_nan=False).map(lambda v: struct.unpack(">I", struct.pack(">f", v))[0]))
@example(1)
@example(0x007FFFFF)
@example(0x00800000)
@example(0x7F7FFFFF)
def test_so_is_a_float4(bits: int) -> None:
    check_float4(bits)


@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_so_are_thousands_of_any_bits(seed: int) -> None:
    """Many more than hypothesis makes in the same time, and evenly spread."""
    dice = random.Random(seed)
    for _ in range(800):
        check_double(dice.getrandbits(64))
        check_float4(dice.getrandbits(32))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "-0"), (1.0, "1"), (-1.5, "-1.5"), (100000.0, "100000"), (1e14, "100000000000000"), (1e15,
        "1e+15"), (123456789012345.0, "123456789012345"), (1234567890123456.0, "1234567890123456"), (9007199254740992.0,
        "9007199254740992"),
        (1e16, "1e+16"), (1.2345678901234568e17, "1.2345678901234568e+17"), (0.0001, "0.0001"), (0.00001, "1e-05"),
        (0.00012345, "0.00012345"), (1e-300, "1e-300"), (5e-324, "5e-324"), (1.7976931348623157e308,
        "1.7976931348623157e+308"), (0.1 + 0.2, "0.30000000000000004"), (12.5, "12.5"),
    ],
)  # fmt: skip
def test_it_looks_like_g(value: float, text: str) -> None:
    assert written(wire.OP_FLOAT8, struct.pack(">d", value)) == text
