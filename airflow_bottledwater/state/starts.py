"""Where a pipeline begins in its topics, which may have records: of a pipeline of before, perhaps of another server, or
of a time that a restore of the source took back. Only from there on, positions of the source rise, and say what is
newer."""

from __future__ import annotations

import json
from collections.abc import Mapping

from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import StartOffsets, StateRecord, start_key


def new(
    pipeline: Settings, known: PipelineState, ids: Mapping[str, str], ends: Mapping[str, list[int]]
) -> dict[str, StateRecord | None]:
    """The records for topics that no table of the pipeline has yet, or has again: another pipeline may have had them
    meanwhile. In topics that others publish to, too, it begins nowhere: positions of several sources lie among each
    other.

    :param ids: Kafka's ids of the topics, by their names.
    :param ends: their ends, by partition.
    """
    had = {pinned.topic for pinned in known.tables.values()}
    wanted = [] if pipeline.share_topics else sorted(ids.keys() - had)
    return {start_key(name): StartOffsets(ids[name], tuple(ends[name])) for name in wanted}


def event(name: str, values: Mapping[str, StateRecord | None], *, snapshot: bool = True) -> bytes:
    """The event that tells consumers of such records (docs/message-format.md); empty if there are none. It also has the
    topics without records: one that was deleted and made again may have events of before.

    :param name: the pipeline's.
    :param values: records that are about to be written.
    :param snapshot: whether a snapshot publishes again what the topics have; otherwise that stays valid.
    """
    topics = {
        key.partition("/")[2]: record.offsets
        for key, record in values.items()
        if isinstance(record, StartOffsets) and (snapshot or not any(record.offsets))
    }
    return json.dumps({"event": "begin", "pipeline": name, "topics": topics}).encode() if topics else b""
