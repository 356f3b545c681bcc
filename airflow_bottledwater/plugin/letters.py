"""The newest dead letters of a pipeline, as the page shows them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from airflow_bottledwater.encoding.names import service_topic
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.state.letters import head

#: records at the topic's end that are looked at, dead letters that are shown, and seconds that the look may take: a
#: dead letter may have a megabyte
_LAST, _SHOWN, _WITHIN = 500, 50, 1.5


def newest(kafka: Mapping[str, str], name: str, prefix: str, *, keys: bool) -> dict[str, Any]:
    """The dead letters of a pipeline among the last records of their topic, the newest first; ``complete`` says whether
    the whole topic was looked at.

    :param name: the pipeline's.
    :param prefix: its ``topic_prefix``.
    :param keys: whether to tell of which rows they are.
    :raises BottledWaterError: Kafka does not answer, or does not let this client read the topic.
    """
    topic, begun = service_topic("dead_letters", prefix), time.monotonic()
    topics = Topics(kafka)
    if topic not in topics.describe([topic]):
        return {"letters": [], "complete": True}
    (end,), (begin,) = topics.ends(topic, 1, committed=True), topics.begins({topic: 1})[topic]
    found: dict[bytes, dict[str, Any] | None] = {}
    start, late = max(begin, end - _LAST), False
    with RangeReader(kafka) as reader:
        for message in reader.read(topic, {0: start}, {0: end}):
            found.pop(message.key(), None)
            if message.value() is not None:
                found[message.key()] = _shown(message.value(), name, (message.timestamp()[1] or 0) / 1000, keys)
            if late := time.monotonic() - begun > _WITHIN:
                break
    letters = [each for each in found.values() if each is not None]
    complete = start == begin and not late and len(letters) <= _SHOWN
    return {"letters": letters[: -_SHOWN - 1 : -1], "complete": complete}


def _shown(raw: bytes, name: str, at: float, keys: bool) -> dict[str, Any] | None:
    """None for what is no dead letter of this pipeline."""
    if (letter := head(raw, [name])) is None:
        return None
    return {
        "table": letter.relation,
        "op": letter.op,
        "position": letter.pos,
        "by": letter.by,
        "reason": letter.error,
        "key": letter.key if keys else None,
        "at": at,
    }
