"""Events of the stream that are not changes of rows, as records for the events topic."""

from __future__ import annotations

import json
from collections.abc import Iterator

from airflow_bottledwater.kafka.publisher import Records, single
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.stops import position_of


def truncate_events(batch: Batch, topic: int) -> Iterator[Records]:
    """An event for each TRUNCATE in the batch.

    :param topic: the index of the events topic in the session's topics.
    """
    known = {v.table.oid: v for v in batch.versions}
    for change in batch.changes[batch.changes["kind"] == pgoutput.TRUNCATE]:
        at, size = int(change["offset"]), int(change["length"])
        message = pgoutput.truncate(bytes(batch.data[at : at + size]))
        position = str(position_of(change))
        event = {
            "event": "truncate",
            "pos": position,
            "xid": int(change["xid"]),
            "relations": [known[oid].table.qualified if oid in known else oid for oid in message.oids],
            "topics": [known[oid].topic for oid in message.oids if oid in known],
            "cascade": message.cascade,
            "restart_identity": message.restart_identity,
        }
        time_of_commit = int(change["time"])
        yield single(topic, 0, position.encode(), json.dumps(event).encode(), time_of_commit)
