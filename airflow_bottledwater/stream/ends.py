"""The ends of source transactions: what was published of each, so that a consumer can put them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.state.records import PartOfTransaction


@dataclass(frozen=True, slots=True)
class SourceTransaction:
    """What is published of a source transaction.

    :param lsn: its final LSN, which is the first part of its records' positions.
    """

    lsn: int
    published: PartOfTransaction

    @property
    def name(self) -> str:
        """The first part of its records' positions, as text."""
        return f"{self.lsn:016X}"

    def end(self) -> bytes:
        """The value of the record of its end."""
        of = self.published
        # names of topics have no characters that JSON has to escape
        topics = ",".join(f'"{name}":{count}' for name, count in of.counts.items())
        counted = sum(of.counts.values())
        return (
            f'{{"transaction":"{self.name}","xid":{of.xid},"time":{of.time},"count":{counted},"topics":{{{topics}}}}}'
        ).encode()

    def with_more(self, more: Mapping[str, int]) -> SourceTransaction:
        """The same with more records."""
        counts = dict(sorted((Counter(self.published.counts) + Counter(more)).items()))
        return SourceTransaction(self.lsn, PartOfTransaction(self.published.xid, self.published.time, counts))


def transactions(
    changes: Rows, rows: npt.NDArray[np.int64], topics: npt.NDArray[np.int64], names: Sequence[str]
) -> Iterator[SourceTransaction]:
    """The transactions of a batch of which something is published, in the order of their commits.

    :param changes: the batch's.
    :param rows: for each record that is published, the number of its change; ``topics`` likewise, the number of its
        topic.
    :param names: those of all topics.
    """
    # what is no transaction's has no xid
    topics, rows = (each[changes["xid"][rows] > 0] for each in (topics, rows))
    lsns, firsts = np.unique(changes["lsn"], return_index=True)
    of = np.searchsorted(lsns, changes["lsn"][rows])
    found, counted = np.unique(of * len(names) + topics, return_counts=True)
    of_first = [changes[name][firsts].tolist() for name in ("lsn", "xid", "time")]
    number, counts = -1, dict[str, int]()
    for pair, count in zip(found.tolist(), counted.tolist(), strict=True):
        if pair // len(names) != number:
            number, counts = pair // len(names), {}
            lsn, xid, time = (values[number] for values in of_first)
            yield SourceTransaction(lsn, PartOfTransaction(xid, time, counts))
        counts[names[pair % len(names)]] = count


def ended(
    found: Iterable[SourceTransaction], start: Position, before: PartOfTransaction | None, end: Position
) -> tuple[list[SourceTransaction], PartOfTransaction | None]:
    """The transactions that end in a batch, each with all that was published of it; and what was published by the
    batch's end of the one that it ends inside of.

    :param found: what the batch publishes; at its end, each has all of its counts.
    :param start: where the batch begins, and ``end`` where it ends.
    :param before: what was published by its start of the transaction that it begins inside of.
    """
    all_of = list(found)
    if start.ordinal and before is not None:
        if all_of and all_of[0].lsn == start.lsn:
            all_of[0] = all_of[0].with_more(before.counts)
        else:
            # none of its changes that are left is published
            all_of.insert(0, SourceTransaction(start.lsn, before))
    if end.ordinal and all_of and all_of[-1].lsn == end.lsn:
        return all_of[:-1], all_of[-1].published
    return all_of, None
