"""Reads query results in bulk: a compiled loop calls libpq's functions on psycopg's result."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from psycopg import pq

from airflow_bottledwater.compiled import compiled, external, memcpy, types
from airflow_bottledwater.encoding.kernels.reading import i64
from airflow_bottledwater.encoding.layout import FIELD, Rows
from airflow_bottledwater.encoding.wire import FIELD_BINARY, FIELD_NULL
from airflow_bottledwater.postgres.receive import libpq

# https://www.postgresql.org/docs/current/libpq-exec.html#LIBPQ-EXEC-SELECT-INFO
_get_value = external(libpq, "PQgetvalue", types.intp, types.intp, types.int32, types.int32)
_get_length = external(libpq, "PQgetlength", types.int32, types.intp, types.int32, types.int32)
_is_null = external(libpq, "PQgetisnull", types.int32, types.intp, types.int32, types.int32)


@compiled
def _take(result, rows, number, cells, out):
    """Copy the values; returns their size in bytes. If ``out`` is empty, nothing is copied, and the size is only
    measured."""
    used = 0
    for row in range(rows):
        if out.size > 0:
            memcpy(number.ctypes.data, _get_value(result, np.int32(row), np.int32(0)), 8)
        at = i64(number, 0)
        for column in range(cells.shape[1]):
            length = np.int64(_get_length(result, np.int32(row), np.int32(column + 1)))
            if out.size > 0:
                cell = cells[at, column]
                cell.kind = FIELD_NULL if _is_null(result, np.int32(row), np.int32(column + 1)) else FIELD_BINARY
                cell.position = used
                cell.length = length
                memcpy(out.ctypes.data + used, _get_value(result, np.int32(row), np.int32(column + 1)), length)
            used += length
    return used


def take_cells(result: pq.abc.PGresult, cells: Rows) -> npt.NDArray[np.uint8]:
    """Copy the values of a result, in binary form, into one buffer, and fill in ``cells``, which point into it.

    :param result: its first column, an int8, is the row's number in ``cells``; the others are the columns there.
    :param cells: rows of :data:`~airflow_bottledwater.encoding.layout.FIELD`; those that the result does not contain
        are not changed.
    """
    pointer: int = result.pgresult_ptr or 0  # type: ignore[attr-defined]
    number: npt.NDArray[np.uint8] = np.zeros(8, dtype=np.uint8)
    size = _take(pointer, result.ntuples, number, cells, np.zeros(0, dtype=np.uint8))
    out: npt.NDArray[np.uint8] = np.empty(size + 1, dtype=np.uint8)  # never empty, or nothing is copied
    _take(pointer, result.ntuples, number, cells, out)
    return out


def warm_up() -> None:
    """Compile the loop; without rows it does nothing."""
    _take(0, 0, np.zeros(8, dtype=np.uint8), np.zeros((1, 1), dtype=FIELD), np.zeros(0, dtype=np.uint8))
