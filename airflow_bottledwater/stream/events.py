"""Events of the stream that are not changes of rows, as records for the events topic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.kafka.publisher import Records, single
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.stops import position_of, truncated


def published_truncates(batch: Batch, held: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """The numbers of the changes that are a TRUNCATE of a table which is not held.

    :param held: see :class:`~airflow_bottledwater.publish.encode.EncodedBatch`.
    """
    found = np.flatnonzero(batch.changes["kind"] == pgoutput.TRUNCATE)
    if not held:
        return found
    kept = [
        i
        for i in found.tolist()
        if any(_goes_on(held, oid, batch.changes[i]) for oid in truncated(batch, batch.changes[i]))
    ]
    return np.array(kept, dtype=np.int64)


def _goes_on(held: Mapping[int, int], oid: int, change: np.void) -> bool:
    return oid not in held or int(change["lsn"]) < held[oid]


def truncate_events(
    batch: Batch, topic: int, pipeline: str, held: Mapping[int, int] | None = None
) -> Iterator[Records]:
    """An event for each TRUNCATE in the batch, of the tables that are not held.

    :param topic: the index of the events topic in the session's topics.
    :param pipeline: the name of the one that publishes it.
    :param held: see :class:`~airflow_bottledwater.publish.encode.EncodedBatch`.
    """
    held = held or {}
    known = {v.table.oid: v for v in batch.versions}
    for change in batch.changes[published_truncates(batch, held)]:
        at, size = int(change["offset"]), int(change["length"])
        message = pgoutput.truncate(bytes(batch.data[at : at + size]))
        oids = [oid for oid in message.oids if _goes_on(held, oid, change)]
        position = str(position_of(change))
        event = {
            "event": "truncate",
            "pipeline": pipeline,
            "pos": position,
            "xid": int(change["xid"]),
            "relations": [known[oid].table.qualified if oid in known else oid for oid in oids],
            "topics": [known[oid].topic for oid in oids if oid in known and not known[oid].table.outbox],
            "cascade": message.cascade,
            "restart_identity": message.restart_identity,
        }
        time_of_commit = int(change["time"])
        yield single(topic, 0, position.encode(), json.dumps(event).encode(), time_of_commit)
