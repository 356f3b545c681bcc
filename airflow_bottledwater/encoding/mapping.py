"""How a pipeline sees a table: which columns are published, in which forms its types are, to which topic its rows go,
and which schemas they have there. Whatever depends on a pipeline's settings for tables is asked here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from airflow_bottledwater.encoding import avro, hashes, json_schema, masks, names, protobuf
from airflow_bottledwater.encoding.envelope import Around, Envelope, around_rows, envelope_schema
from airflow_bottledwater.encoding.outbox_message import chooses
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.forms import DEFAULT_TYPE_OPTIONS, TypeOptions
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.model.renames import Names
from airflow_bottledwater.pipeline.formats import AVRO, Format
from airflow_bottledwater.pipeline.patterns import fits
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.pipeline.table import Table

_NO_OPTIONS = Table()


class _Rules:
    """Options by pattern, compared as the object that they are: they never change."""

    def __init__(self, rules: Mapping[str, Table]) -> None:
        self.rules = rules

    def __hash__(self) -> int:
        return id(self.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rules) and self.rules is other.rules


@lru_cache(maxsize=1 << 14)
def _options(rules: _Rules, schema: str, name: str) -> Table:
    """The options of a table. All rules are compared with its name, which is asked for at each look at each table."""
    return Table.of_table(rules.rules, schema, name)


class _SchemaMaker(Protocol):
    """A module that makes the schemas of a table."""

    def key_schema(self, table: SourceTable, record: names.Record, /) -> str: ...

    def value_schema(self, table: SourceTable, record: names.Record, /) -> str: ...


#: by what a registry calls them
_SCHEMAS: dict[str, _SchemaMaker] = {"AVRO": avro, "JSON": json_schema, "PROTOBUF": protobuf}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMapping:
    """How a pipeline sees its tables.

    :param format: of the records.
    :param forms: the forms in which types are published.
    :param prefix: that of all topics.
    :param rules: the options of single tables, by pattern.
    :param ends: the name, without the prefix, of the topic of transactions' ends; empty for none.
    :param messages: those of the topics of logical messages, by the messages' prefixes with ``*`` and ``?``; with
        ``{topic}`` where the messages name it.
    :param ddl: the name, without the prefix, of the topic of DDL statements; empty for none.
    :param on_error: what happens at a record that cannot be published, unless a table's options say otherwise.
    :param shared: whether others write to the topics, too.
    :param hash_key: the id of the key of masks that are hashes; empty for none.
    :param envelope: what is around each row; None for nothing.
    """

    format: Format = AVRO
    forms: TypeOptions = DEFAULT_TYPE_OPTIONS
    prefix: str = ""
    rules: Mapping[str, Table] = field(default_factory=dict)
    ends: str = ""
    messages: Mapping[str, str] = field(default_factory=dict)
    ddl: str = ""
    on_error: str = "exit"
    shared: bool = False
    hash_key: str = ""
    envelope: Envelope | None = None

    @classmethod
    def of(cls, pipeline: Settings) -> TableMapping:
        """That of a pipeline."""
        return cls(
            format=pipeline.record_format,
            forms=pipeline.forms,
            prefix=pipeline.topic_prefix,
            rules=pipeline.table_options,
            ends=pipeline.transaction_topic,
            messages=pipeline.messages,
            ddl=pipeline.ddl_topic,
            on_error=pipeline.on_error,
            shared=pipeline.share_topics,
            hash_key=hashes.remember(pipeline.hash_key).id if pipeline.hash_key else "",
            envelope=_envelope(pipeline),
        )

    @property
    def service_topics(self) -> tuple[str, str]:
        """The topics of the pipeline itself: of events, and of dead letters."""
        return names.service_topic("events", self.prefix), names.service_topic("dead_letters", self.prefix)

    @property
    def ends_topic(self) -> str:
        """The topic of transactions' ends; empty if there is none."""
        return self._prefixed(self.ends) if self.ends else ""

    @property
    def named_topics(self) -> tuple[str, ...]:
        """The topics that the settings name and that are no table's."""
        of_messages = sorted({self._prefixed(name) for name in self.messages.values() if not chooses(name)})
        return (*(self._prefixed(name) for name in (self.ends, self.ddl) if name), *of_messages)

    @property
    def message_routes(self) -> tuple[str, ...]:
        """The topics that logical messages choose, with ``{topic}`` for what they name."""
        return tuple(sorted({self._prefixed(name) for name in self.messages.values() if chooses(name)}))

    @property
    def ddl_topic(self) -> str:
        """The topic of DDL statements; empty if there is none."""
        return self._prefixed(self.ddl) if self.ddl else ""

    def message_topic(self, prefix: str) -> str:
        """The topic of the logical messages with a prefix, with ``{topic}`` if they choose it: that of just this
        prefix, or else of the last pattern that matches it; empty if they are not published."""
        name = rule_of(self.messages, prefix)
        return self._prefixed(name) if name else ""

    def _prefixed(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def options(self, schema: str, name: str) -> Table:
        """The options of a table, by its name of today."""
        return _options(_Rules(self.rules), schema, name) if self.rules else _NO_OPTIONS

    def options_of(self, table: SourceTable) -> Table:
        """The options of a table; none of what is no table, a logical message, whatever patterns match its name."""
        return self.options(table.schema, table.name) if table.oid else _NO_OPTIONS

    def left_out(self, schema: str, name: str, columns: Sequence[str]) -> tuple[int, ...]:
        """The places of those columns that are not published.

        :param schema: the table's; ``name`` likewise.
        :param columns: the names of all columns that PostgreSQL sends.
        """
        if (options := self.options(schema, name)) == _NO_OPTIONS:
            return ()
        return tuple(place for place, column in enumerate(columns) if _leaves_out(options, column))

    def published(self, schema: str, name: str, columns: Iterable[Column]) -> tuple[Column, ...]:
        """Columns with their masks, and their names and the forms of their dates and times as the options choose them.

        :param schema: the table's; ``name`` likewise.
        """
        options = self.options(schema, name)
        several = "temporal" in self.format.offers
        forms = options.temporal if several else {}
        as_debezium = several and self.envelope is not None

        def chosen(column: Column) -> Column:
            form = rule_of(forms, column.name) or self.forms.temporal
            kind = column.type.with_temporal(form, as_debezium=as_debezium)
            renamed = options.rename.get(column.name, "")
            if kind is column.type and renamed == column.renamed:
                return column  # most are: a copy of each takes a third of the time of a look at thousands of tables
            return replace(column, type=kind, renamed=renamed)

        return tuple(chosen(column) for column in self.masked(schema, name, columns))

    def masked(self, schema: str, name: str, columns: Iterable[Column]) -> tuple[Column, ...]:
        """Columns with their masks.

        :param schema: the table's; ``name`` likewise.
        :raises Refused: one is a hash, and there is no key.
        """
        rules = self.options(schema, name).mask
        if "hash" in rules.values() and not self.hash_key:
            raise Refused(
                f"Columns of {schema}.{name} are to be published as hashes, and there is no key for them.",
                "Set hash_key_conn_id (in Airflow), or hash_key_file to a file that this host can read.",
            )
        if not rules:
            return tuple(columns)
        return tuple(masks.fitting(rule_of(rules, column.name), column, self.hash_key) for column in columns)

    def hashes_key(self, schema: str, name: str, column: Column) -> bool:
        """Whether a column of the key may be published as it is masked: as a hash, which tells rows apart, and only by
        a rule that names it.

        :param schema: the table's; ``name`` likewise.
        :param column: with its mask.
        """
        return masks.Mask.of(column).kind == masks.HASH and self.options(schema, name).mask.get(column.name) == "hash"

    def unnamed(self, schema: str, name: str, columns: Iterable[str]) -> list[str]:
        """Those columns that ``new_columns = error`` does not allow: neither published nor left out by a rule.

        :param schema: the table's; ``name`` likewise.
        """
        options = self.options(schema, name)
        if options.new_columns != "error":
            return []
        return [column for column in columns if not matches((*options.include, *options.exclude), column)]

    def namesakes(self, schema: str, name: str, columns: Sequence[str]) -> tuple[str, str, str] | None:
        """Two columns that would be published under one name, and that name; None if there are none.

        :param schema: the table's; ``name`` likewise.
        :param columns: the names of all columns that PostgreSQL sends.
        """
        renamed, hidden = self.options(schema, name).rename, self.left_out(schema, name, columns)
        seen: dict[str, str] = {}
        for column in (column for place, column in enumerate(columns) if place not in hidden):
            field = renamed.get(column, column)
            if (other := seen.setdefault(field, column)) != column:
                return other, column, field
        return None

    def hides(self, table: SourceTable) -> bool:
        """Whether the options may leave out rows or columns of a table, mask columns, or take its rows for others."""
        options = self.options_of(table)
        return options.new_columns == "leave_out" or any(
            (options.where, options.outbox, options.include, options.exclude, options.mask)
        )

    def exposes(
        self, before: SourceTable, schema: str, name: str, columns: Sequence[str], others: Names | None = None
    ) -> bool:
        """Whether a table that has got another name, or other names of columns, would be published without its row
        filter, or with a column that is exposed. Or as an outbox that was none, or the other way round.

        :param before: the table with the name that it had; it has ``schema`` and ``name`` now.
        :param columns: the names of its columns; those that are not published now may be missing.
        :param others: the names that columns had, or may have had.
        """
        had, has = self.options(before.schema, before.name), self.options(schema, name)
        if (had.where and not has.where) or bool(had.outbox) != bool(has.outbox):
            return True
        return bool(self.exposed(before, schema, name, columns, others))

    def exposed(
        self, before: SourceTable, schema: str, name: str, columns: Sequence[str], others: Names | None = None
    ) -> list[str]:
        """The columns that the rules for other names hide more: that are left out by them and neither left out nor
        masked now, or masked and now neither left out nor masked as much.

        :param before: see :meth:`exposes`, for all parameters.
        """
        has, others = self.options(schema, name), others or {}
        rules = [self.options(before.schema, before.name), *([has] if others else [])]
        return [
            column
            for column in columns
            if not _leaves_out(has, column)
            and any(
                _hides_more(rule, other, rule_of(has.mask, column))
                for rule in rules
                for other in others.get(column, [column])
            )
        ]

    def shows_more(self, before: TableMapping, table: SourceTable) -> bool:
        """Whether the options may show more of a table than those of before.

        :param table: as it is published by the options of now.
        """
        if not before.hides(table):
            return False
        had, has = before.options_of(table), self.options_of(table)
        return (
            not self.hides(table)
            or bool(had.where and not has.where)
            or any(_hides_more(had, each.name, rule_of(has.mask, each.name)) for each in table.columns)
        )

    def policy(self, table: SourceTable) -> str:
        """What happens at a record of a table that cannot be published: ``exit``, ``log`` or ``isolate``. What is no
        table, a logical message, cannot be set aside; and a table with a topic that others write to could not go on
        behind that: its topic would have to be swept."""
        asked = self.options_of(table).on_error
        found = self.on_error if asked == "pipeline" else asked
        return "exit" if found == "isolate" and (self.shared or not table.oid) else found

    def stops(self, table: SourceTable) -> bool:
        """Whether a record of a table that cannot be published ends what reads the table's rows; otherwise it becomes a
        dead letter."""
        return self.policy(table) != "log"

    def writes_letters(self) -> bool:
        """Whether a record of some table may become a dead letter."""
        return "log" in (self.on_error, *(rule.on_error for rule in self.rules.values()))

    def all_columns(self) -> TableMapping:
        """The same without options of single tables but their keys: as the tables are, to compare the options with
        them."""
        keys = {pattern: Table(key=rule.key) for pattern, rule in self.rules.items() if "key" in rule.given}
        return replace(self, rules=keys)

    def topic(self, table: SourceTable) -> str:
        """The topic of a table by its name of today; of an outbox, see :meth:`route`. A table that was renamed keeps
        the one that it has, see :func:`airflow_bottledwater.state.identity.topic_of`."""
        if table.outbox:
            return self.route(table)
        if not (asked := self.options(table.schema, table.name).topic):
            return names.topic(table.schema, table.name, self.prefix)
        return self._prefixed(_named(asked, table))

    def route(self, table: SourceTable) -> str:
        """The topics of an outbox's records, with the ``{column}`` whose values choose them, if there is one."""
        return self._prefixed(_named(self.options(table.schema, table.name).outbox, table))

    def by_topic(self, tables: Iterable[SourceTable]) -> dict[str, SourceTable]:
        """These tables by their topics, see :meth:`topic`."""
        return {self.topic(table): table for table in tables}

    def record(self, topic: str) -> names.Record:
        """The name of the records in a topic, as their schemas have it."""
        return names.enveloped(topic) if self.envelope else names.record(topic, self.prefix)

    def subjects(self, topic: str, table: SourceTable) -> list[tuple[str, str]]:
        """The registry's subjects of a table's topic (TopicNameStrategy), each with its schema; none if the format
        needs no registry, or the table is an outbox, whose records are bytes. A table without a key has no key subject.

        :raises SchemaRefused: see :func:`airflow_bottledwater.encoding.avro.value_schema`.
        """
        if table.outbox or not self.format.uses_registry:
            return []
        schemas, record = _SCHEMAS[self.format.schema_type], self.record(topic)
        make = envelope_schema if self.envelope else schemas.value_schema
        keys = [(f"{topic}-key", schemas.key_schema(table, record))] if table.keyed else []
        return [*keys, (f"{topic}-value", make(table, record))]

    def meaning(self, topic: str, table: SourceTable) -> str:
        """The schema of a table's rows, as it says what their values mean: :meth:`subjects` with the logical types of
        dates and times that are published without them. It is compared with others, and never registered.

        :raises SchemaRefused: see :meth:`subjects`.
        """
        columns = tuple(replace(column, type=column.type.with_units) for column in table.columns)
        return self.subjects(topic, replace(table, columns=columns))[-1][1]

    def around(self, topic: str, table: SourceTable, database: str) -> Around | None:
        """What is around a table's rows and keys in their records; None for nothing.

        :param database: the name of the source's database.
        """
        if self.envelope is None:
            return None
        return around_rows(self.envelope, table, topic, database, as_json=self.format.as_json)


def _envelope(pipeline: Settings) -> Envelope | None:
    if pipeline.envelope == "none":
        return None
    with_schema = pipeline.envelope_schema and pipeline.record_format.as_json
    return Envelope(pipeline.topic_prefix or pipeline.slot, with_schema)


def _named(topic: str, table: SourceTable) -> str:
    """A topic of an option, with the table's names in their places."""
    of_schema, of_table = names.mangle(table.schema, dots=True), names.mangle(table.name)
    return topic.replace("{schema}", of_schema).replace("{table}", of_table)


def _leaves_out(options: Table, column: str) -> bool:
    others = options.new_columns
    if others == "auto":
        others = "leave_out" if options.include else "publish"
    return matches(options.exclude, column) or not (others == "publish" or matches(options.include, column))


def _hides_more(options: Table, column: str, mask: str) -> bool:
    """Whether options hide more of a column than a mask does; it may be empty."""
    said = rule_of(options.mask, column)
    return not mask if _leaves_out(options, column) else bool(said) and mask not in (said, "null")


def rule_of(rules: Mapping[str, str], column: str) -> str:
    """What rules by columns' names (or messages' prefixes) say of one: that of its name, or else of the last pattern
    that matches it; empty for nothing."""
    found = [said for pattern, said in rules.items() if matches([pattern], column)]
    return rules.get(column) or (found[-1] if found else "")


def matches(patterns: Sequence[str], column: str) -> bool:
    """Whether one of some patterns, with ``*`` and ``?``, matches a column."""
    return any(fits(pattern, column) for pattern in patterns)
