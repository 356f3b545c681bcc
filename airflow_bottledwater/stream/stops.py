"""Which change of a batch ends the stream: the first TRUNCATE or rejected row that the settings do not allow to
pass."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.publish.reject import Rejection


def truncate_stop(pipeline: Settings, batch: Batch, held: Collection[int] = ()) -> RecordError | None:
    """The error for the first TRUNCATE, if ``on_truncate`` is stop; the one at ``skip_position`` passes.

    :param held: the oids of tables of which nothing is published.
    """
    if pipeline.on_truncate != "stop":
        return None
    truncates = batch.changes[batch.changes["kind"] == pgoutput.TRUNCATE]
    change = next((c for c in truncates if not skips(pipeline, c) and not truncated(batch, c) <= set(held)), None)
    if change is None:
        return None
    position = position_of(change)
    return RecordError(
        f"TRUNCATE of {batch.versions[int(change['relation'])].table.qualified} at {position}, and on_truncate is "
        "stop.",
        "Everything before its transaction is published. Set on_truncate to event to go on, or skip_position to "
        f"{position} to let this one pass.",
        position=str(position),
    )


def truncated(batch: Batch, change: np.void) -> set[int]:
    """The oids of the tables that a TRUNCATE names."""
    at, size = int(change["offset"]), int(change["length"])
    return set(pgoutput.truncate(bytes(batch.data[at : at + size])).oids)


def rejection_stop(
    pipeline: Settings,
    encoded: EncodedBatch,
    programs: Programs,
    policies: Collection[str] = ("exit",),
    loses: Callable[[Rejection], bool] = lambda _: False,
) -> RecordError | None:
    """The error for the first rejection of a table with one of these policies (``on_error``), or which ``log`` would
    lose; the one at ``skip_position`` passes.

    :param loses: whether the dead letter of a rejection lacks what may be nowhere else.
    """
    if not encoded.rejections:
        return None
    mapping = TableMapping.of(pipeline)

    def policy(rejection: Rejection) -> str:
        return mapping.policy(programs.tables[int(encoded.change(rejection)["relation"])])

    stopping = [
        r
        for r in encoded.rejections
        if (policy(r) in policies or (policy(r) == "log" and loses(r))) and not skips(pipeline, encoded.change(r))
    ]
    if not stopping:
        return None
    first = min(stopping, key=lambda r: r.row)
    change = encoded.change(first)
    relation, position = int(change["relation"]), position_of(change)
    topic = encoded.batch.versions[relation].topic
    others = (
        "on_error = log, which writes it to the dead-letter topic, or isolate, which sets the table aside; or with"
        if policy(first) in policies
        else "a larger max.message.bytes of the dead-letter topic, which under on_error = log has to hold the whole "
        "record, since it may be deleted elsewhere; or with"
    )
    return RecordError(
        f"The change of {programs.tables[relation].qualified} at {position} cannot be published to topic {topic!r}: "
        f"{first.reason}.",
        f"Everything before its transaction is published. Mend the cause and start again; or go on with {others} "
        f"skip_position = {position}, which writes this change alone to the dead-letter topic.",
        position=str(position),
        topic=topic,
    )


def skips(pipeline: Settings, change: np.void) -> bool:
    """Whether a person has decided, with ``skip_position``, that the stream is not to stop at this change."""
    return str(position_of(change)) == pipeline.skip_position.upper()


def position_of(change: np.void) -> Position:
    """The position of a change, which stays the same however often its batch is cut, completed and encoded."""
    return Position(int(change["lsn"]), int(change["ordinal"]))
