"""What can be said of single tables: the values of the setting ``table_options``."""

# without "from __future__ import annotations": these hold rules, which are to be objects and not texts

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.model import forms
from airflow_bottledwater.pipeline.patterns import specificity
from airflow_bottledwater.pipeline.rules import about, limited
from airflow_bottledwater.pipeline.section import Section, templated

_MASK = r"^(null|hash|constant:[^\0]*|(first|last):[0-9]{1,9})$(?!\n)"
_NAMES = "columns with other names, of 1 to 255 characters"
_CONDITION = "one SQL expression, such as region = 'EU' AND id > 0, without comments, semicolons and dollar signs"
_MASKS = "columns with null, constant:TEXT, first:N, last:N or hash"
_EACH_ONCE = "some of the columns of the key, each once"
_A_COLUMN, _ROUTE = "the name of a column", "a name as topic has it, with one {column}, or nothing"
#: those that a record may have, which is what librdkafka's arguments have room for
_HEADERS, MOST_HEADERS = "columns with names of headers, of 1 to 255 characters, at most 32", 32


@dataclass(frozen=True, kw_only=True, repr=False)
class Table(Section):
    """The options of the tables that a pattern matches. What is not given is as the pipeline's settings say, or as a
    less specific pattern does.

    :raises SettingError: a value is not allowed.
    """

    topic: Annotated[
        str,
        about(
            "The topic's name, behind topic_prefix; {schema} and {table} stand for the table's.",
            allowed="letters, digits, dots, dashes and underscores, with {schema} and {table}",
            changes="never",
            pattern=r"^([A-Za-z0-9._-]|\{schema\}|\{table\})*$(?!\n)",
        ),
    ] = ""
    partitions: Annotated[
        int,
        about(
            "Number of partitions of the topic, if it is created; 0: the pipeline's.",
            allowed="0 to 10000",
            changes="never",
            ge=0,
            le=10_000,
        ),
    ] = 0
    where: Annotated[
        str,
        about(
            "Which rows are published: a condition over the table's own columns, as in PostgreSQL's row filters.",
            allowed=_CONDITION,
            pattern=r"^[^\0]*$(?!\n)",
        ),
    ] = ""
    key: Annotated[
        tuple[str, ...],
        about("The columns of the key, in their order, which a unique index has; empty: those of the primary key."),
    ] = ()
    partition_by: Annotated[
        tuple[str, ...],
        about(
            "The columns of the key that choose the partition of a record; empty: the whole key does.",
            allowed=_EACH_ONCE,
            changes="never",
        ),
    ] = ()
    topic_config: Annotated[
        dict[str, str], about("Properties of the topic, if it is created, beside and before the pipeline's.")
    ] = field(default_factory=dict)
    include: Annotated[tuple[str, ...], about("The columns that are published, with * and ?; empty: all.")] = ()
    exclude: Annotated[
        tuple[str, ...], about("The columns that are left out, with * and ?, also if include names them.")
    ] = ()
    mask: Annotated[
        dict[str, Annotated[str, limited(_MASKS, pattern=_MASK)]],
        about("What is published instead of columns' values, by the columns' names with * and ?.", allowed=_MASKS),
    ] = field(default_factory=dict)
    rename: Annotated[
        dict[str, Annotated[str, limited(_NAMES, min_length=1, max_length=255, pattern=r"^[^\0\n]*$(?!\n)")]],
        about("The names that columns are published under, by their own names.", allowed=_NAMES),
    ] = field(default_factory=dict)
    temporal: Annotated[
        dict[str, forms.Temporal],
        about(
            "The form of columns' dates and times, by the columns' names with * and ?.",
            allowed="columns with logical, plain or text",
        ),
    ] = field(default_factory=dict)
    new_columns: Annotated[
        Literal["auto", "publish", "leave_out", "error"],
        about("What happens to a column that neither include nor exclude names."),
    ] = "auto"
    on_error: Annotated[
        Literal["pipeline", "exit", "log", "isolate"],
        about("What happens at a record of the table that cannot be published: as the pipeline's on_error, or not."),
    ] = "pipeline"

    outbox: Annotated[
        str,
        about(
            "Makes the table an outbox: the topics that its rows choose by a {column}, behind topic_prefix.",
            allowed=_ROUTE,
            changes="never",
            pattern=r"^([A-Za-z0-9._-]|\{schema\}|\{table\})*(\{[^{}\0\n]+\}([A-Za-z0-9._-]|\{schema\}|\{table\})*)?$(?!\n)",
        ),
    ] = ""
    outbox_key: Annotated[
        str, about("Of an outbox: the column with the records' keys.", allowed=_A_COLUMN, pattern=r"^[^\0\n]+$(?!\n)")
    ] = "aggregateid"
    outbox_payload: Annotated[
        str, about("Of an outbox: the column with the records' values.", allowed=_A_COLUMN, pattern=r"^[^\0\n]+$(?!\n)")
    ] = "payload"
    outbox_headers: Annotated[
        dict[str, Annotated[str, limited(_HEADERS, min_length=1, max_length=255, pattern=r"^[^\0\n]*$(?!\n)")]],
        about("Of an outbox: columns that become headers, with the headers' names.", allowed=_HEADERS),
    ] = field(default_factory=lambda: {"id": "id", "type": "eventType"})

    def __post_init__(self) -> None:
        if isinstance(self.mask, Mapping):
            # in YAML, null is no text; without this it would say nothing
            said = {name: "null" if mask is None else mask for name, mask in self.mask.items()}
            object.__setattr__(self, "mask", said)
        super().__post_init__()
        object.__setattr__(self, "where", self.where.strip())
        if not templated(self.where) and not is_one_expression(self.where):
            raise SettingError("where", self.where, _CONDITION)
        if len({*self.partition_by}) < len(self.partition_by):
            raise SettingError("partition_by", self.partition_by, _EACH_ONCE)
        if len(self.outbox_headers) > MOST_HEADERS:
            raise SettingError("outbox_headers", self.outbox_headers, _HEADERS)

    @classmethod
    def of_table(cls, rules: Mapping[str, Self], schema: str, name: str) -> Self:
        """The options of a table: each is that of the most specific pattern which gives it, and of two alike that of
        the latter.

        :param rules: the options by pattern.
        """
        ranks = {pattern: specificity(pattern, schema, name) for pattern in rules}
        given: dict[str, object] = {}
        for pattern in sorted(ranks, key=ranks.__getitem__):  # which leaves equals in their order
            given |= rules[pattern].as_dict() if ranks[pattern] >= 0 else {}
        return cls.of(given)


#: a text or a quoted name. A backslash before a quote may end a text or not, depending on how it begins: there is none
_QUOTED = re.compile(r"""'(?:[^'\\]|''|\\(?!'))*'|"(?:[^"]|"")*\"""")


def is_one_expression(text: str) -> bool:
    """Whether a text between parentheses stays between them, whatever it says, so that nothing that is not part of the
    expression can follow it. What it means is for PostgreSQL to say."""
    rest, depth = _QUOTED.sub("''", text), 0
    if any(sign in rest.replace("''", "") for sign in ("'", '"', ";", "--", "/*", "*/", "$")):
        return False
    for sign in rest:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0
