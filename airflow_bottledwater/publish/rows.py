"""Rows of a COPY: encoded, and those that cannot be published found, named and written as dead letters."""

from __future__ import annotations

import hashlib
import logging
import struct
import time
import uuid
from collections.abc import Iterator, Mapping

from airflow_bottledwater.encoding import layout, wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.kafka.publisher import Records, single
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish.dead_letter import MAX_BYTES, DeadLetter, column_texts
from airflow_bottledwater.publish.definitions import check_definitions
from airflow_bottledwater.publish.encode import BlockEncoder, Encoded
from airflow_bottledwater.publish.refusals import find_refused
from airflow_bottledwater.publish.reject import Rejection, distinct, oversized, without
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state.records import BY_LIVE

log = logging.getLogger(__name__)

#: bytes of a key column's value that an error shows
_KEY_BYTES = 100


class RowEncoder:
    """Encodes blocks of rows for a session. It remembers the rows that the broker is known to refuse.

    :param headers: see :class:`~airflow_bottledwater.kafka.publisher.Records`.
    :param by: what writes its dead letters, see :func:`~airflow_bottledwater.state.records.letters_key`.
    """

    def __init__(self, session: PublishSession, headers: int, by: str) -> None:
        self._session, self._by = session, by
        self._encoder = BlockEncoder(headers)
        #: rows that the broker is known to refuse, by the digest of their bytes, and why
        self._refused: dict[bytes, str] = {}

    def encode(
        self, version: Version, block: MessageBlock, programs: Programs, lsn: int = 0
    ) -> Iterator[tuple[Encoded, list[Rejection]]]:
        """The block's records, piece by piece, and the rows that cannot be published; a piece is valid until the next
        one.

        :param programs: of this version alone.
        :param lsn: see :func:`~airflow_bottledwater.encoding.layout.facts`.
        :raises RecordError: a row cannot be published and ``on_error`` is exit.
        :raises TypeAltered: rows do not fit the types of columns since these were altered.
        """
        facts = None
        if programs.enveloped:  # a block has less than a hundred rows, so it would cost a tenth of their time
            origin = wire.FROM_LIVE if self._by == BY_LIVE else wire.FROM_SNAPSHOT
            facts = layout.facts(origin, time.time(), lsn)
        for encoded in self._encoder.encode(block, programs, self._session.largest_record, facts):
            if changed := {each.column for each in encoded.rejections if each.code == wire.CHANGED}:
                check_definitions(self._session.pipeline, version.table, changed)
            found = [*oversized(self._session, encoded.records), *encoded.rejections]
            if self._refused:
                digests = ((row, _digest(block, row)) for row in encoded.rows)
                found = [Rejection(row, self._refused[d]) for row, d in digests if d in self._refused] + found
            rejections = distinct(found)
            if rejections and TableMapping.of(self._session.pipeline).stops(version.table):
                raise _record_error(version, block, rejections[0])
            yield encoded, rejections

    def dead_letter(
        self, version: Version, block: MessageBlock, rejection: Rejection, insert_lsn: int, label: str = ""
    ) -> Records:
        """The dead letter of a row that cannot be published.

        :param insert_lsn: L of the snapshot that shows the row.
        :param label: see :class:`~airflow_bottledwater.kafka.publisher.Records`.
        """
        raw, limit = _row(block, rejection.row), self._session.dead_letter_limit
        whole = len(raw) < limit
        message = _as_insert(version.table, raw, largest=len(raw) if whole else MAX_BYTES)
        log.error("Dead letter for a row of %s: %s", version.table.qualified, rejection.reason)
        context: dict[str, int | str] = {"lsn": insert_lsn, "label": label}
        of = DeadLetter(self._session.name, version, "r", "", message, rejection.reason, self._by, whole, context)
        return single(self._session.dead_letters, 0, f"snapshot/{uuid.uuid4().hex}".encode(), of.encode(limit))

    def unread(
        self, version: Version, key: Mapping[str, str], reason: str, insert_lsn: int, label: str = ""
    ) -> Records:
        """The dead letter of a row of which only the key could be read.

        :param key: the texts of the key's columns.
        :param insert_lsn: L of the snapshot that shows the row.
        :param label: see :class:`~airflow_bottledwater.kafka.publisher.Records`.
        """
        fields = [
            pgoutput.Field("t", key[column.name].encode()) if column.name in key else pgoutput.Field("n")
            for column in version.table.columns
        ]
        message = pgoutput.RowMessage("I", version.table.oid, "", None, fields).encode()
        log.error("Dead letter for a row of %s: %s", version.table.qualified, reason)
        context: dict[str, int | str] = {"lsn": insert_lsn, "label": label}
        of = DeadLetter(self._session.name, version, "r", "", message, reason, self._by, False, context)
        value = of.encode(self._session.dead_letter_limit)
        return single(self._session.dead_letters, 0, f"snapshot/{uuid.uuid4().hex}".encode(), value)

    def find_refused(self, version: Version, block: MessageBlock, programs: Programs) -> tuple[int, int]:
        """Find the rows of a block that the broker refuses, which are rejected from then on; returns how many they are,
        and the bytes of the block's records.

        :raises NewProducerNeeded: the attempt failed, so that it is not known whether there are any.
        :raises Refused: the topic accepts no record at all, so that no row has a fault.
        """
        known, size = len(self._refused), 0
        for encoded, rejections in self.encode(version, block, programs):
            records = without(encoded.records, rejections)
            size += int(records.sizes().sum())
            for number, why in find_refused(self._session, records).items():
                self._refused[_digest(block, int(records.table[number]["row"]))] = why
        return len(self._refused) - known, size


def _row(block: MessageBlock, row: int) -> memoryview:
    return memoryview(block.data)[block.offsets[row] : block.offsets[row + 1]]  # type: ignore[arg-type]


def _digest(block: MessageBlock, row: int) -> bytes:
    """A digest that identifies a row however often its range is read and split. Equal rows share it: the broker refuses
    them all."""
    return hashlib.blake2b(_row(block, row), digest_size=16).digest()


def _record_error(version: Version, block: MessageBlock, rejection: Rejection) -> RecordError:
    named = _named(version.table, _row(block, rejection.row))
    told = " The job's log names it." if named else ""
    return RecordError(
        f"A row of {version.table.qualified} cannot be published to topic {version.topic!r}: "
        f"{rejection.reason.rstrip('.')}.{told}",
        "Nothing of its range is published. Mend the cause and start again, or go on with on_error = log, which "
        "writes it to the dead-letter topic.",
        topic=version.topic,
        row=named,
    )


def _named(table: SourceTable, raw: memoryview) -> str:
    """Names a row by its key; empty if the table has no key."""
    if not table.keyed:
        return ""
    texts = column_texts(table, _as_insert(table, raw, largest=_KEY_BYTES))
    values = []
    for column in table.columns:
        if column.name in table.key:
            values.append(f"{column.name} = {texts.get(column.name) or ''}")
    return f"the row with {', '.join(values)}"


def _as_insert(table: SourceTable, raw: memoryview, *, largest: int) -> bytes:
    """A COPY row in the form of an Insert message, so that there is only one decoder of rows.

    :param largest: bytes at which a value is cut.
    """
    fields, at = [], 2
    for _ in table.columns:
        (length,) = struct.unpack_from(">i", raw, at)
        at += 4
        fields.append(
            pgoutput.Field("n") if length < 0 else pgoutput.Field("b", bytes(raw[at : at + min(length, largest)]))
        )
        at += max(length, 0)
    return pgoutput.RowMessage("I", table.oid, "", None, fields).encode()
