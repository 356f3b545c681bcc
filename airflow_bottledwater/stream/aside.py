"""Tables that are set aside because of a record that cannot be published, while the others go on
(``on_error = isolate``).

A table is set aside from the source transaction on that has the record: none of its changes of that transaction is
published, and all changes of others are. Why is recorded in the Kafka transaction that publishes these, together with
P: whoever reads the state at P knows what is left out behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.state import held
from airflow_bottledwater.state.records import Gap
from airflow_bottledwater.stream.stops import position_of, skips


def set_aside(pipeline: Settings, encoded: EncodedBatch, programs: Programs, known: Collection[int]) -> EncodedBatch:
    """A batch without what is not published of it: the changes of tables that are held, and those of tables that are to
    be set aside because of a record in it, from its transaction on. The change at ``skip_position`` sets none aside.

    :param known: the oids of tables of which nothing is published already.
    """
    if not encoded.rejections and not known:
        return encoded
    begins, gaps = dict.fromkeys(known, 0), dict[int, Gap]()
    mapping = TableMapping.of(pipeline)
    for rejection in sorted(encoded.rejections, key=lambda each: each.row):
        change = encoded.change(rejection)
        table = programs.tables[int(change["relation"])]
        if table.oid not in begins and mapping.policy(table) == "isolate" and not skips(pipeline, change):
            begins[table.oid] = int(change["lsn"])
            gaps[table.oid] = held.set_aside(f"a change at {position_of(change)}", rejection.reason)
    if not begins:
        return encoded
    rows = left_out(encoded, begins)
    out = set(rows.tolist())
    rejections = [each for each in encoded.rejections if each.row not in out]
    records, outbox = (_without(each, rows) for each in (encoded.records, encoded.outbox))
    return replace(encoded, records=records, outbox=outbox, rejections=rejections, held=begins, gaps=gaps)


def _without(records: Records, rows: npt.NDArray[np.int64]) -> Records:
    """The records of other changes than these."""
    kept = ~np.isin(records.table["row"], rows)
    return Records(records.table[kept], records.data, records.headers, records.label)


def left_out(encoded: EncodedBatch, begins: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """The numbers of a batch's changes that are not published, since their tables are held.

    :param begins: see :class:`~airflow_bottledwater.publish.encode.EncodedBatch`, ``held``.
    """
    batch = encoded.completed.batch
    never = np.iinfo(np.int64).max
    first = np.array([begins.get(version.table.oid, never) for version in batch.versions], dtype=np.int64)
    return (
        np.flatnonzero(batch.changes["lsn"] >= first[batch.changes["relation"]])
        if len(first)
        else np.array([], np.int64)
    )
