"""The tables that kernels and their callers share: NumPy's structured arrays, whose fields compiled code reads by name.

Every field is an int64, so a table costs what a matrix of numbers does and needs no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: an array of one of the layouts below
Rows = npt.NDArray[np.void]


def int64s(*fields: str) -> np.dtype[np.void]:
    """A layout of these fields."""
    return np.dtype([(field, np.int64) for field in fields])


#: how the values of a column, or of what a column's values are made of, are written
COLUMN = int64s(
    "opcode",
    "argument",
    "name",  # where it is in the program's names
    "name_length",
    "converted",  # the server makes of the value what the opcode takes
    "child",  # the first row of what it is made of
    "required",  # not a union with null
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
    "sends_updates",  # an unkeyed table sends inserts only, one with the full old row also updates
    "converts",  # one of its columns is converted
)

#: a field of the row that is being encoded: its format (wire.FIELD_…), and where its bytes are
FIELD = int64s("kind", "position", "length")

#: a row or truncate message of a batch: its kind (wire.MESSAGE_…), where it is, and what is known of its transaction
CHANGE = int64s("kind", "offset", "length", "relation", "lsn", "ordinal", "xid", "time", "flags")

#: a record: where its key and value are (a length of -1: it has none), and of which row or change it is
RECORD = int64s(
    "key", "key_length", "value", "value_length", "topic", "partition", "row", "event", "time", "lsn", "ordinal", "flags"
)  # fmt: skip

#: a row or change that cannot be encoded
ERROR = int64s(
    "row",
    "code",  # wire.REASONS
    "column",  # -1: none in particular
    "offset",  # where it is, in bytes from the row's first one; -1: not in it
)

#: a value that the server has to turn into text; its column is a row of the table of columns
CONVERSION = int64s("position", "length", "column", "change")

#: a change whose new row lacks values: the first of them and how many; whether its key moved, whether a value was read from the
#: table, and what becomes of it (kernels.unchanged)
LACKING = int64s("change", "first", "missing", "moved", "reread", "fate")

#: a value that a row lacks, and what was found for it; its kind stays that of an unchanged one where nothing was
MISSING = int64s("change", "column", "kind", "position", "length")

#: of a hash table of keys: the change that it has the key of, and the last one with a row of that key, both plus one
SLOT = int64s("owner", "latest")


class Program(NamedTuple):
    """What kernels know of tables.

    :param json: JSON instead of Avro.
    :param relations: :data:`RELATION`.
    :param keys: numbers of key columns within their relation.
    :param columns: :data:`COLUMN`.
    :param names: the names of columns as they are written before their values, and the labels of enums.
    """

    json: bool
    relations: Rows
    keys: npt.NDArray[np.int64]
    columns: Rows
    names: npt.NDArray[np.uint8]


class Output(NamedTuple):
    """What kernels fill.

    :param records: :data:`RECORD`.
    :param errors: :data:`ERROR`.
    :param data: keys and values.
    """

    records: Rows
    errors: Rows
    data: npt.NDArray[np.uint8]


class Texts(NamedTuple):
    """What the server made of values, one after the other.

    :param offsets: has one entry more than there are texts.
    """

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


def rows(layout: np.dtype[np.void], entries: Sequence[Mapping[str, int]]) -> Rows:
    """A table of these entries; without any, a row of zeros that nobody refers to: compiled code takes an address of each table."""
    names = layout.names or ()
    table = np.zeros(max(1, len(entries)), dtype=layout)
    for i, entry in enumerate(entries):
        table[i] = tuple(entry[name] for name in names)
    return table


def output(records: int, errors: int, size: int) -> Output:
    """Room for so many records, errors and bytes."""
    return Output(np.zeros(records, dtype=RECORD), np.zeros(errors, dtype=ERROR), np.empty(size, dtype=np.uint8))
