"""Hashes values of rows that are read by COPY, before anything else sees them: masks that PostgreSQL cannot make,
since it is not given the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding import hashes, masks
from airflow_bottledwater.encoding.kernels import sha256
from airflow_bottledwater.encoding.kernels.hashed_rows import KEPT, hash_binary, hash_lines
from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.receive import MessageBlock


class RowHasher:
    """What is needed to hash values of a table's rows.

    :ivar forms: for each column how its values become the text that is hashed, or ``KEPT``.
    :ivar words: the key and scratch memory, and ``room`` likewise; see
        :mod:`~airflow_bottledwater.encoding.kernels.sha256`.
    """

    def __init__(self, table: SourceTable) -> None:
        made = [masks.Mask.of(column) for column in table.columns]
        forms = [hashes.FORMS[mask.oid] if mask.kind == masks.HASH else KEPT for mask in made]
        self.forms: npt.NDArray[np.int64] = np.array(forms, dtype=np.int64)
        self.words: npt.NDArray[np.uint32] = next(
            hashes.known(mask.key).words() for mask in made if mask.kind == masks.HASH
        )
        self.room: npt.NDArray[np.uint8] = np.zeros(sha256.ROOM, dtype=np.uint8)

    def rows(self, block: MessageBlock) -> tuple[MessageBlock, int]:
        """Rows of a binary COPY with hashes, and how many are well formed, those before the first that is not."""
        out, ends = self._output(block)
        good = hash_binary(block.data, block.offsets, self.forms, self.words, self.room, out, ends)
        return MessageBlock(out, ends), int(good)

    def lines(self, block: MessageBlock) -> tuple[MessageBlock, int]:
        """The same with rows in COPY's text format, which has the texts that are hashed."""
        out, ends = self._output(block)
        spare = np.empty(int(np.diff(block.offsets).max(initial=0)) + 8, dtype=np.uint8)
        hash_lines(block.data, block.offsets, self.forms, self.words, self.room, spare, out, ends)
        return MessageBlock(out, ends), block.count

    def _output(self, block: MessageBlock) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Arrays for the rows of a block with hashes, and for where they end."""
        hashed = int(np.count_nonzero(self.forms != KEPT)) * block.count
        size = int(block.offsets[-1] - block.offsets[0]) + hashed * sha256.DIGITS
        return np.empty(size + 8, dtype=np.uint8), np.zeros(block.count + 1, dtype=np.int64)


def has_hashes(table: SourceTable) -> bool:
    """Whether values of a table are published as hashes."""
    return any(masks.Mask.of(column).kind == masks.HASH for column in table.columns)


def rows(pipeline: Settings, table: SourceTable, blocks: Iterator[MessageBlock]) -> Iterator[MessageBlock]:
    """Rows of a binary COPY with hashes of the values of which the options say so.

    :param table: whose columns the rows have.
    :raises ProtocolError: a row is malformed.
    :raises Refused: the process does not have the key.
    """
    return _hashed(pipeline, table, blocks, RowHasher.rows)


def lines(pipeline: Settings, table: SourceTable, blocks: Iterator[MessageBlock]) -> Iterator[MessageBlock]:
    """The same with rows in COPY's text format.

    :raises Refused: the process does not have the key.
    """
    return _hashed(pipeline, table, blocks, RowHasher.lines)


def _hashed(
    pipeline: Settings,
    table: SourceTable,
    blocks: Iterator[MessageBlock],
    make: Callable[[RowHasher, MessageBlock], tuple[MessageBlock, int]],
) -> Iterator[MessageBlock]:
    if not has_hashes(table):
        yield from blocks
        return
    if pipeline.hash_key:
        hashes.remember(pipeline.hash_key)
    hasher = RowHasher(table)
    for block in blocks:
        made, good = make(hasher, block)
        if good < block.count:
            raise ProtocolError(f"A row of {table.qualified} does not have the layout of its columns.")
        yield made


def hash_nothing() -> None:
    """Compile it, see :func:`airflow_bottledwater.compiled.warm_up`."""
    data, ends = np.zeros(8, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    words, room = sha256.scratch(b""), np.zeros(sha256.ROOM, dtype=np.uint8)
    hash_binary(data, ends, np.zeros(1, dtype=np.int64), words, room, data, ends)
    hash_lines(data, ends, np.zeros(1, dtype=np.int64), words, room, data, data, ends)
