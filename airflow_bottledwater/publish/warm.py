"""Compiling what reads, encodes and produces rows, before the first transaction is open."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater import compiled
from airflow_bottledwater.encoding import kernels, wire
from airflow_bottledwater.encoding.program import compile_programs
from airflow_bottledwater.kafka import librdkafka
from airflow_bottledwater.postgres import receive
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED


def warm_up() -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`."""
    compiled.warm_up("publish", receive.warm_up, _encode, _produce)


def _encode() -> None:
    programs = compile_programs([], "avro", copied=False)
    scratch, data = programs.scratch(), np.zeros(1, dtype=np.uint8)
    records = np.zeros((2, wire.RECORD_WIDTH), dtype=np.int64)
    changes = np.zeros((0, wire.CHANGE_WIDTH), dtype=np.int64)
    errors, found = np.zeros((1, wire.ERROR_WIDTH), dtype=np.int64), np.zeros((1, 4), dtype=np.int64)
    kernels.encode_copy(
        data, np.zeros(1, dtype=np.int64), 0, 0, programs.json, programs.relations, 0, programs.columns, programs.keys,
        programs.names, scratch, records, errors, data,
    )  # fmt: skip
    kernels.find_conversions(data, changes, 0, programs.relations, programs.columns, programs.keys, scratch, found)
    kernels.find_unchanged(data, changes, 0, programs.relations, scratch, np.zeros(1, dtype=np.int64))
    kernels.encode_changes(
        data, changes, 0, 0, programs.json, programs.relations, programs.columns, programs.keys, programs.names, *NOTHING_CONVERTED,
        0, scratch, records, errors, data,
    )  # fmt: skip


def _produce() -> None:
    records = np.zeros((0, wire.RECORD_WIDTH), dtype=np.int64)
    data, topics = np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    librdkafka.produce(0, topics, records, 0, 0, data, 1, 0, 0, *librdkafka.scratch())
