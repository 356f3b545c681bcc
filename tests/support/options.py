"""Options of single tables, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def keyed(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The statements without which tables cannot have the keys that are drawn."""
    return [
        statement
        for table, rule in options.items()
        if "key" in rule
        for statement in (
            f"CREATE UNIQUE INDEX ON {table} (id, version)",
            f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        )
    ]


def without_primary_keys(seed: int, tables: Iterable[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The options by which some tables have the key that they had as their primary key, and the statements that make
    it a unique index only."""
    dice = random.Random(f"keys {seed}")
    some = [table for table in tables if dice.random() < 0.4]
    return {table: {"key": ["id"]} for table in some}, [
        statement
        for table in some
        for statement in (
            f"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey",
            f"ALTER TABLE {table} ALTER id SET NOT NULL, ADD UNIQUE (id), REPLICA IDENTITY FULL",
        )
    ]


def drawn(dice: random.Random, tables: Iterable[str], columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options for some of the tables: as rules for one table, and one for all.

    :param columns: those that may be left out: of texts ``name`` and ``large``, the others of integers.
    """
    texts = ("null", "constant:hidden", "first:3", "last:3", "hash")
    masks = {column: texts if column in ("name", "large") else ("null", "hash") for column in columns}
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        some = dice.sample(columns, dice.randint(0, len(columns)))
        rule: dict[str, Any] = {}
        if some and dice.random() < 0.7:
            rule["exclude"] = some
        elif some:
            kept = [column for column in columns if column not in some]
            rule |= {"include": ["id", "version", *kept], "new_columns": dice.choice(("auto", "leave_out", "publish"))}
        if dice.random() < 0.5:
            rule["mask"] = {column: dice.choice(masks[column]) for column in dice.sample(columns, 1)}
        if dice.random() < 0.5:
            # only columns of the key: the writers' updates must not fail
            rule["where"] = dice.choice(
                ("id % 3 <> 1", "id < 1000 OR (id % 2 = 0)", "id = ANY ('{2,3,5,8}'::bigint[]) OR id > 40")
            )
        if dice.random() < 0.4:
            rule["rename"] = dice.choice(({"id": "Näme 1"}, {"name": "n", "n": "name"}, {"large": "big", "n": "1"}))
        if dice.random() < 0.5:
            rule["topic"] = dice.choice(("{table}-{schema}", f"topic.of.{table}"))
        if dice.random() < 0.3:
            rule["partitions"] = dice.choice((1, 4))
        if dice.random() < 0.4:
            rule["key"] = dice.choice((["version", "id"], ["id", "version"]))
            if dice.random() < 0.5:
                rule["mask"] = {**rule.get("mask", {}), dice.choice(("id", "version")): "hash"}
        if rule:
            found[table] = rule
    if dice.random() < 0.3:
        found["*"] = {"exclude": dice.sample(columns, 1), "on_error": "log"}
    return found
