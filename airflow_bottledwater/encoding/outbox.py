"""How the rows of an outbox become records: which columns are their topics, keys, values and headers, and how these
become bytes. The compiled part is :mod:`airflow_bottledwater.encoding.kernels.outbox`."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.model.relation import HASHED, Column, SourceTable
from airflow_bottledwater.pipeline.table import Table

#: how a value becomes the bytes of a key, a value or a header: as it is (texts, bytea and json are sent as their
#: bytes), an integer's digits, a uuid's characters (all three as :data:`hashes.FORMS` numbers them), or a jsonb's text,
#: which is behind a byte with the version of the format (jsonb_send, src/backend/utils/adt/jsonb.c)
AS_IT_IS, AS_INTEGER, AS_UUID, AS_JSONB = range(4)
#: by type, besides those of :data:`hashes.FORMS`: bytea, json, jsonb (src/include/catalog/pg_type.dat)
_FORMS = {**hashes.FORMS, 17: AS_IT_IS, 114: AS_IT_IS, 3802: AS_JSONB}
#: a value that may stand in a topic's name
NAME = re.compile(rb"[A-Za-z0-9._-]+")
_COLUMN = re.compile(r"\{([^{}]+)\}")


class NoOutbox(ValueError):
    """Why a table's rows cannot be records; the text is the end of a sentence."""


@dataclass(frozen=True, slots=True)
class RecordPart:
    """A column that becomes a part of a record.

    :param column: its number; -1 for none.
    :param form: see :data:`AS_IT_IS`.
    :param header: the name of the header.
    """

    column: int
    form: int = AS_IT_IS
    header: bytes = b""


def column_of(route: str) -> str:
    """The column whose values choose the topic; empty if there is one topic for all rows."""
    found = _COLUMN.search(route)
    return found[1] if found else ""


def topic_of(route: str, text: bytes) -> str:
    """The topic of rows with this text in the column that chooses it.

    :raises ValueError: it is no part of a topic's name; the message is the end of a sentence.
    """
    if not column_of(route):
        return route
    if not text:
        raise ValueError("is empty")
    if not NAME.fullmatch(text):
        wrong = NAME.sub(b"", text).decode(errors="replace")[0]
        raise ValueError(f"has a value with {wrong!r}, which no topic's name may have")
    return _COLUMN.sub(lambda _: text.decode(), route)


def text_of(form: int, value: bytes) -> bytes:
    """A value as the kernels write it.

    :raises ValueError: it is malformed.
    """
    if not value or form == AS_IT_IS:
        return value
    if form == AS_JSONB:
        return value[1:]
    try:
        return hashes.text_of(20 if form == AS_INTEGER else 2950, value)
    except (KeyError, struct.error):
        raise ValueError("is malformed") from None


def pattern_of(route: str) -> str:
    """The topics of a route, as a regular expression."""
    return ".+".join(map(re.escape, _COLUMN.split(route)[::2]))


def plan(
    mapping: TableMapping, table: SourceTable, route: str, columns: Sequence[Column] | None = None
) -> list[RecordPart]:
    """The parts of a table's records: of the topic, the key and the value, then of the headers.

    :param route: its topics, see :meth:`TableMapping.route`.
    :param columns: those that are published, if they are not the table's.
    :raises NoOutbox: a column does not exist, or its values cannot become bytes.
    """
    columns = table.columns if columns is None else columns
    numbers = {column.name: c for c, column in enumerate(columns)}
    options = mapping.options(table.schema, table.name)
    headers: Mapping[str, str] = options.outbox_headers
    if headers == Table().outbox_headers:  # of the default's, those that are there
        headers = {name: header for name, header in headers.items() if name in numbers}
    chooses = column_of(route)
    parts = [RecordPart(-1) if not chooses else _part(columns, numbers, chooses)]
    parts += [_part(columns, numbers, name) for name in (options.outbox_key, options.outbox_payload)]
    return parts + [_part(columns, numbers, name, header) for name, header in headers.items()]


def _part(columns: Sequence[Column], numbers: Mapping[str, int], name: str, header: str = "") -> RecordPart:
    if (number := numbers.get(name)) is None:
        raise NoOutbox(f"it has no column {name!r} that is published")
    kind = columns[number].type
    if kind.form == HASHED or kind.kind == "e":
        return RecordPart(number, AS_IT_IS, header.encode())
    if (form := _FORMS.get(kind.base_oid)) is None:
        raise NoOutbox(
            f"column {name!r} is of type {kind.name}, and must be a text, an integer, a uuid, an enum, bytea, json or "
            "jsonb"
        )
    return RecordPart(number, form, header.encode())
