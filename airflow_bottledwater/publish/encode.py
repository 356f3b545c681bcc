"""Encodes changes of the stream, or rows of a COPY, into records, and reports the rows that cannot be encoded."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.kafka.publisher import NO_RECORDS, Records
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.reject import Rejection, too_large
from airflow_bottledwater.publish.session import LARGEST
from airflow_bottledwater.publish.toast import Completed
from airflow_bottledwater.state.records import Gap

#: bytes and rows of one piece of a block; the bytes grow if a single row needs more
_PIECE_BYTES, _PIECE_ROWS = 4 << 20, 1 << 15
#: bytes of a key at first, see :func:`with_room`
_KEY_BYTES = 4096
#: rejections that a kernel can report in one call
_REJECTIONS, _BATCH_REJECTIONS = 256, 1024


@dataclass(slots=True)
class Encoded:
    """Encoded rows: their records, and the rows that could not be encoded.

    :param rows: the numbers of these rows in the block (or of these changes in the batch).
    """

    records: Records
    rows: range
    rejections: list[Rejection] = field(default_factory=list)


@dataclass(slots=True)
class EncodedBatch:
    """A batch of changes that is ready to be published.

    :param records: the records of all rows, including those of rejected rows.
    :param held: the tables of which nothing is published, by oid, each from the transaction with this final LSN on;
        they are neither among the records nor among the rejections.
    :param gaps: why tables are set aside from this batch on, by oid.
    :param messages: the records of all logical messages, including those of rejected ones; ``outbox`` likewise, those
        of the rows of outboxes.
    """

    completed: Completed
    records: Records
    rejections: list[Rejection] = field(default_factory=list)
    held: Mapping[int, int] = field(default_factory=dict)
    gaps: Mapping[int, Gap] = field(default_factory=dict)
    messages: Records = NO_RECORDS
    outbox: Records = NO_RECORDS

    @property
    def batch(self) -> Batch:
        """The batch, with complete rows."""
        return self.completed.batch

    def change(self, rejection: Rejection) -> np.void:
        """The change that is rejected."""
        found: np.void = self.completed.batch.changes[rejection.row]
        return found


def _room_for(largest: int) -> int:
    """Bytes that one change can need at most: its old key (with the old row), its new key, and the new row (with the
    old one), each as large as a record may be, and the space that kernels keep free."""
    return 3 * largest + 64 * 1024


def with_room(room: npt.NDArray[np.uint8], work: Callable[[npt.NDArray[np.uint8]], bool]) -> npt.NDArray[np.uint8]:
    """Do some work, again with twice the room as long as that is not enough; returns the room that was."""
    while not work(room):
        room = np.empty(2 * room.size, dtype=np.uint8)
    return room


class BlockEncoder:
    """Encodes blocks of COPY rows, piece by piece, into buffers that are reused for each piece.

    :param headers: see :class:`Records`.
    """

    def __init__(self, headers: int) -> None:
        self._headers = headers
        self._output = layout.output(_PIECE_ROWS, _REJECTIONS, _PIECE_BYTES)
        self._no_facts = layout.facts(wire.FROM_SNAPSHOT, 0)
        self._key: npt.NDArray[np.uint8] = np.empty(_KEY_BYTES, dtype=np.uint8)

    def encode(
        self, block: MessageBlock, programs: Programs, largest: int, facts: layout.Rows | None = None
    ) -> Iterator[Encoded]:
        """The block's records; each piece is valid until the next one is requested.

        :param largest: bytes of the largest record that any topic takes; a row that needs several times as much memory
            is rejected.
        :param facts: see :func:`~airflow_bottledwater.encoding.layout.facts`; None where there are no envelopes.
        """
        start, scratch = 0, programs.scratch()
        facts = self._no_facts if facts is None else facts
        while start < block.count:
            first = start
            output = self._output
            start, _, made, failed = kernels.encode_copy(
                block.data, block.offsets, start, programs.program, 0, scratch, facts, output
            )
            rejections = [
                Rejection(row, programs.error(0, code, column, offset), code, column)
                for row, code, column, offset in output.errors[:failed].tolist()
            ]
            if start == first and not failed:
                room = _room_for(largest)
                size = output.data.size
                if size <= room:
                    self._output = output._replace(data=np.empty(size + min(size, room), dtype=np.uint8))
                    continue
                rejections.append(Rejection(start, too_large(largest)))
                start += 1
            found = output.records[:made]
            if programs.choosers is not None:
                rows = block.data, block.offsets, programs.program, 0, programs.choosers, scratch, found
                self._key = with_room(self._key, functools.partial(kernels.choose_for_copy, *rows))
            yield Encoded(Records(found, output.data, self._headers), range(first, start), rejections)


def encode_changes(
    completed: Completed,
    programs: Programs,
    *,
    headers: int = wire.HEADERS,
    largest: int = LARGEST,
    facts: layout.Rows | None = None,
) -> Encoded:
    """Encode a whole batch of changes into one buffer.

    :param headers: see :class:`Records`.
    :param largest: see :meth:`BlockEncoder.encode`.
    :param facts: what envelopes tell of a row of a snapshot; None: the changes are those of the stream.
    """
    batch = completed.batch
    facts = layout.facts(wire.FROM_STREAM, time.time()) if facts is None else facts
    most = 3 if programs.enveloped else 2
    size = 2 * batch.data.size + len(batch) * programs.around + 64 * 1024
    records, errors, out = layout.output(most * len(batch) + 3, _BATCH_REJECTIONS, size)
    scratch = programs.scratch()
    start = cursor = used = count = 0
    rejections: list[Rejection] = []
    while start < len(batch):
        start, cursor, size, made, failed = kernels.encode_changes(
            batch.data, batch.changes, start, programs.program, completed.texts, cursor, scratch, facts,
            layout.Output(records[count:], errors, out[used:]),
        )  # fmt: skip
        records[count : count + made]["key"] += used
        records[count : count + made]["value"] += used
        records[count : count + made]["headers"] += used
        for change, code, column, offset in errors[:failed].tolist():
            reason = programs.error(int(batch.changes[change]["relation"]), code, column, offset)
            rejections.append(Rejection(change, reason, code, column))
        used += size
        count += made
        if start == len(batch) or failed == len(errors):
            continue
        if not made and not failed and out.size - used > _room_for(largest):
            rejections.append(Rejection(start, too_large(largest)))
            cursor += kernels.find_conversions(
                batch.data, batch.changes[start : start + 1], programs.program, scratch,
                np.zeros(0, dtype=layout.CONVERSION),
            )  # fmt: skip
            start += 1
        else:
            # by a half at least: each time, all of it is copied
            more = max(out.size // 2, min(out.size, _room_for(largest)))
            out = np.concatenate([out, np.empty(more, dtype=np.uint8)])
    if programs.choosers is not None:
        made_of = programs.program, programs.choosers, completed.texts
        rows = batch.data, batch.changes, *made_of, scratch, records[:count]
        with_room(np.empty(_KEY_BYTES, dtype=np.uint8), functools.partial(kernels.choose_for_changes, *rows))
    return Encoded(Records(records[:count], out, headers), range(len(batch)), rejections)
