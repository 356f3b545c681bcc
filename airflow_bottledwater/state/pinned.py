"""The tables of a pipeline as its state topic has them, and what their topics and keys are held to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from airflow_bottledwater.encoding import types
from airflow_bottledwater.errors import TableRefused
from airflow_bottledwater.model.relation import ColumnType, SourceTable
from airflow_bottledwater.model.version import Version

#: text and varchar, whose lengths can be changed at any time: a key of one has the same bytes as the same text of the
#: other
_TEXTS = (25, 1043)


def _key_types(table: SourceTable) -> list[object]:
    columns = [column for name in table.key for column in table.columns if column.name == name]
    return [
        (
            column.renamed,
            column.mask,
            *(("text",) if kind.oid in _TEXTS else (kind.oid, kind.typmod)),
            kind.forms,
            types.plain(
                types.mapping(kind).avro(kind), without=("doc", "namespace") if _keeps_name(kind) else ("doc",)
            ),
        )
        for column in columns
        for kind in [column.type]
    ]


def _keeps_name(kind: ColumnType) -> bool:
    """Whether the name that the schema of a key's type has had is kept; rows are looked up by that of today if the type
    is a domain."""
    return kind.oid == kind.base_oid


def _with_names(table: SourceTable, before: SourceTable) -> SourceTable:
    """A table whose key's types have the names of their schemas as they were when it was recorded: an enum, or a
    composite, has it in the schema of the keys, which would get another id, and that is in each key."""
    kinds = {column.name: column.type for column in before.columns if column.name in before.key}
    called = {
        each.name: _called(each.type, kinds[each.name])
        for each in table.columns
        if each.name in kinds and each.type != kinds[each.name] and _keeps_name(each.type)
    }
    if not called:
        return table
    return replace(table, columns=tuple(replace(each, type=called.get(each.name, each.type)) for each in table.columns))


def _called(kind: ColumnType, before: ColumnType) -> ColumnType:
    """A type with the name that its schema had, also of those inside of it."""
    inside = zip(kind.attributes, before.attributes, strict=True)
    return replace(
        kind,
        schema=before.schema,
        element=_called(kind.element, before.element) if kind.element and before.element else kind.element,
        attributes=tuple(replace(each, type=_called(each.type, old.type)) for each, old in inside),
    )


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A table of the pipeline, with the properties of its topic that must not change behind the pipeline's back.

    :param oldest_xid: X0 of the table, taken after the table was in the publication.
    :param topic: of an outbox, that of its records with the ``{column}`` that chooses it, see
        :meth:`~airflow_bottledwater.encoding.mapping.TableMapping.route`.
    :param topic_id: Kafka's id of the topic; a different one means that the topic was deleted and created anew. Empty
        of an outbox.
    """

    table: SourceTable
    topic: str
    topic_id: str
    partitions: int
    key_schema: int
    value_schema: int
    oldest_xid: int

    def check_key(self, table: SourceTable, *, complete: bool = True) -> SourceTable:
        """Check that the table's key still means the same as the keys in its topic. Returns the table with its key as
        the topic has it: in the same order, in the partitions that the same columns choose, and none if it was recorded
        without one, since the topic's records have none.

        :param table: the table as it is now.
        :param complete: whether the first snapshot is complete, so that the stream can read the table again. Before
            that, another key whose columns have the same names and types is left to the stream.
        :raises TableRefused: the key has other columns, or other types, or is gone.
        """
        before = self.table.key
        gone = [name for name in before if name not in {c.name for c in table.columns}]
        if gone:
            what = f"({', '.join(before)}: column {gone[0]!r} was dropped or renamed)"
        elif before and set(table.key) != set(before):
            what = f"from ({', '.join(before)}) to ({', '.join(table.key) or 'none'})"
        else:
            as_before = replace(
                table, key=before, partition_by=self.table.partition_by, catalog_key=self.table.catalog_key
            )
            if _key_types(as_before) != _key_types(self.table):
                what = (
                    f"({', '.join(before)}: the type of a column, or the form, the name or the hash that the settings "
                    "choose for it)"
                )
            elif complete and self._replaced(table):
                what = f"({', '.join(before)}: another column has the name of one, or the key was made again)"
            else:
                return _with_names(as_before, self.table)
        remedy = "Undo the change, or drop the slot and start again with a snapshot under another topic prefix."
        if complete:
            remedy = (
                f"{'' if table.key else 'Give the table a primary key again. '}Undo the change; or accept the new "
                f"keys while no job runs (bottledwater accept-new-keys --tables {table.qualified}), then start the "
                "stream again, which reads all rows."
            )
        raise TableRefused(
            f"The key of {table.qualified} changed {what}: the keys in its topic no longer mean the same.", remedy
        )

    def _replaced(self, table: SourceTable) -> bool:
        """Whether the table has another key although its columns have the same names: one of these is another column's
        now; or the key was made again, and two rows may have had the same one meanwhile. PostgreSQL sends updates and
        deletes of a table without a key only under ``REPLICA IDENTITY FULL``. Or it was made again when the rows were
        written anew, as ALTER COLUMN … TYPE does, which may give the key other values."""
        before, now = self.table.catalog_key, table.catalog_key
        if before is None or now is None:
            return False
        made_again = set(before.unique).isdisjoint(now.unique)
        unseen = "f" in (self.table.identity, table.identity) or before.rewritten(now)
        return before.columns != now.columns or (made_again and unseen)

    def check_forms(self, table: SourceTable) -> None:
        """Check that the settings give the key the form that the keys in its topic have.

        :param table: the table as it is now.
        :raises TableRefused: they give it another one.
        """
        forms, before = (
            {
                c.name: (c.type.oid, c.type.typmod, c.type.forms, c.renamed, c.mask)
                for c in each.columns
                if c.name in self.table.key
            }
            for each in (table, self.table)
        )
        if {name: kind[:2] for name, kind in forms.items()} == {name: kind[:2] for name, kind in before.items()} and (
            forms != before
        ):
            self.check_key(replace(table, key=self.table.key), complete=False)

    @property
    def version(self) -> Version:
        """The relation version of the pinned definition, for batches."""
        return Version(self.table, self.topic, self.key_schema, self.value_schema)

    def versions(self, later: Mapping[int, SourceTable]) -> list[Version]:
        """The relation versions of the rows in its topic, the newest last.

        :param later: see :attr:`~airflow_bottledwater.state.pipeline_state.PipelineState.later`.
        """
        known = self.version
        return [known, *(replace(known, table=table, value_schema=number) for number, table in later.items())]


class Pin(NamedTuple):
    """The properties of a data topic that must not change, compared whenever a producer is made.

    :param id: Kafka's id of the topic; a different one means that the topic was deleted and created anew.
    :param partitions: with another number of partitions, the same key would go to another partition.
    :param keyed: whether its records have keys; a compacted topic takes only records with keys.
    """

    id: str
    partitions: int
    keyed: bool


def pins(tables: Iterable[PinnedTable]) -> dict[str, Pin]:
    """The pins of these tables' topics, by the topic's name; outboxes have none."""
    return {t.topic: Pin(t.topic_id, t.partitions, t.table.keyed) for t in tables if not t.table.outbox}
