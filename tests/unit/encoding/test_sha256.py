"""The compiled HMAC-SHA-256, compared with that of the standard library."""

from __future__ import annotations

import hmac
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.encoding.kernels import sha256
from tests.support.callees import called

hash_value = called(sha256.hash_value)

KEYS = st.binary(min_size=16, max_size=200)


@given(KEYS, st.one_of(st.binary(max_size=300), st.integers(0, 300).map(bytes)))
def test_a_hash_is_the_librarys(secret: bytes, text: bytes) -> None:
    found = hashes.HashKey(secret)
    expected = hmac.digest(secret, text, "sha256").hex().encode()
    assert found.digits(text) == expected
    words, room, out = found.words(), np.zeros(sha256.ROOM, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    data = np.frombuffer(b"before" + text + b"\0", dtype=np.uint8).copy()
    for _ in range(2):  # nothing is left over
        assert hash_value(words, room, sha256.AS_TEXT, data, 6, len(text), out, 3) == 3 + 64
        assert out[3:67].tobytes() == expected


@given(st.binary(min_size=64, max_size=64), st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8))
def test_both_ways_of_compression_give_the_same(block: bytes, state: list[int]) -> None:
    if not sha256.HAS_INSTRUCTIONS:
        pytest.skip("The processor has no instructions for SHA-256.")
    data, found = np.frombuffer(block, dtype=np.uint8).copy(), []
    for compress in (sha256.compress_plain, called(sha256.compress_fast)):
        words = np.zeros(sha256.WORDS, dtype=np.uint32)
        words[:8] = state
        compress(words, 0, data, 0)
        found.append(words[sha256.STATE : sha256.STATE + 8].tolist())
    assert found[0] == found[1]


def test_the_plain_way_is_the_librarys() -> None:
    """Also where the processor has instructions, which the others then do not use."""
    words = np.zeros(sha256.WORDS, dtype=np.uint32)
    words[:8] = sha256.INITIAL
    block = np.zeros(64, dtype=np.uint8)
    block[:4] = np.frombuffer(b"abc\x80", dtype=np.uint8)
    block[63] = 24
    sha256.compress_plain(words, 0, block, 0)
    # the first example of FIPS 180
    digits = words[sha256.STATE : sha256.STATE + 8].astype(">u4").tobytes().hex()
    assert digits == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("oid", "value", "text"),
    [
        (21, (-5).to_bytes(2, "big", signed=True), b"-5"),
        (23, (42).to_bytes(4, "big"), b"42"),
        (20, (-(2**63)).to_bytes(8, "big", signed=True), b"-9223372036854775808"),
        (2950, uuid.UUID(int=0xABCDEF).bytes, str(uuid.UUID(int=0xABCDEF)).encode()),
        (25, b"42", b"42"),
        (1043, "äö".encode(), "äö".encode()),
    ],
)
def test_equal_texts_of_all_types_have_equal_hashes(oid: int, value: bytes, text: bytes) -> None:
    key = hashes.HashKey(b"0123456789abcdef")
    assert hashes.text_of(oid, value) == text
    words, room, out = key.words(), np.zeros(sha256.ROOM, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    data = np.frombuffer(value, dtype=np.uint8).copy()
    assert hash_value(words, room, hashes.FORMS[oid], data, 0, len(value), out, 0) == 64
    assert out.tobytes() == key.digits(text)


def test_the_id_of_a_key_does_not_tell_it_but_differs_from_others() -> None:
    one, other = hashes.HashKey(b"0123456789abcdef"), hashes.HashKey(b"0123456789abcdeF")
    assert one.id != other.id and len(one.id) == 16 and "0123456789abcdef" not in repr(one)
