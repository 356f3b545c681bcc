"""JSON texts, as both sides of a comparison read them. PostgreSQL's json takes whatever has the grammar of JSON:
numbers of any size, and documents that are nested far deeper than Python's parser can follow."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

#: levels of a document that are compared one by one: less than Python's recursion allows, wherever it begins
_LEVELS = 100
_STRING = r'"(?:[^"\\]|\\.)*"'
_STRINGS, _BRACKETS = re.compile(_STRING), re.compile(r"[][{}]")
_TOKENS = re.compile(rf"{_STRING}|[][{{}},:]")


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A JSON value that Python cannot hold, or not follow: only the same text equals it."""

    text: str

    def __str__(self) -> str:
        return self.text


def parsed(text: str | bytes) -> Any:
    """A JSON text with its numbers as they are written, however many digits they have: Python makes no int of more than
    4,300.

    :raises ValueError: it is not JSON.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if _too_deep(text):
        return Unparsed(text.strip(" \t\n\r"))
    return json.loads(
        text, parse_float=_number, parse_int=lambda digits: int(digits) if len(digits) < 4000 else Decimal(digits)
    )


def members(found: Any) -> Any:
    """A value as :func:`parsed` gives it; of an object that is nested too deeply, its members, each parsed by itself.

    :raises ValueError: one of them is not JSON.
    """
    if not isinstance(found, Unparsed) or not found.text.startswith("{"):
        return found
    pieces: dict[str, Any] = {}
    name, start, depth = "", 0, 0
    for token in _TOKENS.finditer(found.text):
        kind = token[0]
        depth += (kind in "[{") - (kind in "]}")
        if depth == 1 and kind == ":":
            start = token.end()
        elif depth == 1 and kind.startswith('"') and not start:
            name = json.loads(kind)
        elif start and (depth == 0 or (depth == 1 and kind == ",")):
            pieces[name] = parsed(found.text[start : token.start()])
            start = 0
    if depth:
        raise ValueError("it does not end")
    return pieces


def _too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= _LEVELS:
        return False
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > _LEVELS:
            return True
    return False


def _number(digits: str) -> Decimal | Unparsed:
    try:
        return Decimal(digits)
    except ArithmeticError:  # of its exponent
        return Unparsed(digits)
