"""Patterns with ``*`` and ``?``. Those of tables are ``[schema.]table``; without a schema, ``public`` is meant."""

from __future__ import annotations

import fnmatch


def fits(pattern: str, text: str) -> bool:
    """Whether a pattern matches a whole text. A bracket is itself: a name that PostgreSQL allows is no class of
    characters."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def is_named(pattern: str, schema: str, name: str) -> bool:
    """Whether a pattern is the name of a table, which may itself have a dot, or a wildcard."""
    return pattern == f"{schema}.{name}" or (schema == "public" and pattern == name)


def is_meant(pattern: str, schema: str, name: str) -> bool:
    """Whether a pattern matches a table."""
    of, _, table = pattern.rpartition(".")
    return fits(of or "public", schema) and fits(table, name)


def describes(pattern: str, schema: str, name: str) -> bool:
    """Whether a pattern is the name of a table, or matches it."""
    return is_named(pattern, schema, name) or is_meant(pattern, schema, name)


def describes_one(pattern: str, qualified: str) -> bool:
    """Whether a pattern is the name of a table, or matches it.

    :param qualified: ``schema.table``, both of which may have dots.
    """
    parts = qualified.split(".")
    return any(describes(pattern, ".".join(parts[:n]), ".".join(parts[n:])) for n in range(1, len(parts)))


def specificity(pattern: str, schema: str, name: str) -> int:
    """How closely a pattern describes a table: above all patterns is its name, then those with more letters that are
    no wildcards; -1 if it does not match it."""
    if is_named(pattern, schema, name):
        return 1 << 16
    return sum(letter not in "*?" for letter in pattern) if is_meant(pattern, schema, name) else -1
