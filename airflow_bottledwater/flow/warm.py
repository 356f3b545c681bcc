"""Compile what is compiled before the first transaction is open; run as a module to fill the cache ahead of time."""

from __future__ import annotations

import logging
import os
import time

import numpy as np

from airflow_bottledwater.compiled import filling_cache
from airflow_bottledwater.encoding import kernels, wire
from airflow_bottledwater.encoding.program import compile_programs
from airflow_bottledwater.flow.rows import NOTHING_CONVERTED
from airflow_bottledwater.flow.transactions import Cutter
from airflow_bottledwater.kafka import librdkafka
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres import receive

log = logging.getLogger(__name__)


def warm_up() -> None:
    """Call every compiled function with nothing to do: from the cache this takes a second, without it half a minute."""
    started = time.monotonic()
    told = False
    with filling_cache():
        for step in (_receive, _cut, _encode, _produce):
            step()
            if not told and time.monotonic() - started > 3:
                told = True
                log.info("Compiling for this machine; the next start finds it in %s.", _cache())
    if told:
        log.info("Compiled in %.0f s.", time.monotonic() - started)


def _cache() -> str:
    return os.environ.get("NUMBA_CACHE_DIR") or "no cache: there is no writable folder"


def _receive() -> None:
    receive.warm_up()


def _cut() -> None:
    def resolve(*_: object) -> object:
        raise AssertionError

    block = receive.Block(np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64))
    cutter = Cutter(Position(0), {}, resolve, limit=1, most=1)  # type: ignore[arg-type]
    cutter.add(block)
    cutter.cut()


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
    kernels.checksum(np.zeros(1, dtype=np.uint64), np.uint64(0))
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


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warm_up()
