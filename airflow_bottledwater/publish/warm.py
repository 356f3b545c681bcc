"""Compiles the functions that read, encode and produce rows, before the first transaction is open."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from airflow_bottledwater import compiled
from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.kernels import unchanged
from airflow_bottledwater.encoding.program import compile_programs
from airflow_bottledwater.kafka import librdkafka
from airflow_bottledwater.pipeline.formats import AVRO
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres import receive, results
from airflow_bottledwater.publish import hashed
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED


def warm_up(rules: Iterable[Table] = ()) -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`.

    :param rules: the options of tables: what only some of them need is compiled for these.
    """
    compiled.warm_up(
        "publish", hashed.hash_nothing, receive.warm_up, results.warm_up, _encode, _remove, _fill_unchanged, _produce
    )
    if any(rule.partition_by for rule in rules):
        compiled.warm_up("partitions by columns", _choose)


def _encode() -> None:
    programs = compile_programs([], AVRO, copied=False)
    program, fields, data = programs.program, programs.scratch(), np.zeros(1, dtype=np.uint8)
    changes, output = np.zeros(0, dtype=layout.CHANGE), layout.output(2, 1, 1)
    facts = np.zeros(1, dtype=layout.FACTS)
    kernels.encode_copy(data, np.zeros(1, dtype=np.int64), 0, program, 0, fields, facts, output)
    kernels.find_conversions(data, changes, program, fields, np.zeros(1, dtype=layout.CONVERSION))
    kernels.murmur2(data, 0, 0)
    kernels.encode_changes(data, changes, 0, program, NOTHING_CONVERTED, 0, fields, facts, output)


def _remove() -> None:
    # of a table whose envelope consists of empty segments
    program = compile_programs([], AVRO, copied=False).program._replace(
        relations=np.zeros(1, dtype=layout.RELATION), columns=np.zeros(32, dtype=layout.COLUMN)
    )
    ends = np.zeros(3, dtype=np.int64)
    kernels.encode_removal(program, 0, np.zeros(1, dtype=layout.FACTS), np.zeros(4096, dtype=np.uint8), ends)


def _choose() -> None:
    programs = compile_programs([], AVRO, copied=False)
    program, fields, data = programs.program, programs.scratch(), np.zeros(1, dtype=np.uint8)
    changes, records = np.zeros(0, dtype=layout.CHANGE), np.zeros(0, dtype=layout.RECORD)
    number = np.zeros(1, dtype=np.int64)
    kernels.choose_for_copy(data, number, program, 0, number, fields, records, data)
    kernels.choose_for_changes(data, changes, program, number, NOTHING_CONVERTED, fields, records, data)


def _fill_unchanged() -> None:
    program, data = compile_programs([], AVRO, copied=False).program, np.zeros(1, dtype=np.uint8)
    numbers, changes = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=layout.CHANGE)
    fields, slots = np.zeros((5, 1), dtype=layout.FIELD), np.zeros(1, dtype=layout.SLOT)
    lacking, missing = np.zeros(0, dtype=layout.LACKING), np.zeros(0, dtype=layout.MISSING)
    unchanged.find_unchanged(data, changes, program, fields, numbers)
    unchanged.leading(data, changes, program, fields, 1)
    unchanged.find_in_batch(data, changes, program, numbers, fields, fields, slots, (lacking, missing, numbers))
    unchanged.number_keys(data, changes, numbers, fields, 1, slots, numbers)
    unchanged.write_array(data, np.zeros(0, dtype=layout.FIELD), 0, np.zeros(20, dtype=np.uint8))
    unchanged.fill_in(lacking, missing, numbers, numbers, numbers, fields, 0)
    unchanged.rebuild(data, data, changes, lacking, missing, program, fields, data[:0])


def _produce() -> None:
    nothing = np.zeros(0, dtype=layout.RECORD)
    handles = librdkafka.handles(0, np.zeros(1, dtype=np.int64), np.zeros((1, 2), dtype=np.int64))
    librdkafka.produce(handles, nothing, 0, np.zeros(1, dtype=np.uint8), wire.HEADERS, np.zeros(0, dtype=np.uint8), 0)
