"""Compiling what reads, encodes and produces rows, before the first transaction is open."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater import compiled
from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.program import compile_programs
from airflow_bottledwater.kafka import librdkafka
from airflow_bottledwater.postgres import receive
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED


def warm_up() -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`."""
    compiled.warm_up("publish", receive.warm_up, _encode, _produce)


def _encode() -> None:
    programs = compile_programs([], "avro", copied=False)
    program, fields, data = programs.program, programs.scratch(), np.zeros(1, dtype=np.uint8)
    changes, output = np.zeros(0, dtype=layout.CHANGE), layout.output(2, 1, 1)
    kernels.encode_copy(data, np.zeros(1, dtype=np.int64), 0, program, 0, fields, output)
    kernels.find_conversions(data, changes, program, fields, np.zeros(1, dtype=layout.CONVERSION))
    kernels.find_unchanged(data, changes, program, fields, np.zeros(1, dtype=np.int64))
    kernels.encode_changes(data, changes, 0, program, NOTHING_CONVERTED, 0, fields, output)


def _produce() -> None:
    nothing = np.zeros(0, dtype=layout.RECORD)
    handles = librdkafka.handles(0, np.zeros(1, dtype=np.int64))
    librdkafka.produce(handles, nothing, 0, np.zeros(1, dtype=np.uint8), wire.HEADERS, 0, 0)
