"""Options of single tables, drawn at random for the writers' tables, and what a consumer reads of a row under them."""

from __future__ import annotations

import hashlib
import hmac
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_bottledwater.encoding.names import mangle
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.verify.expected import json_native, native
from tests.support.topics import Flow
from tests.support.wire import plain

HASH_KEY = "0123456789abcdef"
#: row filters, and whether they let a key pass: only of columns of the key, since the writers' updates must not fail
FILTERS: dict[str, Callable[[int], bool]] = {
    "id % 3 <> 1": lambda key: key % 3 != 1,
    "id < 1000 OR (id % 2 = 0)": lambda key: key < 1000 or key % 2 == 0,
    "id = ANY ('{2,3,5,8}'::bigint[]) OR id > 40": lambda key: key in (2, 3, 5, 8) or key > 40,
}
#: columns of the writers' tables that may be left out, and the masks that each can have
COLUMNS = {
    "name": ("null", "constant:hidden", "first:3", "last:3", "hash"),
    # what is before its colon tells which value it is
    "large": ("null", "constant:hidden", "first:12", "last:3", "hash"),
    "n": ("null", "hash"),
    "at": ("null",),
}
_TIMESTAMPTZ = plain(1184)


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


def draw_options(seed: int, flow: Flow, tables: Iterable[str]) -> None:
    """Give tables of a pipeline that is not made yet options, by the seed, beside those that they have. Their keys stay
    what they are; one may be hashed where the replica identity has the whole old row."""
    dice = random.Random(f"options {seed}")
    found = drawn(dice, tables, [*COLUMNS], keys=False)
    whole = {name for (name,) in flow.execute("SELECT relname FROM pg_class WHERE relreplident = 'f'")}
    for table in tables:
        if dice.random() < 0.3:
            column = dice.choice(("id", "version") if table in whole else ("version",))
            rule = found.setdefault(table, {})
            rule["mask"] = {**rule.get("mask", {}), column: "hash"}
        if dice.random() < 0.5:
            found.setdefault(table, {})["partition_by"] = ["id"]
    given = {pattern: rule.as_dict() for pattern, rule in flow.pipeline.table_options.items()}
    flow.change(
        table_options={p: {**found.get(p, {}), **given.get(p, {})} for p in {**given, **found}}, hash_key=HASH_KEY
    )


def drawn(
    dice: random.Random, tables: Iterable[str], columns: Sequence[str], *, keys: bool = True
) -> dict[str, dict[str, Any]]:
    """Options for some of the tables: as rules for one table, and one for all.

    :param columns: those of :data:`COLUMNS` that may be left out.
    :param keys: whether tables may have other keys.
    """
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
            rule["mask"] = {column: dice.choice(COLUMNS[column]) for column in dice.sample(columns, 1)}
        if dice.random() < 0.5:
            rule["where"] = dice.choice([*FILTERS])
        if dice.random() < 0.4:
            rule["rename"] = dice.choice(({"id": "Näme 1"}, {"name": "n", "n": "name"}, {"large": "big", "n": "1"}))
        if "at" in columns and dice.random() < 0.5:
            rule["temporal"] = {dice.choice(("at", "a*")): dice.choice(("logical", "plain", "text"))}
        if dice.random() < 0.5:
            rule["topic"] = dice.choice(("{table}-{schema}", f"topic.of.{table}"))
        if dice.random() < 0.3:
            rule["partitions"] = dice.choice((1, 4))
        if keys and dice.random() < 0.4:
            rule["key"] = dice.choice((["version", "id"], ["id", "version"]))
            if dice.random() < 0.5:
                rule["mask"] = {**rule.get("mask", {}), dice.choice(("id", "version")): "hash"}
        if dice.random() < 0.5:
            rule["partition_by"] = [dice.choice(rule.get("key", ["id"]))]
        if rule:
            found[table] = rule
    if dice.random() < 0.3:
        found["*"] = {"exclude": dice.sample(columns, 1), "on_error": "log"}
    return found


def options_of(flow: Flow, table: str) -> Table:
    """The options of a table of the public schema."""
    return Table.of_table(flow.pipeline.table_options, "public", table)


def filters(flow: Flow, tables: Iterable[str]) -> dict[str, Callable[[int], bool]]:
    """Whether a key fulfils the row filter, for tables that have one of :data:`FILTERS`."""
    return {table: FILTERS[where] for table in tables if (where := options_of(flow, table).where)}


def has_hashed_key(flow: Flow, tables: Iterable[str]) -> bool:
    """Whether the keys of some of the tables are hashes."""
    return any("id" in options_of(flow, table).mask for table in tables)


def hashed(text: str) -> str:
    """What the mask ``hash`` makes of a value."""
    return hmac.new(HASH_KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(slots=True)
class Readable:
    """What consumers read of one of the writers' tables, and what they make of it: the same by the columns' own names,
    as far as it can be told.

    :param texts: of which values there may be hashes of keys, versions and large values, by the hashes.
    :param enveloped: whether rows are in Debezium's envelope.
    """

    format: str
    rule: Table
    columns: Sequence[str]
    texts: Mapping[str, str] = field(default_factory=dict)
    enveloped: bool = False

    @classmethod
    def of(cls, flow: Flow, table: str, texts: Mapping[str, str]) -> Readable:
        """That of a table in a pipeline."""
        rule = options_of(flow, table)
        columns = [c for c in ("id", "version", *COLUMNS) if _publishes(rule, c)]
        return cls(flow.pipeline.format, rule, columns, texts, flow.pipeline.envelope == "debezium")

    def name(self, column: str) -> str:
        """The name of a column's field."""
        name = self.rule.rename.get(column, column)
        return mangle(name) if self.format in ("avro", "protobuf") else name

    def publishes(self, column: str) -> bool:
        """Whether a column that is added later would be published."""
        return _publishes(self.rule, column)

    def row(self, texts: Mapping[str, str | None]) -> dict[str, Any]:
        """What a consumer must read.

        :param texts: PostgreSQL's own texts of the columns' values.
        """
        return {self.name(column): self._value(column, texts[column]) for column in self.columns}

    def _value(self, column: str, text: str | None) -> Any:
        mask, _, rest = self.rule.mask.get(column, "").partition(":")
        if text is None or mask == "null":
            return None
        if mask:
            masked = {"constant": lambda: rest, "first": lambda: text[: int(rest)], "last": lambda: text[-int(rest) :]}
            return masked.get(mask, lambda: hashed(text))()
        if column == "at":
            forms = [form for name, form in self.rule.temporal.items() if name in ("at", "a*")]
            as_text = self.format != "avro" or "text" in forms or (self.enveloped and "plain" not in forms)
            return json_native(_TIMESTAMPTZ, text) if as_text else native(_TIMESTAMPTZ, text)
        return int(text) if column in ("id", "version", "n") else text

    def source(self, found: Mapping[str, Any] | None, *, whole: bool = False) -> dict[str, Any] | None:
        """A row that was read, by the columns' own names, without its hashes: ``large`` is 1 and a colon if nothing but
        that there is a value can be told.

        :param whole: it must have all columns that are published, but for what was added to the table.
        """
        if found is None:
            return None
        columns = {self.name(column): column for column in self.columns}
        row = {columns.get(name, name): value for name, value in found.items()}
        assert not whole or row.keys() - {"extra"} == {*self.columns}, f"{found} is to have {self.columns}"
        for column, value in row.items():
            self._check_mask(column, value)
        for column in ("id", "version"):
            if row.get(column) is not None and column in self.rule.mask:
                row[column] = int(self.texts[row[column]])
        if whole or "large" in row:
            row["large"] = self._large(row.get("large"))
        return row

    def _check_mask(self, column: str, value: Any) -> None:
        mask, _, rest = self.rule.mask.get(column, "").partition(":")
        told = f"{column} is {value!r}, in spite of its mask"
        assert mask != "null" or value is None, told
        if value is None or not mask:
            return
        assert mask != "constant" or value == rest, told
        assert mask not in ("first", "last") or len(value) <= int(rest), told
        assert mask != "hash" or (len(value) == 64 and int(value, 16) >= 0), told

    def _large(self, value: str | None) -> str | None:
        mask = self.rule.mask.get("large", "")
        if value is None or not mask or mask.startswith("first"):
            return value
        return self.texts[value] if mask == "hash" else "1:"

    def large(self, number: int) -> int:
        """What is told of which large value a row has, see :meth:`source`."""
        mask = self.rule.mask.get("large", "")
        if "large" not in self.columns or mask == "null":
            return 0
        return min(number, 1) if mask.startswith(("constant", "last")) else number


def _publishes(rule: Table, column: str) -> bool:
    """Whether a column is published; the options name columns without wildcards."""
    if column in rule.exclude:
        return False
    return column in rule.include or not (
        rule.new_columns == "leave_out" or (rule.include and rule.new_columns == "auto")
    )
