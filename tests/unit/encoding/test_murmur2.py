"""The partitioner's hash."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.encoding import kernels
from tests.support.partitions import murmur2


# UtilsTest.testMurmur2, clients/src/test/java/org/apache/kafka/common/utils/UtilsTest.java
@pytest.mark.parametrize(
    ("key", "java"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_keys_hash_as_with_javas_clients(key: bytes, java: int) -> None:
    # the partitioner takes toPositive(murmur2(key)), which clears the sign bit
    assert kernels.murmur2(np.frombuffer(key, dtype=np.uint8).copy(), 0, len(key)) == java & 0x7FFFFFFF


@given(st.binary(max_size=70), st.binary(max_size=5))
def test_any_key_hashes_as_the_readable_hash_wherever_it_lies(key: bytes, before: bytes) -> None:
    data = np.frombuffer(before + key + b"x", dtype=np.uint8).copy()
    assert kernels.murmur2(data, len(before), len(key)) == murmur2(key)
