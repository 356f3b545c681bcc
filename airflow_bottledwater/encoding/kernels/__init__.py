"""The compiled encoder: rows as ``COPY … (FORMAT binary)`` or pgoutput send them become Avro or JSON records.

No Python object is made for a value. Every function that writes takes the output array and a position and returns the
next position, or a negative code of :mod:`~airflow_bottledwater.encoding.wire`; none reads outside a row. From the
bottom up: ``reading`` and ``writing``; ``text``, ``floats`` and ``numeric``; ``to_avro`` and ``to_json`` for single
values; ``nested`` for values that consist of others; ``fields`` of rows; ``envelope`` around them; ``rows``;
``choosers``. The tests have a readable implementation of the same, to compare with.
"""

from __future__ import annotations

from airflow_bottledwater.encoding.kernels.choosers import choose_for_changes, choose_for_copy
from airflow_bottledwater.encoding.kernels.envelope import encode_removal
from airflow_bottledwater.encoding.kernels.fields import find_conversions
from airflow_bottledwater.encoding.kernels.rows import encode_changes, encode_copy, murmur2

__all__ = [
    "choose_for_changes",
    "choose_for_copy",
    "encode_changes",
    "encode_copy",
    "encode_removal",
    "find_conversions",
    "murmur2",
]
