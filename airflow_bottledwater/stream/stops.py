"""Which change of a batch ends the stream: the first TRUNCATE or rejected row that the settings do not allow to
pass."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import EncodedBatch


def truncate_stop(pipeline: Settings, batch: Batch) -> RecordError | None:
    """The error for the first TRUNCATE, if ``on_truncate`` is stop; the one at ``skip_position`` passes."""
    if pipeline.on_truncate != "stop":
        return None
    truncates = batch.changes[batch.changes["kind"] == pgoutput.TRUNCATE]
    change = next((c for c in truncates if not _skips(pipeline, c)), None)
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


def rejection_stop(pipeline: Settings, encoded: EncodedBatch, programs: Programs) -> RecordError | None:
    """The error for the first rejection, if ``on_error`` is exit; the one at ``skip_position`` passes."""
    if not encoded.rejections:
        return None
    mapping = TableMapping.of(pipeline)
    stopping = [
        r
        for r in encoded.rejections
        if mapping.stops(programs.tables[int(encoded.change(r)["relation"])])
        and not _skips(pipeline, encoded.change(r))
    ]
    if not stopping:
        return None
    first = min(stopping, key=lambda r: r.row)
    change = encoded.change(first)
    relation, position = int(change["relation"]), position_of(change)
    topic = encoded.batch.versions[relation].topic
    return RecordError(
        f"The change of {programs.tables[relation].qualified} at {position} cannot be published to topic {topic!r}: "
        f"{first.reason}.",
        "Everything before its transaction is published. Mend the cause and start again; or go on with on_error = "
        f"log, which writes it to the dead-letter topic; or with skip_position = {position}, which does so with this "
        "change alone.",
        position=str(position),
        topic=topic,
    )


def _skips(pipeline: Settings, change: np.void) -> bool:
    """Whether a person has decided, with ``skip_position``, that the stream is not to stop at this change."""
    return str(position_of(change)) == pipeline.skip_position.upper()


def position_of(change: np.void) -> Position:
    """The position of a change, which stays the same however often its batch is cut, completed and encoded."""
    return Position(int(change["lsn"]), int(change["ordinal"]))
