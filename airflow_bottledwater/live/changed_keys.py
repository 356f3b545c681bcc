"""Which keys the stream has published changes of that a snapshot does not show: their rows in that snapshot are
older."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.kafka.hashes import hash_records
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.encode import EncodedBatch

#: a key by its topic and hash, and the transaction that changed it. 64 bits of a hash with a secret seed: that two of
#: ten million keys share one has a chance of 1 : 300,000, and then a row is left out that the topic has already, or
#: that the next live snapshot brings
_ENTRY: Final = np.dtype([("topic", np.int64), ("key", np.uint64), ("xid", np.int64)])
#: noted keys beyond which what is being read is given up and read again later: 200 MB
MOST = 8_000_000


@dataclass(frozen=True, slots=True)
class SupersedingKeys:
    """The keys of one topic that the stream has published in a version newer than a snapshot's.

    :param all: whether any key may be one of them: the table was truncated, or has a change whose key is not known.
    """

    keys: npt.NDArray[np.uint64]
    all: bool

    def rows(self, records: Records) -> npt.NDArray[np.bool_]:
        """Which records have one of these keys."""
        if not len(self.keys):
            return np.zeros(len(records), dtype=np.bool_)
        return np.isin(hash_records(records)[:, 0], self.keys)


class ChangedKeys:
    """Notes the keys of the changes that are published, each with the last transaction that changed it: a snapshot that
    does not show an earlier one does not show that either, since whoever changes a row or takes its key waits until the
    transaction before has ended for all."""

    def __init__(self) -> None:
        #: in the order of the changes, each at least twice as large as the next: there are few, however many batches
        #: there were, and fewer than twice as many entries as the first has, which has each of its keys once
        self._parts: list[npt.NDArray[np.void]] = []
        self._all: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def clear(self) -> None:
        """Forget everything."""
        self._parts, self._all = [], set()

    def note(
        self, encoded: EncodedBatch, topics: dict[str, int], wanted: Collection[int], oldest: Snapshot | None
    ) -> None:
        """Note a batch that is going to be published.

        :param topics: the topics' indices.
        :param wanted: the indices of the topics whose keys are of interest.
        :param oldest: the oldest snapshot that rows are held of: what it shows is in all later ones, too. None: there
            is none yet.
        """
        batch = encoded.completed.batch
        if not len(batch):
            return
        table = encoded.records.table
        table = table[np.isin(table["topic"], list(wanted))]
        entries: npt.NDArray[np.void] = np.zeros(len(table), dtype=_ENTRY)
        entries["topic"], entries["xid"] = table["topic"], batch.changes["xid"][table["row"]]
        entries["key"] = hash_records(replace(encoded.records, table=table))[:, 0]
        # a change that cannot be encoded has no record, and so no key here; one that is rejected for its size, say, has
        # all of its keys
        rows = np.array([rejection.row for rejection in encoded.rejections], dtype=np.int64)
        for change in batch.changes[rows[~np.isin(rows, encoded.records.table["row"])]]:
            version = batch.versions[int(change["relation"])]
            if not version.table.outbox:  # which has no topic of its own, and no keys that are read again
                self._all.add((topics[version.topic], int(change["xid"])))
        topic_of = {v.table.oid: topics[v.topic] for v in batch.versions if not v.table.outbox}
        for change in batch.changes[batch.changes["kind"] == pgoutput.TRUNCATE]:
            at, size = int(change["offset"]), int(change["length"])
            for oid in pgoutput.truncate(bytes(batch.data[at : at + size])).oids:
                if oid in topic_of:
                    self._all.add((topic_of[oid], int(change["xid"])))
        if oldest is not None:
            entries = entries[_unseen(entries["xid"], oldest)]
        if len(entries):
            self._add(entries)

    def _add(self, entries: npt.NDArray[np.void]) -> None:
        self._parts.append(_last(entries))
        while len(self._parts) > 1 and len(self._parts[-2]) < 2 * len(self._parts[-1]):
            self._parts[-2:] = [_last(np.concatenate(self._parts[-2:]))]

    def newer(self, topic: int, snapshot: Snapshot | None) -> SupersedingKeys:
        """The keys of a topic with changes that a snapshot does not show.

        :param topic: the topic's index.
        :param snapshot: None: those with any changes.
        """
        unseen = any(of == topic and (snapshot is None or not snapshot.sees(xid)) for of, xid in self._all)
        found = [part[part["topic"] == topic] for part in self._parts]
        keys = [part["key"] if snapshot is None else part["key"][_unseen(part["xid"], snapshot)] for part in found]
        return SupersedingKeys(np.unique(np.concatenate(keys)) if keys else np.zeros(0, dtype=np.uint64), unseen)

    def forget(self, oldest: Snapshot) -> None:
        """Forget what this snapshot shows, and so all later ones."""
        self._all = {(topic, xid) for topic, xid in self._all if not oldest.sees(xid)}
        kept = [part[_unseen(part["xid"], oldest)] for part in self._parts]
        kept = [part for part in kept if len(part)]
        self._parts = [_last(np.concatenate(kept))] if kept else []


def _last(entries: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """The last entry of each key."""
    ordered = entries[np.lexsort((entries["key"], entries["topic"]))]  # equal ones stay in their order
    before, behind = ordered[:-1], ordered[1:]
    same = (before["topic"] == behind["topic"]) & (before["key"] == behind["key"])
    found: npt.NDArray[np.void] = ordered[np.append(~same, [True])]
    return found


def _unseen(xids: npt.NDArray[np.int64], snapshot: Snapshot) -> npt.NDArray[np.bool_]:
    """Which transactions a snapshot does not show."""
    distinct, places = np.unique(xids, return_inverse=True)
    found = np.array([not snapshot.sees(int(xid)) for xid in distinct], dtype=np.bool_)
    unseen: npt.NDArray[np.bool_] = found[places] if len(distinct) else np.zeros(0, dtype=np.bool_)
    return unseen
