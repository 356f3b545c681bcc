"""Makes relation versions from Relation messages, with what the catalog and the registry add to them."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import psycopg

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import (
    BottledWaterError,
    SchemaRefused,
    SchemasLost,
    TableRefused,
)
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model import renames
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, partitions, pgoutput
from airflow_bottledwater.postgres.column_types import Declared, describe
from airflow_bottledwater.postgres.connect import Connection, connect, outage
from airflow_bottledwater.state.options import exposed_table, unsettled_columns
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.schemas import lost, pinned_schemas, register_value
from airflow_bottledwater.tables.watch import not_followed

log = logging.getLogger(__name__)

#: seconds for which what was read of the catalog is used, and its session kept
_ONE_READING = 5.0
#: seconds that a table takes at least, where all are read together
_EACH = 0.0001
#: seconds after which the registry is asked again for a schema that it has refused
_ASK_AGAIN = 10.0


class Resolver:
    """Makes relation versions from Relation messages: what a message does not contain is read from the catalog, and new
    schemas are registered.

    :param pinned: the pipeline's tables by oid.
    :param mismatch: is told of a partitioned table whose changes cannot be read, and why.
    :param later: returns the definitions since, as they are now: a live snapshot may publish rows with another one
        before the stream does. See :attr:`~airflow_bottledwater.state.pipeline_state.PipelineState.later`.
    :param via_root: whether partitioned tables are published as one.
    :ivar arrived: when the messages had arrived that come next, on the clock of :func:`time.monotonic`: what they do
        not show of a table is in the catalog since then.
    :ivar unrecorded: the oids of the tables that were refused for the name that a column had a moment ago, which is not
        recorded.
    """

    def __init__(
        self,
        pipeline: Settings,
        pinned: dict[int, PinnedTable],
        mismatch: Callable[[int, TableRefused], None] = lambda *_: None,
        *,
        later: Callable[[], Mapping[int, Mapping[int, SourceTable]]] = dict,
        via_root: bool = False,
    ) -> None:
        self._pipeline, self._via_root = pipeline, via_root
        self._pinned, self._mismatch = pinned, mismatch
        self._later = later
        #: by the table's oid and the registry's ids, the versions that were registered here: rows with them may not be
        #: published yet
        self._new: dict[int, dict[int, Version]] = {}
        self._registry, self._mapping = Registry.of(pipeline), TableMapping.of(pipeline)
        #: the columns of each table's last message, with their numbers; 0 where these are not known
        self._last: dict[int, tuple[tuple[int, str], ...]] = {}
        self.unrecorded: set[int] = set()
        #: when the registry last refused a schema, by the table's oid
        self._refused_at: dict[int, float] = {}
        self.arrived = math.inf
        #: each table as it was read last, if it was there, and when that was
        self._read: dict[int, tuple[SourceTable | None, float]] = {}
        #: seconds for which tables were read one by one, of messages that had all arrived by this time
        self._spent, self._waiting = 0.0, -math.inf
        #: seconds that it took last to read all together
        self._took = 0.0
        self._connection: Connection | None = None
        self._used = -math.inf
        # the tables that the settings name
        self._chosen = frozenset[int]()
        self._chosen_at = -math.inf

    def close(self) -> None:
        """Close the session that reads the catalog; the next message that needs one opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def rest(self) -> None:
        """Close it if it was not used for a moment."""
        if time.monotonic() - self._used > _ONE_READING:
            self.close()

    def __call__(self, message: pgoutput.RelationMessage, current: Version | None) -> Version | None:
        """The version that a message describes; ``current`` or a recorded one if the table is the same. None if
        the table is not in the pipeline: it may be a partition, whose message comes with the root's although its
        changes are sent as the root's.

        :param current: the table's version before; None if this is its first message.
        :raises TableRefused: the table's key changed, or a column's type does not exist any more.
        """
        self.unrecorded.discard(message.oid)  # what is refused now may be something else
        pinned = self._pinned.get(message.oid)
        if pinned is None:
            return None
        return self._version(message, pinned, current)

    def of_statement(self, message: pgoutput.RelationMessage, current: Version | None) -> Version | None:
        """The version that a message with the prefix of the DDL triggers describes; None if the table is not in the
        pipeline, or has never been so as far as is known. Whoever may connect can write such a message, and a schema
        that is registered on its word alone would keep those of the table from being registered.

        :param current: see :meth:`__call__`.
        :raises TableRefused: the table's key is another one.
        """
        pinned = self._pinned.get(message.oid)
        if pinned is None:
            return None
        known = current.table if current else pinned.table
        today = self._known_since(message.oid, self.arrived) or known
        if (message.schema, message.name) not in ((each.schema, each.name) for each in (known, today)):
            return None
        left_out = self._left_out(message)
        said = [(c.name, c.type_oid, c.typmod) for place, c in enumerate(message.columns) if place not in left_out]
        if not _between(said, _columns(known), _columns(today)):
            return None
        return self._version(message, pinned, current, believed=False)

    def _version(
        self, message: pgoutput.RelationMessage, pinned: PinnedTable, current: Version | None, *, believed: bool = True
    ) -> Version:
        """As :meth:`__call__`, of a table of the pipeline.

        :param believed: whether the names that it has are remembered.
        """
        # what a message does not show may be another one than before; a stream that starts gets one for each table
        doubtful = current is not None or message.identity == "f"
        since = self.arrived if doubtful else time.monotonic() - _ONE_READING - self._took
        if self._mapping.rules:
            self._check_hidden(message, pinned.table, since, first=current is None, believed=believed)
        left_out = self._left_out(message)
        message = replace(message, columns=tuple(c for place, c in enumerate(message.columns) if place not in left_out))
        versions = [current] if current else self._versions(pinned)[::-1]
        known = versions[0].table
        read = self._as_read(message, since)
        # what a table hides by today's name is not what it hid by another one; of a first message, that was compared
        renamed = read is not None and (read.schema, read.name) != (message.schema, message.name)
        if read is not None and not (renamed and current):
            table = self._made(message, pinned, read.columns, read)
        else:
            table = self._table(message, pinned, {c.name: c for c in known.columns})
        if table.key and not pinned.table.key:
            log.warning(
                "%s has a key now (%s). The records of its topic have none, and stay so. To publish the table with "
                "its key, do what the pipeline's status says of it.",
                table.qualified, ", ".join(table.key),
            )  # fmt: skip
        columns = self._mapping.published(message.schema, message.name, table.columns)
        table = pinned.check_key(replace(table, columns=columns, left_out=left_out))
        for found in versions:
            if table.columns == found.table.columns:
                # the schemas are those of its columns. What else a table is (its name, its schema, its replica
                # identity) is told in records and decides which are made, so that it is always that of the message
                same = table == found.table and table.filtered == found.table.filtered
                return found if same else replace(found, table=table)
        log.warning("The columns of %s changed; its records have a new schema.", table.qualified)
        return self._registered(Version(table, pinned.topic, pinned.key_schema))

    def _check_hidden(
        self, message: pgoutput.RelationMessage, before: SourceTable, since: float, *, first: bool, believed: bool
    ) -> None:
        """Check that a table and its columns are hidden by the names of a message as they are by those that they had
        when the table was recorded; and by those of today: the options may have been given to these only, while changes
        of before are still to come.

        :param since: see :meth:`_known_since`.
        :param first: whether it is the table's first message, so that the options may be others than for the last one.
        :param believed: whether the names are remembered, to be compared with those of the next message.
        :raises TableRefused: less of it is hidden.
        """
        names = [column.name for column in message.columns]
        altered = bool(before.sent) and names != [name for _, name in before.sent]
        named = replace(before, schema=message.schema, name=message.name)
        # also with the same names: another column may bear one of them now
        doubtful = first or altered or self._mapping.hides(before) or self._mapping.hides(named)
        today = self._known_since(message.oid, since) if doubtful else None
        known = [each.sent for each in (today, before) if each is not None]
        sent = next((each for each in known if [name for _, name in each] == names), None)

        def others(table: SourceTable, by_order: Callable[[list[str], list[str]], renames.Names]) -> renames.Names:
            if sent is not None:
                return renames.by_number(sent, table.sent)
            return by_order(names, [name for _, name in table.sent])

        had = others(before, renames.by_order)
        if exposed := exposed_table(self._mapping, before, message.schema, message.name, names, had):
            raise TableRefused(exposed)
        if today is not None and not before.outbox:
            has = others(today, renames.by_later_order)
            if shown := self._mapping.exposed(today, message.schema, message.name, names, has):
                raise TableRefused(
                    f"{message.schema}.{message.name} was changed when it, or its column {shown[0]!r}, had another "
                    "name than today, of which table_options hide less."
                )
        last, now = self._last.get(message.oid, ()), sent or tuple((0, name) for name in names)
        if exposed := exposed_table(
            self._mapping, named, message.schema, message.name, names, _since(before, last, now)
        ):
            if believed:
                self.unrecorded.add(message.oid)
            raise TableRefused(exposed)
        if believed:
            self._last[message.oid] = now

    def _left_out(self, message: pgoutput.RelationMessage) -> tuple[int, ...]:
        """The places of the columns that are not published.

        :raises TableRefused: the options do not allow a column.
        """
        columns = [column.name for column in message.columns]
        if why := unsettled_columns(self._mapping, message.schema, message.name, columns):
            raise TableRefused(why)
        return self._mapping.left_out(message.schema, message.name, columns)

    def again(self, version: Version) -> Version:
        """A version whose schema was refused, with the registry's answer of now: whoever can mend it does so while the
        stream goes on. It is asked every few seconds.

        :raises Outage: the registry does not answer, or takes no schemas now.
        """
        oid = version.table.oid
        if time.monotonic() - self._refused_at.get(oid, -math.inf) < _ASK_AGAIN:
            return version
        found = self._registered(version)
        if not found.refused:
            log.warning(
                "The registry takes the schema of %s now; its rows are published again.", version.table.qualified
            )
        return found

    def _registered(self, version: Version) -> Version:
        """The version with its value's schema registered, or with the reason why that is refused: then each of its rows
        is a record error, for which ``on_error`` decides.

        :raises Refused: the registry denies access, which says nothing of a schema.
        :raises SchemasLost: the registry does not have the schemas of before: what it would give now are the ids of
            another one.
        """
        if self._registry is None or version.table.outbox:
            return version
        pinned = self._pinned[version.table.oid]
        if lost(self._registry, pinned_schemas(self._pipeline, [pinned], self._later())):
            raise SchemasLost(f"The registry has lost the schemas of {version.table.qualified}.")
        try:
            number = register_value(self._pipeline, version.topic, version.table, self._versions(pinned))
            found = replace(version, value_schema=number, refused="")
            self._new.setdefault(version.table.oid, {})[number] = found
            return found
        except SchemaRefused as error:
            log.error("%s", error)
            self._refused_at[version.table.oid] = time.monotonic()
            return replace(version, refused=str(error))

    def _versions(self, pinned: PinnedTable) -> list[Version]:
        """The relation versions of a table with which rows are published, or are about to be."""
        oid = pinned.table.oid
        return [*pinned.versions(self._later().get(oid, {})), *self._new.get(oid, {}).values()]

    def check_partition(self, above: pgoutput.RelationMessage, message: pgoutput.RelationMessage) -> None:
        """Say so if a message is that of a partition whose old rows are not those of its table. The catalog of today
        need not show it: the partition may be gone, or its replica identity may have been set back.

        :param above: that of the table as which it is published.
        """
        root = self._pinned.get(above.oid)
        if root is None or not root.table.partitioned or not root.table.identifiable:
            return
        columns = [column.name for column in message.columns if column.key]
        if not partitions.agrees(above.identity, root.table.key, message.identity, columns):
            name = f"{message.schema}.{message.name}"
            why = f"Partition {name} had another replica identity than {root.table.qualified} when it was changed."
            self._mismatch(root.table.oid, TableRefused(why))

    def unknown(self, message: pgoutput.RelationMessage) -> BottledWaterError | None:
        """The error for a change of a table that is not the pipeline's; None if the table's changes are left out, which
        is logged.

        That loses nothing: whenever the table is taken in, its rows are read under a snapshot that shows all that was
        left out.

        :param message: of that table.
        """
        name, new_tables = f"{message.schema}.{message.name}", self._pipeline.new_tables
        if not self._covers(message):
            why = (
                "was dropped, or is not one of the tables that the settings name. If it is to be published, name it in "
                "tables (or its schema in schemas, unless it belongs to an extension), and start the stream again; "
                "otherwise take it out of the publication, if you can"
            )
        elif new_tables == "stop":
            return not_followed([name])
        elif new_tables == "ignore":
            why = (
                "was created since the slot was, and new_tables is ignore. Stop the stream and run create_slot and "
                "the snapshot again (or start the command again), which take it in with all its rows"
            )
        else:
            why = (
                "is not followed yet. It is taken in with all its rows as soon as that can be done; if it cannot, the "
                "pipeline's status says why"
            )
        log.warning("The publication sends changes of %s, which are left out: it %s.", name, why)
        return None

    def _covers(self, message: pgoutput.RelationMessage) -> bool:
        """Whether the settings name a table. They are read for all tables together, a moment ago, unless this one may
        have been made since: a stream that starts may get a message for each of thousands that are not followed."""
        tables, schemas = self._pipeline.tables, self._pipeline.schemas
        unknown = message.oid not in self._chosen and catalog.covers(tables, schemas, message.schema, message.name)
        # one that was dropped is in no reading: what was read behind the message's arrival tells
        newer = unknown and self._chosen_at < self.arrived
        if newer or time.monotonic() - self._chosen_at > _ONE_READING:
            began = time.monotonic()
            with self._catalog() as connection:
                # a pattern that matches nothing any more: preflight reports it
                found = catalog.resolve(connection, tables, schemas, via_root=self._via_root, strict=False)
            self._chosen, self._chosen_at = frozenset(found), began
        return message.oid in self._chosen

    def _table(self, message: pgoutput.RelationMessage, pinned: PinnedTable, known: dict[str, Column]) -> SourceTable:
        with self._catalog() as connection:
            tables = catalog.load(connection, [message.oid], self._mapping)
            today = {c.name: c for t in tables for c in t.columns}
            declared = []
            texts = connection.execute(
                "SELECT format_type(oid, typmod) FROM unnest(%s::oid[], %s::int[]) WITH ORDINALITY t(oid, typmod, n) "
                "ORDER BY n",
                ([c.type_oid for c in message.columns], [c.typmod for c in message.columns]),
            ).fetchall()
            for column, (text,) in zip(message.columns, texts, strict=True):
                # the message does not contain an array's number of dimensions
                same = [
                    c[column.name].type
                    for c in (today, known)
                    if column.name in c and c[column.name].type.oid == column.type_oid
                ]
                depth = same[0].dimensions if same else 0
                declared.append(Declared(column.type_oid, column.typmod, depth, text or ""))
            try:
                kinds = describe(connection, declared, forms=self._mapping.forms)
            except LookupError:
                kinds = [
                    self._described(connection, each, known.get(column.name), f"{message.schema}.{message.name}")
                    for column, each in zip(message.columns, declared, strict=True)
                ]
        columns = tuple(
            Column(
                c.name,
                kind,
                today[c.name].comment if c.name in today else None,
                c.name in today and today[c.name].required,
            )
            for c, kind in zip(message.columns, kinds, strict=True)
        )
        return self._made(message, pinned, columns, tables[0] if tables else None)

    def _described(self, connection: Connection, declared: Declared, known: Column | None, table: str) -> ColumnType:
        """A column's type, as it is today; one that was dropped since, as it was known.

        :raises TableRefused: it was dropped, and was not known.
        """
        try:
            return describe(connection, [declared], forms=self._mapping.forms)[0]
        except LookupError as error:
            if known is not None and (known.type.oid, known.type.typmod) == (declared.oid, declared.typmod):
                return known.type
            raise TableRefused(
                f"A column of {table} has a type that does not exist any more ({error}).",
                "Its changes cannot be read; drop the slot and start again with a snapshot.",
            ) from None

    def _as_read(self, message: pgoutput.RelationMessage, since: float) -> SourceTable | None:
        """The table of a message as it was read from the catalog; None if the message has other columns.

        :param since: see :meth:`_known_since`.
        """
        table = self._known_since(message.oid, since)
        said = [(c.name, c.type_oid, c.typmod) for c in message.columns]
        if table is None or _columns(table) != said:
            return None
        return table

    def _known_since(self, oid: int, since: float) -> SourceTable | None:
        """A table as it was in the catalog at this moment or later; None if it was not there.

        All tables are read together once those of waiting messages have taken as long one by one: a stream that starts
        may get messages for thousands, and later one for a single table again.

        :param since: on the clock of :func:`time.monotonic`.
        """
        table, read_at = self._read.get(oid, (None, -math.inf))
        if read_at >= since:
            return table
        now = time.monotonic()
        if self.arrived > self._waiting:
            self._spent, self._waiting = 0.0, now
        together = self._spent > len(self._pinned) * _EACH
        oids = list(self._pinned) if together else [oid]
        found = self._loaded(oids)
        took = time.monotonic() - now
        self._read |= {each: (found.get(each), now) for each in oids}
        self._spent, self._took = (0.0, took) if together else (self._spent + took, self._took)
        return found.get(oid)

    def _loaded(self, oids: Iterable[int]) -> dict[int, SourceTable]:
        with self._catalog() as connection:
            return {table.oid: table for table in catalog.load(connection, list(oids), self._mapping)}

    @contextlib.contextmanager
    def _catalog(self) -> Iterator[Connection]:
        """A session that reads the catalog: that of the message before, if it is still there."""
        self.rest()
        if self._connection is None:
            self._connection = connect(self._pipeline.postgres, application="bottledwater catalog")
        try:
            yield self._connection
        except psycopg.Error as error:
            self.close()
            raise outage(error, "Reading the catalog") from error
        finally:
            self._used = time.monotonic()

    def _made(
        self,
        message: pgoutput.RelationMessage,
        pinned: PinnedTable,
        columns: tuple[Column, ...],
        today: SourceTable | None = None,
    ) -> SourceTable:
        flagged = {c.name for c in message.columns if c.key}
        # the message flags the key's columns without their order; under FULL it flags all columns, and the catalog has
        # the key, which was that of the change if it was not made again since
        key, catalog_key = pinned.table.key, None
        if message.identity in "di" and flagged != set(key):
            key = tuple(c.name for c in message.columns if c.key)
        elif message.identity == "f" and today is not None:
            key, catalog_key = today.key, today.catalog_key
        known = pinned.table
        key = () if known.outbox else key
        return SourceTable(
            message.oid,
            message.schema,
            message.name,
            message.identity,
            key,
            columns,
            0,
            known.comment,
            partitioned=known.partitioned,
            where=known.where,
            # another filter of today's options may be in the publication before it is recorded
            filtered=known.filtered or bool(self._mapping.options(message.schema, message.name).where),
            outbox=known.outbox,
            partition_by=known.partition_by,
            sent=known.sent,
            catalog_key=catalog_key,
        )


def _since(before: SourceTable, last: renames.Numbered, now: renames.Numbered) -> renames.Names:
    """The columns that may have got other names since a table's last message, with those that they had and that are not
    recorded.

    :param last: the columns of the last message with their numbers, 0 where these are not known; ``now`` are those of
        this one.
    """
    if all(number for number, _ in (*last, *now)):
        return renames.by_number(now, last)
    recorded = {name for _, name in before.sent}
    found = renames.by_order([name for _, name in now], [name for _, name in last])
    return {name: [name, *(each for each in had if each not in recorded)] for name, had in found.items()}


#: a column's name, type and modifier
_Said = tuple[str, int, int]


def _columns(table: SourceTable) -> list[_Said]:
    """The columns of a table as a Relation message says them."""
    return [(c.name, c.type.oid, c.type.typmod) for c in table.columns]


def _between(said: Sequence[_Said], before: Sequence[_Said], today: Sequence[_Said]) -> bool:
    """Whether a table can have had these columns on its way from what it was to what it is: all that it has kept, and
    some of those that it has lost and got meanwhile."""
    return set(before) & set(today) <= set(said) <= set(before) | set(today) and all(
        [c for c in said if c in each] == [c for c in each if c in said] for each in (before, today)
    )
