"""Records that remove keys which the source does not have any more, where nothing is known of them but the key."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import fastavro
import numpy as np

from airflow_bottledwater.encoding import avro, kernels, layout, wire
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka.publisher import Records, tombstones
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.publish.session import PublishSession

#: bytes of an envelope without its rows and constants at most
_ROOM = 4096
#: the header ``op`` of a deletion, in the form of a record's own headers: each part behind its length, and a
#: zero behind the name
_DELETED = b"\0\0\0\3op\0" + b"\0\0\0\1d"


def removals(
    session: PublishSession, version: Version, keys: Sequence[tuple[int, bytes]], origin: int, lsn: int = 0
) -> Records:
    """Tombstones for keys, each with its partition; with envelopes, the event of the deletion is in front of each. Its
    old row has the columns of the key, and both have the header ``op``, since the event is no row of a snapshot.

    :param origin: who has found out that they are gone: ``wire.FROM_…``.
    :param lsn: see :func:`~airflow_bottledwater.encoding.layout.facts`.
    """
    topic, mapping = session.index[version.topic], TableMapping.of(session.pipeline)
    if mapping.envelope is None:
        return tombstones(topic, keys)
    head, middle, tail = _around(session, version, origin, lsn)
    old = (_json_row if mapping.format.as_json else _avro_row)(mapping, version)
    table = np.zeros(2 * len(keys), dtype=RECORD)
    data = bytearray(_DELETED)
    table["headers_length"] = len(_DELETED)
    # a record with headers of its own needs a time (librdkafka.produce)
    table["time"] = int(time.time() * 1000)
    for i, (partition, key) in enumerate(keys):
        value = head + old(key) + middle + tail
        pair = table[2 * i : 2 * i + 2]
        pair["key"], pair["key_length"], pair["partition"] = len(data), len(key), partition
        pair["value"], pair["value_length"] = (len(data) + len(key), 0), (len(value), -1)
        data += key + value
    table["topic"] = topic
    return Records(table, np.frombuffer(data, dtype=np.uint8), 0)


def _around(session: PublishSession, version: Version, origin: int, lsn: int) -> tuple[bytes, bytes, bytes]:
    """What is in front of the old row, what is between it and the end, with a new row that is absent, and the end."""
    programs = session.programs([version], copied=True)
    facts = layout.facts(origin, time.time(), lsn)
    facts["event"] = wire.EVENT_DELETE
    out = np.zeros(programs.around + _ROOM, dtype=np.uint8)
    ends = np.zeros(3, dtype=np.int64)
    kernels.encode_removal(programs.program, 0, facts, out, ends)
    before, behind, end = ends.tolist()
    return bytes(out[:before]), bytes(out[before:behind]), bytes(out[behind:end])


def _json_row(mapping: TableMapping, version: Version) -> Callable[[bytes], bytes]:
    around = mapping.around(version.topic, version.table, "")
    head = b"" if around is None else around.key_head
    tail = b"}" * bool(head)

    def old(key: bytes) -> bytes:
        row = key[len(head) : len(key) - len(tail)]
        try:
            ours = key == head + row + tail and isinstance(json.loads(row), dict)
        except ValueError:
            ours = False
        # as it is: numbers may have more digits than Python's; otherwise, another program has written the record
        return row if ours else b"null"

    return old


def _avro_row(mapping: TableMapping, version: Version) -> Callable[[bytes], bytes]:
    record = mapping.record(version.topic)

    def parsed(text: str) -> Any:
        return fastavro.parse_schema(avro.without_logical(json.loads(text)))

    keys, rows = parsed(avro.key_schema(version.table, record)), parsed(avro.value_schema(version.table, record))
    framed = bytes([wire.MAGIC]) + version.key_schema.to_bytes(4, "big")

    def old(key: bytes) -> bytes:
        if not key.startswith(framed):
            return b"\0"  # a record that another program has written
        made = io.BytesIO()
        found = fastavro.schemaless_reader(io.BytesIO(key[len(framed) :]), keys, None)
        fastavro.schemaless_writer(made, rows, found)
        return b"\2" + made.getvalue()

    return old
