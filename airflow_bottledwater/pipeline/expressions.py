"""The regular expressions in a connector's lists, as patterns with ``*``."""

from __future__ import annotations

import functools
import re

#: a part of a regular expression that stands for any text, and one that stands for itself
_ANY = re.compile(r"\.\*|\.\+|\[\^\.\][*+]")
_LITERAL = re.compile(r"\\([^A-Za-z0-9])|([A-Za-z0-9_\-$ .])")
_GROUP = re.compile(r"\(([^()]*)\)")


def named(pattern: str) -> tuple[str, str]:
    """The patterns of schema and table in one of a whole name."""
    schema, _, table = pattern.rpartition(".")
    return schema, table


@functools.cache
def meet(one: str, other: str) -> bool:
    """Whether there is a text that two patterns with ``*`` match."""
    if not (one and other):
        return not (one or other).strip("*")
    if one[0] == "*":
        return meet(one[1:], other) or meet(one, other[1:])
    if other[0] == "*":
        return meet(other, one)
    return one[0] == other[0] and meet(one[1:], other[1:])


def split(text: str) -> list[str]:
    """A list with commas, of which one behind a backslash is part of a text (io.debezium.util.Strings.setOrListOf)."""
    return [part.replace("\\,", ",").strip() for part in re.split(r"(?<!\\),", text) if part.strip()]


def tables_of(pattern: str) -> list[str]:
    """A pattern of a whole name as patterns of tables: without a dot, it begins with a schema's name if it ends with
    any text, as in ``inventory.*``, which its author may have meant for a schema and a dot."""
    if "." in pattern:
        return [pattern]
    return ["*.*"] if pattern == "*" else [f"{pattern}.*"] if pattern.endswith("*") else []


def as_patterns(expression: str) -> list[str] | None:
    """A regular expression, which has to match a whole name, as patterns with ``*``; None if they could not say the
    same. A dot that stands alone is taken for a dot."""
    found = [_pattern(each) for each in _alternatives(expression.removeprefix("^").removesuffix("$"))]
    return None if None in found else list(dict.fromkeys(each for each in found if each is not None))


def _alternatives(expression: str) -> list[str]:
    group = _GROUP.search(expression)
    if group is None:
        return expression.split("|")
    head, tail = expression[: group.start()], expression[group.end() :]
    inner = group[1].removeprefix("?:")
    return [found for each in inner.split("|") for found in _alternatives(f"{head}{each}{tail}")]


def _pattern(expression: str) -> str | None:
    made, at = [], 0
    while at < len(expression):
        if any_text := _ANY.match(expression, at):
            made.append("*")
            at = any_text.end()
        elif literal := _LITERAL.match(expression, at):
            if expression[literal.end() : literal.end() + 1] in ("*", "+", "?", "{"):
                return None
            made.append(literal[1] or literal[2])
            at = literal.end()
        else:
            return None
    return "".join(made)
