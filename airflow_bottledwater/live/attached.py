"""What is read of partitions that were attached with rows, and what they may have left in the topic when they are not
what they were."""

from __future__ import annotations

from dataclasses import replace

from airflow_bottledwater.live.keys import files
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.partitions import KnownPartition
from airflow_bottledwater.postgres.snapshot import OwnSnapshot
from airflow_bottledwater.state.records import LiveProgress


def only(found: OwnSnapshot, oids: tuple[int, ...]) -> OwnSnapshot:
    """What of a table is to be read: these partitions, as far as they still belong to it, or everything."""
    if not oids:
        return found
    return replace(
        found,
        parts=[part for part in found.parts if part.oid in oids],
        partitions=[part for part in found.partitions if part.oid in oids],
    )


def left_behind(connection: Connection, at: LiveProgress, found: OwnSnapshot) -> dict[int, KnownPartition]:
    """Which of the partitions that are read by themselves may have left rows in the topic that the table does not have
    any more: those that were taken away since their reading began, or that got a new file (by TRUNCATE, say). As known
    partitions that are not there, or have another file, they are told of until a sweep: PostgreSQL sends nothing of it.

    :param found: what :func:`only` leaves of a snapshot.
    """
    there = {part.oid for part in found.partitions}
    # of several tables, it is not known of which one it was a partition
    if gone := [part for part in at.parts if part not in there and len(at.tables) == 1]:
        named = catalog.names(connection, gone)
        return {part: KnownPartition(".".join(named.get(part, ("partition", str(part)))), 0) for part in gone}
    if at.parts and at.filenode not in (0, files(found)):
        return {part.oid: KnownPartition(part.qualified, 0, part.attached) for part in found.partitions if part.leaf}
    return {}
