"""The parts of values that are made of several ones, as PostgreSQL's own text shows them."""

from __future__ import annotations

import functools
import re
from typing import Any

from airflow_bottledwater.model.relation import ColumnType


class Unrepresentable(ValueError):
    """A value that the column's output type cannot hold."""


#: the oid of box (src/include/catalog/pg_type.dat), and PostGIS's types whose delimiter differs (postgis.sql.in,
#: geography.sql.in)
_BOX, _POSTGIS = 603, {("postgis", "geometry"), ("postgis", "geography")}


def delimiter(element: ColumnType) -> str:
    """What stands between the elements of an array in PostgreSQL's text: ``pg_type.typdelim``, as types are made with
    it."""
    if element.base_oid == _BOX:
        return ";"
    return ":" if (element.extension, element.label) in _POSTGIS else ","


def elements(column: ColumnType, text: str) -> Any:
    """The texts of an array's elements (None: NULL), nested as it is (array_out, src/backend/utils/adt/arrayfuncs.c).

    :raises Unrepresentable: its dimensions are not those that the column declares.
    """
    if text.startswith("["):
        raise Unrepresentable("lower bounds")
    assert column.element is not None
    between = delimiter(column.element)
    bare = re.compile(rf"[^{between}{{}}]+")
    stack: list[list[Any]] = []
    depth = at = 0
    while at < len(text):
        c = text[at]
        if c == "{":
            stack.append([])
            depth = max(depth, len(stack))
            at += 1
        elif c == "}":
            closed = stack.pop()
            if not stack:
                if closed and depth != column.dimensions:
                    raise Unrepresentable("dimensions")
                return closed
            stack[-1].append(closed)
            at += 1
        elif c == between:
            at += 1
        elif c == '"':
            match = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL).match(text, at)
            assert match is not None
            stack[-1].append(re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL))
            at = match.end()
        else:
            match = bare.match(text, at)
            assert match is not None
            stack[-1].append(None if match[0] == "NULL" else match[0])
            at = match.end()
    raise AssertionError(text)


def quoted_parts(text: str) -> list[str | None]:
    """What stands between commas: quoted (with doubled quotes and backslashes), bare, or nothing (None)."""
    parts: list[str | None] = []
    at = 0
    while True:
        found, bare = "", at
        while at < len(text) and text[at] != ",":
            if text[at] == '"':
                match = re.compile(r'"((?:[^"\\]|\\.|"")*)"', re.DOTALL).match(text, at)
                assert match is not None
                found += re.sub(r'\\(.)|"(")', r"\1\2", match[1], flags=re.DOTALL)
                at = match.end()
            elif text[at] == "\\":
                found += text[at + 1]
                at += 2
            else:
                found += text[at]
                at += 1
        parts.append(None if at == bare else found)
        if at >= len(text):
            return parts
        at += 1


def ranges(text: str) -> list[str]:
    """Of a multirange (multirange_out, src/backend/utils/adt/multirangetypes.c)."""
    return [match[0] for match in re.finditer(r'[\[(](?:"(?:[^"\\]|\\.|"")*"|[^\])"])*[\])]', text[1:-1], re.DOTALL)]


def pairs(text: str) -> dict[str, str | None]:
    """Of an hstore (hstore_out, contrib/hstore/hstore_io.c)."""
    word = r'"((?:[^"\\]|\\.)*)"'
    found = re.finditer(rf"{word}=>(?:{word}|NULL)", text, re.DOTALL)
    plain = functools.partial(re.sub, r"\\(.)", r"\1", flags=re.DOTALL)
    return {plain(string=match[1]): None if match[2] is None else plain(string=match[2]) for match in found}
