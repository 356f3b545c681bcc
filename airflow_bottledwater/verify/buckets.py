"""Sums of hashes over buckets of keys: two sides are equal where their sums are, however they were read and divided."""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

#: a bucket: how many keys it has, and the sum of the hashes of their rows
_BUCKET = np.dtype([("keys", np.int64), ("sum", np.uint64)])
#: of a table: few for a small one, since each task sends them to the driver
_FEWEST, _MOST = 4, 18
#: keys of a bucket, if there are enough buckets
_KEYS = 32


def bits_for(keys: int) -> int:
    """How many buckets a table of about so many keys is divided into, as a power of two."""
    return max(_FEWEST, min(_MOST, (max(1, keys) // _KEYS).bit_length()))


def bucket_of(hashes: Hashes, bits: int) -> npt.NDArray[np.int64]:
    """The buckets of keys, by the upper bits of their hashes."""
    return (hashes >> np.uint64(64 - bits)).astype(np.int64)


def sampled(hashes: Hashes, share: float) -> npt.NDArray[np.bool_]:
    """Which keys belong to the sample, by the lower bits of their hashes."""
    if share >= 1:
        return np.ones(len(hashes), dtype=np.bool_)
    return (hashes & np.uint64(0xFFFFFFFF)) < np.uint64(int(share * 2**32))


def bitmap(buckets: npt.NDArray[np.int64], bits: int) -> bytes:
    """A set of buckets as a bitmap."""
    found = np.zeros(1 << bits, dtype=np.bool_)
    found[buckets] = True
    return np.packbits(found).tobytes()


def members(wanted: bytes, bits: int) -> npt.NDArray[np.bool_]:
    """The inverse of :func:`bitmap`: for each bucket, whether it is in the set."""
    return np.unpackbits(np.frombuffer(wanted, dtype=np.uint8), count=1 << bits).astype(np.bool_)


class Buckets:
    """The buckets of one side, or of a part of it."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._buckets = np.zeros(1 << bits, dtype=_BUCKET)

    def add(self, keys: Hashes, rows: Hashes) -> None:
        """Add rows by the hashes of their keys and of themselves."""
        places = bucket_of(keys, self.bits)
        np.add.at(self._buckets["keys"], places, 1)
        np.add.at(self._buckets["sum"], places, rows)

    def spoil(self, keys: Hashes) -> None:
        """Make the buckets of these keys differ from those of the other side, so that they are looked at."""
        np.add.at(self._buckets["sum"], bucket_of(keys, self.bits), np.uint64(0x9E3779B97F4A7C15))

    def merge(self, sums: bytes) -> Self:
        """Add the buckets of another part."""
        other = np.frombuffer(sums, dtype=_BUCKET)
        self._buckets["keys"] += other["keys"]
        self._buckets["sum"] += other["sum"]
        return self

    def differing(self, other: Buckets) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The buckets in which two sides differ, and how many keys both sides have in each of them."""
        found = np.flatnonzero(self._buckets != other._buckets)
        return found, self._buckets["keys"][found] + other._buckets["keys"][found]

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return int(self._buckets["keys"].sum())

    def to_bytes(self) -> bytes:
        """As bytes, for :meth:`merge`."""
        return self._buckets.tobytes()
