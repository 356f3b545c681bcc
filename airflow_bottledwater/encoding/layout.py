"""The tables that kernels and their callers share: NumPy's structured arrays, whose fields compiled code accesses by
name.

Every field is an int64, so that a table is as cheap as a matrix of numbers, and needs no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: bytes that kernels copy at once
WORD = 8

#: an array of one of the layouts below
Rows = npt.NDArray[np.void]


def int64s(*fields: str) -> np.dtype[np.void]:
    """A layout with these fields."""
    return np.dtype([(field, np.int64) for field in fields])


#: how the values of a column, or of a part of them (such as an array's elements), are written
COLUMN = int64s(
    "opcode",
    "argument",
    "name",  # where the name begins in the program's names
    "name_length",
    "converted",  # whether the server first converts the value into what the opcode takes
    "child",  # the first row of its parts
    "required",  # whether it is not a union with null
    "oid",  # of an attribute of a composite: the type that its values arrive as
)

#: a version of a table, and where its records go
RELATION = int64s(
    "column",  # its first row in the table of columns
    "columns",
    "key",  # its first entry in the list of key columns
    "keys",
    "topic",
    "partitions",
    "key_schema",
    "value_schema",
    # of a table without a key, only inserts are sent, and updates if its messages have the full old row
    "sends_updates",
    "converts",  # whether one of its columns is converted
    "filtered",  # whether an insert may have been an update, for a row filter, and lack values
    "outbox",  # whether its rows are records of other topics (kernels.outbox)
    "whole_old",  # whether the whole old row is published, and not its key alone
    # its first segment: bytes around a row, which are names in the table of columns (kernels.envelope); -1: nothing
    "envelope",
    "key_head",  # what is in front of a key, likewise; -1: nothing
)

#: what an envelope tells of a change or a row; a row of a COPY has no number and no xid (-1)
FACTS = int64s(
    "snapshot",  # where the row comes from: wire.FROM_…
    "event",
    "time",  # of the commit, in microseconds since 1970
    "lsn",  # 0: not known
    "ordinal",
    "xid",
    "now",  # when it is encoded, in microseconds since 1970
)

#: a field of the row that is encoded: its format (wire.FIELD_…), and where its bytes are
FIELD = int64s("kind", "position", "length")

#: a row or truncate message of a batch: its kind (wire.MESSAGE_…), where it is, its relation version and its
#: transaction
CHANGE = int64s("kind", "offset", "length", "relation", "lsn", "ordinal", "xid", "time", "flags")

#: a record: where its key and value are (a length of -1 means that it has none), the number of its row or change, and
#: where headers of its own are (a length of 0 means that it has none), as kernels.rows and kernels.outbox write them
RECORD = int64s(
    "key", "key_length", "value", "value_length", "topic", "partition", "row", "event", "time", "lsn", "ordinal",
    "flags", "headers", "headers_length"
)  # fmt: skip

#: a row or change that cannot be encoded
ERROR = int64s(
    "row",
    "code",  # wire.REASONS
    "column",  # -1: none in particular
    "offset",  # where the value is, in bytes from the beginning of the row; -1: not in the row
)

#: a value that the server has to convert to text; "column" is its row in the table of columns
CONVERSION = int64s("position", "length", "column", "change")

#: a change whose new row lacks values: the first of them and how many they are; whether its key changed, whether a
#: value was read from the table, and what becomes of the change (kernels.unchanged)
LACKING = int64s("change", "first", "missing", "moved", "reread", "fate")

#: a value that a row lacks, and what was found for it; if nothing was found, its kind is still that of an unchanged
#: value
MISSING = int64s("change", "column", "kind", "position", "length")

#: an entry of a hash table of keys: a change that has this key, and the last change with a row of this key, both plus
#: one
SLOT = int64s("owner", "latest")


class Program(NamedTuple):
    """The description of tables for kernels.

    :param json: whether the output is JSON instead of Avro.
    :param protobuf: whether it is Protocol Buffers.
    :param framed: whether keys and values begin with the ids of their schemas.
    :param shorter: whether values of composites may lack attributes at their ends, which are NULL then.
    :param relations: rows of :data:`RELATION`.
    :param keys: the key columns, by their number within their relation.
    :param columns: rows of :data:`COLUMN`: the columns, their parts, and the segments of envelopes, which have a name
        only. An array more would be passed with each call of a kernel.
    :param names: what is written before the values of columns (names in JSON, tags in Protocol Buffers), the labels of
        enums, and the bytes of segments; then :data:`WORD` more bytes.
    """

    json: bool
    protobuf: bool
    framed: bool
    shorter: bool
    relations: Rows
    keys: npt.NDArray[np.int64]
    columns: Rows
    names: npt.NDArray[np.uint8]


class Output(NamedTuple):
    """The arrays that kernels fill.

    :param records: rows of :data:`RECORD`.
    :param errors: rows of :data:`ERROR`.
    :param data: the bytes of keys and values.
    """

    records: Rows
    errors: Rows
    data: npt.NDArray[np.uint8]


class Texts(NamedTuple):
    """The texts to which the server has converted values, one after the other.

    :param offsets: where each text begins, and where the last one ends.
    """

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


def rows(layout: np.dtype[np.void], entries: Sequence[Mapping[str, int]]) -> Rows:
    """A table with these entries. Without any, it has one row of zeros to which nothing refers, since compiled code
    takes the address of each table."""
    names = layout.names or ()
    table = np.zeros(max(1, len(entries)), dtype=layout)
    for i, entry in enumerate(entries):
        table[i] = tuple(entry[name] for name in names)
    return table


def facts(snapshot: int, now: float, lsn: int = 0) -> Rows:
    """What envelopes tell of all rows of a COPY, and what those of changes have in common.

    :param snapshot: where the rows come from: ``wire.FROM_…``.
    :param now: seconds since 1970.
    :param lsn: above that of all earlier changes of these keys in the topic, and not above that of any later one: L of
        a live snapshot, or where the stream goes on behind the first one; 0: not known.
    """
    found = np.zeros(1, dtype=FACTS)
    found["snapshot"], found["event"], found["xid"], found["lsn"] = snapshot, ord("r"), -1, lsn
    found["time"] = found["now"] = int(now * 1_000_000)
    return found


def output(records: int, errors: int, size: int) -> Output:
    """Empty arrays for so many records, errors and bytes."""
    return Output(np.zeros(records, dtype=RECORD), np.zeros(errors, dtype=ERROR), np.empty(size, dtype=np.uint8))
