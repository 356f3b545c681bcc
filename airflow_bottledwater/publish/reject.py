"""Rejections, which are rows that cannot be published; used by both the snapshot and the stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.publish.session import PublishSession


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that cannot be published, and why.

    :param row: the row's number in the block (of a snapshot), or its change's number in the batch (of the stream).
    :param code: the error code of :mod:`~airflow_bottledwater.encoding.wire`, if a kernel reported it; otherwise 0.
    :param column: the number of the column that the error is in; -1: none in particular.
    """

    row: int
    reason: str
    code: int = 0
    column: int = -1


def too_large(largest: int) -> str:
    """The reason for a row that is too large to be encoded completely."""
    return (
        f"the record has more than {largest:,} bytes, which is the largest max.message.bytes of the pipeline's topics, "
        "as far as this role may read it (DescribeConfigs)"
    )


def oversized(session: PublishSession, records: Records) -> list[Rejection]:
    """The rows whose records exceed their topic's max.message.bytes."""
    if not len(records) or not (found := np.flatnonzero(session.oversized(records)).tolist()):
        return []
    sizes, table = records.sizes(), records.table

    def limit(topic: int) -> str:
        size = f"{int(session.limits[topic]):,}"
        if session.described[session.topics[topic]].known:
            return size
        return f"assumed to be {size}, Kafka's default, since this role may not read it: grant it DescribeConfigs"

    return [
        Rejection(
            int(table[i]["row"]),
            f"the record has {int(sizes[i]):,} bytes, the topic's max.message.bytes is {limit(int(table[i]['topic']))}",
        )
        for i in found
    ]


def distinct(rejections: Iterable[Rejection]) -> list[Rejection]:
    """One rejection for each row, the first: what failed to complete a row knows the reason better than the kernel that
    then found it incomplete."""
    first: dict[int, Rejection] = {}
    for rejection in rejections:
        first.setdefault(rejection.row, rejection)
    return [first[row] for row in sorted(first)]


def without(records: Records, rejections: Iterable[Rejection]) -> Records:
    """The records of the rows that are not rejected."""
    rows = sorted({rejection.row for rejection in rejections})
    if not rows:
        return records
    kept = ~np.isin(records.table["row"], np.array(rows))
    return Records(records.table[kept], records.data, records.headers, records.label)
