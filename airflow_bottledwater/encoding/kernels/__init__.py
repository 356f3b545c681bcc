"""The compiled transcoder: rows as ``COPY … (FORMAT binary)`` or pgoutput send them, to Avro or JSON records.

No Python object is made per value. Every function that writes takes the output array and a position and returns the next
position, or a negative code of :mod:`~airflow_bottledwater.encoding.wire`; none reads outside a row. From the bottom up:
``reading`` and ``writing``; ``text``, ``floats`` and ``numeric``; ``to_avro`` and ``to_json``, one value each; ``nested``, what values are
made of; ``fields`` of rows; ``rows``. Their readable twin is with the tests.
"""

from __future__ import annotations

from airflow_bottledwater.encoding.kernels.fields import find_conversions
from airflow_bottledwater.encoding.kernels.nested import write_value
from airflow_bottledwater.encoding.kernels.rows import encode_changes, encode_copy, murmur2

__all__ = ["encode_changes", "encode_copy", "find_conversions", "murmur2", "write_value"]
