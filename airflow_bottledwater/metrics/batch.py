"""Counts a batch of the stream that was committed in Kafka, in bulk."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.registry import CHANGED, DELAY_SECONDS, ROWS, SECONDS
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput

_OPERATIONS = {pgoutput.INSERT: "insert", pgoutput.UPDATE: "update", pgoutput.DELETE: "delete"}


def count(meter: Meter, changes: Rows, versions: Sequence[Version], rows: npt.NDArray[np.int64]) -> None:
    """Count the changes by table and operation, and how long ago their transactions were committed.

    :param changes: those of the batch, see :data:`airflow_bottledwater.encoding.layout.CHANGE`.
    :param rows: the numbers of those that were published: not of one that was rejected, or that is no record, as the
        delete of a row of an outbox, or of a table without a key.
    """
    if not len(changes):
        return
    now = time.time()
    # a kind is a letter, so that both numbers fit into one
    has_record = np.zeros(len(changes), dtype=np.bool_)
    has_record[rows] = True
    published = changes[has_record]
    counts = np.bincount(published["relation"] * 256 + published["kind"])
    for number in np.flatnonzero(counts).tolist():
        relation, kind = divmod(number, 256)
        if kind in _OPERATIONS:
            meter.add(ROWS, int(counts[number]), versions[relation].table.qualified, _OPERATIONS[kind])
    last = np.zeros(len(versions), dtype=np.int64)
    # of several changes of a relation, the last one counts
    last[published["relation"]] = published["time"]
    for relation in np.flatnonzero(last).tolist():
        meter.set(CHANGED, int(last[relation]) / 1000, versions[relation].table.qualified)
    lsn: npt.NDArray[np.int64] = changes["lsn"]
    firsts = np.concatenate([[True], lsn[1:] != lsn[:-1]])
    committed = changes["time"][firsts] / 1000
    meter.committed = float(committed[-1])
    if meter.ahead is not None:
        delays = np.maximum(0.0, now + meter.ahead - committed)
        buckets = np.bincount(np.searchsorted(SECONDS, delays), minlength=len(SECONDS) + 1)
        meter.observe_all(DELAY_SECONDS, buckets.tolist(), float(delays.sum()))
