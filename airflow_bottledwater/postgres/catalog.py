"""Reads tables, with their columns and keys, from PostgreSQL's catalog."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.model.relation import CatalogKey, Column, SourceTable
from airflow_bottledwater.pipeline.patterns import describes, fits, is_meant
from airflow_bottledwater.postgres import partitions
from airflow_bottledwater.postgres.column_types import Declared, describe
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.storage import undecoded

#: relations that rows are read from. Nothing here takes a lock on them: pg_relation_size and pg_partition_tree would
#: wait for sessions that have one of them locked
_NAMED = "SELECT c.oid, n.nspname, c.relname, c.relreplident, c.relkind, c.relpersistence"
#: of such a relation, whether it belongs to an extension, which brings it along
_OF_EXTENSION = (
    "EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')"
)
_FROM = " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
_RELATIONS = (
    _NAMED
    + """, c.relrowsecurity,
       coalesce(pg_relation_filenode(c.oid), 0), c.reltoastrelid, obj_description(c.oid, 'pg_class'),
       greatest(c.relpages, 0),
       EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped)
"""
    + _FROM
)

_BELOW = """
WITH RECURSIVE tree AS (
    SELECT oid AS root, oid FROM pg_class WHERE relkind = 'p'
    UNION SELECT t.root, i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.oid
)
SELECT root, array_agg(oid ORDER BY oid) FROM tree WHERE oid <> root GROUP BY 1
"""

#: sizes in blocks; pg_relation_size locks the table, and may have to wait for it
_SIZES = (
    "SELECT o, coalesce(pg_relation_size(o::regclass) / current_setting('block_size')::int, 0) FROM unnest(%s::oid[]) o"
)

_COLUMNS = """
SELECT a.attrelid, a.attname, a.atttypid, a.atttypmod, a.attndims, format_type(a.atttypid, a.atttypmod),
       col_description(a.attrelid, a.attnum),
       -- since PostgreSQL 18 also while rows from before are NULL: NOT NULL ... NOT VALID
       a.attnotnull AND NOT EXISTS (
           SELECT FROM pg_constraint n WHERE n.conrelid = a.attrelid AND n.contype = 'n'
           AND n.conkey = ARRAY[a.attnum] AND NOT n.convalidated),
       a.attnum
FROM pg_attribute a
WHERE a.attrelid = ANY (%(oids)s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
ORDER BY a.attrelid, a.attnum
"""

#: the types inside of columns' types (elements, attributes, bounds; domains are resolved) that have no send function
_UNSENDABLE = """
WITH RECURSIVE parts AS (
    SELECT attrelid, attname, atttypid AS oid, false AS inside FROM pg_attribute
    WHERE attrelid = ANY (%s::oid[]) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
    UNION
    SELECT p.attrelid, p.attname, below.oid, p.inside OR below.inside
    FROM parts p JOIN pg_type t ON t.oid = p.oid CROSS JOIN LATERAL (
        SELECT t.typbasetype AS oid, false AS inside WHERE t.typtype = 'd'
        UNION ALL SELECT t.typelem, true WHERE t.typcategory = 'A' AND t.typelem <> 0
        UNION ALL SELECT a.atttypid, true FROM pg_attribute a
                  WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL SELECT r.rngsubtype, true FROM pg_range r WHERE r.rngtypid = t.oid
        UNION ALL SELECT r.rngtypid, true FROM pg_range r WHERE r.rngmultitypid = t.oid
    ) below
)
SELECT n.nspname || '.' || c.relname, p.attname, t.typname
FROM parts p JOIN pg_type t USING (oid) JOIN pg_class c ON c.oid = p.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.inside AND t.typsend = 0 ORDER BY 1, 2
"""

#: candidates for the key: unique indexes over columns, of all rows. A deferrable index cannot be the key, since two
#: rows may have the same values for a moment
_INDEXES = """
SELECT i.indrelid, i.indisreplident, i.indisprimary, i.indimmediate, i.indisvalid,
       ARRAY(SELECT a.attname FROM unnest(i.indkey) WITH ORDINALITY k(attnum, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE place <= i.indnkeyatts ORDER BY place),
       coalesce((SELECT u.oid FROM pg_constraint u WHERE u.conrelid = i.indrelid AND u.conindid = i.indexrelid
                 AND u.contype IN ('p', 'u')), i.indexrelid)
FROM pg_index i WHERE i.indrelid = ANY (%(oids)s::oid[]) AND (i.indisprimary OR i.indisreplident
    OR i.indisunique AND NOT i.indisexclusion AND i.indpred IS NULL AND i.indexprs IS NULL)
"""

#: of an index x of a table, whether it is one that has just the columns of a key: the parameter is their names, sorted
OF_KEY = """x.indisvalid AND x.indisunique AND x.indpred IS NULL AND %s::text[] = ARRAY(
    SELECT of.attname::text FROM pg_attribute of WHERE of.attrelid = x.indrelid
    AND of.attnum = ANY ((x.indkey::int2[])[0:x.indnkeyatts - 1]) ORDER BY of.attname::text COLLATE "C")"""

_UNPUBLISHABLE = (
    "it is REPLICA IDENTITY FULL and has a generated column, and PostgreSQL 18 refuses UPDATE and DELETE on such a "
    "table while they are published (use ALTER TABLE … REPLICA IDENTITY DEFAULT or USING INDEX)"
)


def resolve(
    connection: Connection,
    tables: Sequence[str],
    schemas: Sequence[str],
    *,
    via_root: bool = False,
    strict: bool = True,
    followed: Collection[int] = (),
) -> list[int]:
    """The oids of the permanent tables that match patterns; for a partitioned table, those of its leaf partitions.

    :param tables: names, or patterns ``[schema.]table`` with ``*`` and ``?``; without a schema, ``public`` is meant.
    :param schemas: patterns of schemas, all of whose tables are included. If both are empty, all tables of all schemas
        but the system's are. Tables of extensions are taken by their names only. In both, a pattern behind ``!`` leaves
        out what it matches, whatever else matches it.
    :param via_root: whether a partitioned table stands for itself instead, and everything below it belongs to it.
    :param strict: whether it is an error if a pattern matches nothing; otherwise the others count.
    :param followed: tables that patterns take also if they belong to an extension by now.
    :raises PreflightError: a pattern matches nothing, or is the name of something that is not a permanent table.
    """
    rows = _relations(connection, followed)
    everything = {row.oid: row for row in rows}
    # of the patterns, mostly none: they are asked of each table
    out, out_schemas = ([each for each in patterns if each.startswith("!")] for patterns in (tables, schemas))
    rows = [row for row in rows if not _left_out(out, out_schemas, row.schema, row.name)]
    qualified: dict[str, list[_Relation]] = {}
    for row in rows:
        qualified.setdefault(f"{row.schema}.{row.name}", []).append(row)
    public = {row.name: [row] for row in rows if row.schema == "public"}
    choice = _Choice(everything, dict(connection.execute(_BELOW).fetchall()), via_root, {row.oid for row in rows})
    tables, schemas = _taken(tables), _taken(schemas)
    if not tables and not schemas:
        choice.take(rows, "*")
    for pattern in schemas:
        choice.take([row for row in rows if fits(pattern, row.schema)], f"{pattern}.*")
    for pattern in tables:
        # the name of the table itself may have a dot, or a wildcard
        found = qualified.get(pattern) or public.get(pattern, [])
        exact = bool(found) or not any(c in pattern for c in "*?")
        if not exact:
            found = [row for row in rows if is_meant(pattern, row.schema, row.name)]
        choice.take(found, pattern, exact=exact)
    if choice.problems and strict:
        raise PreflightError(choice.problems)
    return choice.tables()


def idle(connection: Connection, tables: Sequence[str], schemas: Sequence[str]) -> list[str]:
    """The patterns behind ``!`` that match nothing, and so leave nothing out."""
    if not any(each.startswith("!") for each in (*tables, *schemas)):
        return []
    rows = _relations(connection)
    found = [each for each in tables if not any(_left_out([each], (), row.schema, row.name) for row in rows)]
    found += [each for each in schemas if not any(_left_out((), [each], row.schema, row.name) for row in rows)]
    return [each for each in found if each.startswith("!")]


def brought(connection: Connection, tables: Sequence[str], schemas: Sequence[str], taken: Collection[int]) -> list[str]:
    """The tables of extensions that patterns match, and do not take.

    :param taken: the oids of those that are.
    """
    rows = [row for row in _relations(connection, taken) if row.of_extension and not _unfit(row)]
    return [f"{row.schema}.{row.name}" for row in rows if covers(tables, schemas, row.schema, row.name)]


def _relations(connection: Connection, followed: Collection[int] = ()) -> list[_Relation]:
    """Whatever a pattern may match.

    :param followed: tables that do not count as those of an extension.
    """
    rows = connection.execute(
        f"{_NAMED}, c.oid <> ALL (%s::oid[]) AND {_OF_EXTENSION} {_FROM}"
        "WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema')"
        " AND n.nspname NOT LIKE 'pg\\_%%' ORDER BY n.nspname, c.relname",
        (list(followed),),
    ).fetchall()
    return [_Relation(*row) for row in rows]


def covers(tables: Sequence[str], schemas: Sequence[str], schema: str, name: str) -> bool:
    """Whether patterns mean a table of this name, as :func:`resolve` takes them."""
    if _left_out(tables, schemas, schema, name):
        return False
    tables, schemas = _taken(tables), _taken(schemas)
    return (
        not (tables or schemas)
        or any(fits(pattern, schema) for pattern in schemas)
        or any(describes(each, schema, name) for each in tables)
    )


def _taken(patterns: Sequence[str]) -> list[str]:
    """The patterns that take tables in."""
    return [each for each in patterns if not each.startswith("!")]


def _left_out(tables: Sequence[str], schemas: Sequence[str], schema: str, name: str) -> bool:
    """Whether a pattern behind ``!`` matches a table."""
    return any(each.startswith("!") and fits(each[1:], schema) for each in schemas) or any(
        each.startswith("!") and describes(each[1:], schema, name) for each in tables
    )


class _Relation(NamedTuple):
    """A row of pg_class that a pattern may match.

    :param identity: ``relreplident``; ``kind`` is ``relkind``, and ``persistence`` is ``relpersistence``.
    :param of_extension: whether an extension has made it: then it is mostly not the pipeline's to publish, and has
        nothing that is an application's.
    """

    oid: int
    schema: str
    name: str
    identity: str
    kind: str
    persistence: str
    of_extension: bool = False


class _Choice:
    """The tables that patterns have matched so far, and the problems of patterns and of tables that were given by their
    exact name.

    :param allowed: the oids of what no pattern leaves out.
    """

    def __init__(
        self,
        by_oid: Mapping[int, _Relation],
        below: Mapping[int, Sequence[int]],
        via_root: bool,
        allowed: Collection[int],
    ) -> None:
        self._by_oid, self._below, self._via_root, self._allowed = by_oid, below, via_root, allowed
        self._chosen: dict[int, None] = {}
        self.problems: list[str] = []

    def tables(self) -> list[int]:
        """The oids of the chosen tables. A table that belongs to a chosen partitioned one is not one of its own."""
        belonging = {oid for root in self._chosen for oid in self._below.get(root, ())} if self._via_root else set()
        return [oid for oid in self._chosen if oid not in belonging]

    def take(self, matches: Iterable[_Relation], pattern: str, *, exact: bool = False) -> None:
        """Add the permanent tables among the relations that a pattern matches.

        :param exact: whether the pattern is a name: anything but a permanent table is then a problem, instead of being
            left out, as a table of an extension is.
        """
        taken, before, brought = 0, len(self.problems), False
        for relation in matches:
            if relation.of_extension and not exact:
                brought = True
                continue
            problem = _unfit(relation)
            if problem:
                self.problems += [problem] if exact else []
                continue
            taken += 1
            split = relation.kind == "p" and not self._via_root
            self._chosen.update(dict.fromkeys(self._leaves(relation, exact) if split else [relation.oid]))
        if taken == 0 and len(self.problems) == before:
            but = " but tables of extensions, which are taken by their names only" if brought else ""
            self.problems.append(f"No table matches {pattern!r}{but}. Check the name, its schema and the database.")

    def _leaves(self, parent: _Relation, exact: bool) -> list[int]:
        below = [self._by_oid[oid] for oid in self._below.get(parent.oid, []) if oid in self._by_oid]
        leaves = [each for each in below if each.kind != "p" and each.oid in self._allowed]
        unfit = [leaf for leaf in leaves if leaf.kind != "r" or leaf.persistence != "p"]
        if exact:
            self.problems += [
                f"{leaf.schema}.{leaf.name}, a partition of {parent.schema}.{parent.name}, is not permanent or a "
                "foreign table: its changes are not in the WAL. Name the other partitions."
                for leaf in unfit
            ]
        return [leaf.oid for leaf in leaves if leaf not in unfit]


def _unfit(relation: _Relation) -> str:
    """Why a relation cannot be published; empty if it can."""
    name = f"{relation.schema}.{relation.name}"
    if relation.kind not in ("r", "p"):
        return f"{name} is not a table (a view, materialized view or foreign table). Name tables only."
    if relation.persistence != "p":
        return (
            f"Table {name} is not permanent (unlogged or temporary): its changes are not in the WAL. "
            "ALTER TABLE … SET LOGGED, or leave it out."
        )
    return ""


def load(
    connection: Connection, oids: Sequence[int], mapping: TableMapping | None = None, *, sizes: bool = False
) -> list[SourceTable]:
    """The tables with these oids, ordered by schema and name; a table that does not exist any more is left out.

    :param mapping: how the pipeline sees them; None where types do not matter.
    :param sizes: whether to measure the tables, which waits for sessions that have one of them locked; otherwise
        ``pages`` is that of the last VACUUM or ANALYZE.
    """
    mapping = mapping or TableMapping()
    wanted, forms = {"oids": list(oids)}, mapping.forms
    columns, nullable, numbers = _columns(connection, wanted, forms)
    indexes: dict[int, list[_Index]] = {}
    for oid, *index in connection.execute(_INDEXES, wanted):
        indexes.setdefault(oid, []).append(_Index(*index))
    pages = measured(connection, oids) if sizes else {}
    loaded = []
    for row in connection.execute(
        _RELATIONS + "WHERE c.oid = ANY (%(oids)s::oid[]) ORDER BY n.nspname, c.relname", wanted
    ).fetchall():
        oid, schema, name, identity, kind, persistence, security, filenode, toast, comment, estimate, generated = row
        sent = columns.get(oid, [])
        left_out = mapping.left_out(schema, name, [column.name for column in sent])
        options = mapping.options(schema, name)
        key, problem = _mapped_key(
            mapping, (schema, name), identity, indexes.get(oid, []), sent, nullable.get(oid, set())
        )
        # pub_contains_invalid_column in src/backend/commands/publicationcmds.c, since PostgreSQL 18
        unpublishable = identity == "f" and generated and connection.info.server_version >= 180000
        if unpublishable:
            key, problem = (), _UNPUBLISHABLE
        numbered = tuple(zip(numbers.get(oid, []), (column.name for column in sent), strict=True))
        loaded.append(
            SourceTable(
                oid,
                schema,
                name,
                identity,
                key,
                mapping.published(schema, name, (each for place, each in enumerate(sent) if place not in left_out)),
                filenode,
                comment,
                persistence,
                pages.get(oid, int(estimate or 0)),
                security,
                kind == "p",
                left_out,
                problem,
                unpublishable,
                options.where,
                bool(options.where),
                bool(options.outbox),
                options.partition_by if key else (),
                numbered,
                _catalog_key(key, numbered, indexes.get(oid, []), (filenode, toast)) if key else None,
            )
        )
    return loaded


def _columns(
    connection: Connection, wanted: Mapping[str, list[int]], forms: TypeOptions
) -> tuple[dict[int, list[Column]], dict[int, set[str]], dict[int, list[int]]]:
    """The columns that PostgreSQL sends, the names of those that may be NULL, and their numbers, by the table's oid."""
    columns: dict[int, list[Column]] = {}
    nullable: dict[int, set[str]] = {}
    numbers: dict[int, list[int]] = {}
    rows = connection.execute(_COLUMNS, wanted).fetchall()
    types = describe(connection, [Declared(*row[2:6]) for row in rows], forms=forms)
    for (oid, name, *_, comment, not_null, number), kind in zip(rows, types, strict=True):
        required = not_null and forms.not_null == "required"
        columns.setdefault(oid, []).append(Column(name, kind, comment, required, number=number))
        numbers.setdefault(oid, []).append(number)
        if not not_null:
            nullable.setdefault(oid, set()).add(name)
    return columns, nullable, numbers


def measured(connection: Connection, oids: Sequence[int]) -> dict[int, int]:
    """The sizes of tables in blocks, by oid; it waits for sessions that have one of them locked."""
    return dict(connection.execute(_SIZES, (list(oids),)).fetchall())


class _Index(NamedTuple):
    """A unique index that may be the key.

    :param replica: whether it is that of the replica identity; ``primary`` and ``valid`` likewise.
    :param immediate: whether it is not deferrable.
    :param oid: that of its constraint, or its own if it has none.
    """

    replica: bool
    primary: bool
    immediate: bool
    valid: bool
    columns: list[str]
    oid: int

    def keeps_unique(self, key: Sequence[str]) -> bool:
        """Whether no two rows have the same values in just these columns, at any moment."""
        return self.valid and self.immediate and sorted(self.columns) == sorted(key)


def _mapped_key(
    mapping: TableMapping,
    named: tuple[str, str],
    identity: str,
    indexes: Sequence[_Index],
    columns: Sequence[Column],
    nullable: Collection[str],
) -> tuple[tuple[str, ...], str]:
    """The key columns of a table as a pipeline sees it, and if there are none, the reason.

    :param named: schema and name.
    :param columns: those that PostgreSQL sends; ``nullable`` are the names of those that may be NULL.
    """
    key, problem = _key(identity, indexes, columns, nullable)
    if mapping.options(*named).outbox:
        # only PostgreSQL asks for one, whatever of it is published
        return (), problem
    if asked := mapping.options(*named).key:
        key, problem = asked, _unfit_key(asked, identity, indexes, columns, nullable)
    hidden = mapping.left_out(*named, [column.name for column in columns])
    masked = mapping.masked(*named, (column for column in columns if column.name in key))
    if left_out := [columns[place].name for place in hidden if columns[place].name in key]:
        problem = f"its options leave out column {left_out[0]!r} of its key (table_options)"
    elif unlike := [column.name for column in masked if column.mask and not mapping.hashes_key(*named, column)]:
        problem = f"its options mask column {unlike[0]!r} of its key (table_options)"
    if key and not problem and (outside := [name for name in mapping.options(*named).partition_by if name not in key]):
        problem = (
            f"its partitions are chosen by column {outside[0]!r} (partition_by of table_options), which is not one of "
            f"its key ({', '.join(key)})"
        )
    return ((), problem) if problem else (key, "")


def _catalog_key(
    key: Sequence[str], numbered: Iterable[tuple[int, str]], indexes: Sequence[_Index], rows: tuple[int, int]
) -> CatalogKey:
    """See :class:`CatalogKey`."""
    numbers = {name: number for number, name in numbered}
    unique = sorted(index.oid for index in indexes if index.keeps_unique(key))
    return CatalogKey(tuple(numbers[name] for name in sorted(key)), tuple(unique), rows)


def _key(
    identity: str, indexes: Sequence[_Index], columns: Sequence[Column], nullable: Collection[str]
) -> tuple[tuple[str, ...], str]:
    """The key columns, and if there are none, the reason; see :func:`_mapped_key`."""
    if identity == "n":
        return (), "its replica identity is NOTHING"
    for index in indexes:
        if (index.replica if identity == "i" else index.primary) and index.valid:
            if not index.immediate:
                return (), "its key is DEFERRABLE, so two rows could have the same key for a moment"
            if not set(index.columns) <= {c.name for c in columns}:
                return (), "its key has a generated column, which is not published"
            if null := [name for name in index.columns if name in nullable]:
                return (), f"column {null[0]!r} of its key may be NULL (use ALTER TABLE … VALIDATE CONSTRAINT)"
            return tuple(index.columns), ""
    return (), "it has no primary key" if identity != "i" else "its replica identity index is gone"


def _unfit_key(
    key: Sequence[str], identity: str, indexes: Sequence[_Index], columns: Sequence[Column], nullable: Collection[str]
) -> str:
    """Why columns that the options name cannot be the key; empty if they can.

    :param columns: those that PostgreSQL sends; ``nullable`` are the names of those that may be NULL.
    """
    named = ", ".join(key)
    if missing := [name for name in key if name not in {column.name for column in columns}]:
        return f"the key ({named}) of its options has a column {missing[0]!r} that it does not have, or is generated"
    if null := [name for name in key if name in nullable]:
        return f"column {null[0]!r} of the key of its options may be NULL (use ALTER COLUMN … SET NOT NULL)"
    found = [index for index in indexes if index.keeps_unique(key)]
    if not found:
        return (
            f"it has no unique index over just the columns of the key ({named}) of its options, neither DEFERRABLE nor "
            "with a condition (use CREATE UNIQUE INDEX)"
        )
    if identity == "f" or any(index.replica if identity == "i" else index.primary for index in found):
        return ""
    # what is updated or deleted would be told by other columns
    return (
        f"its replica identity is not the key ({named}) of its options, so that PostgreSQL would not send it of a row "
        "whose key is changed or that is deleted (use ALTER TABLE … REPLICA IDENTITY USING INDEX … with the index of "
        "these columns, or FULL)"
    )


def names(connection: Connection, oids: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Today's schema and name of relations, by oid; relations that do not exist any more are left out."""
    rows = connection.execute(
        "SELECT c.oid, n.nspname, c.relname FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%s::oid[])",
        (list(oids),),
    ).fetchall()
    return {oid: (schema, name) for oid, schema, name in rows}


def still_named(connection: Connection, named: Mapping[int, tuple[str, str]]) -> bool:
    """Whether these schemas and names still belong to these oids. Once tables are locked this cannot change; before
    that, a rename may have given a name to another table. (``to_regclass`` reads the catalog as it is now, whatever the
    transaction's snapshot.)"""
    row = connection.execute(
        "SELECT count(*) FROM unnest(%s::oid[], %s::text[], %s::text[]) t(oid, schema, name)"
        " WHERE to_regclass(format('%%I.%%I', t.schema, t.name))::oid IS DISTINCT FROM t.oid",
        (list(named), [schema for schema, _ in named.values()], [name for _, name in named.values()]),
    ).fetchone()
    return row is not None and row[0] == 0


def fingerprint(connection: Connection, oids: Sequence[int]) -> dict[str, str]:
    """For each table, and each partition below it, a value that changes with its catalog rows: its filenode, and the
    xmin of its pg_class and pg_attribute rows."""
    everything = [*oids, *partitions.names(connection, oids)]
    rows = connection.execute(
        "SELECT c.oid::text, concat_ws('/', pg_relation_filenode(c.oid), c.xmin, (SELECT md5(string_agg(a.attnum || "
        "':' || a.xmin, ',' ORDER BY a.attnum)) FROM pg_attribute a WHERE a.attrelid = c.oid)) FROM pg_class c WHERE "
        "c.oid = ANY (%s::oid[]) ORDER BY 1",
        (everything,),
    ).fetchall()
    return dict(rows)


def definition(table: SourceTable) -> str:
    """A table's columns, key and row filter as one string, to compare them with those at the time of its plan."""
    columns = [[c.name, asdict(c.type), c.required, *([c.renamed] if c.renamed else [])] for c in table.columns]
    return json.dumps([columns, list(table.key), table.identity, *([table.where] if table.where else [])])


class Child(NamedTuple):
    """A table that inherits from another one.

    :param meant: whether its rows are meant not to be in any topic, or are in its own.
    :param fit: whether it can be followed.
    """

    meant: bool
    fit: bool


def inherited(
    connection: Connection, oids: Collection[int], tables: Sequence[str], schemas: Sequence[str]
) -> dict[int, dict[str, Child]]:
    """The tables that inherit from ordinary tables (``INHERITS``; the chunks of a TimescaleDB hypertable are among
    them), by the oid of the parent and by their names. A query of the parent has their rows, its topic does not.
    Partitions are not among them, nor are temporary tables: only the session that has made one finds its rows in the
    parent.

    :param oids: the followed tables.
    :param tables: patterns, and ``schemas`` likewise: what they leave out is left out on purpose.
    """
    rows = connection.execute(
        _NAMED + ", i.inhparent" + _FROM + "JOIN pg_inherits i ON i.inhrelid = c.oid JOIN pg_class p "
        "ON p.oid = i.inhparent WHERE p.relkind = 'r' AND p.oid = ANY (%s::oid[]) AND c.relpersistence <> 't' "
        "ORDER BY p.oid, n.nspname, c.relname",
        (list(oids),),
    ).fetchall()
    found: dict[int, dict[str, Child]] = {}
    apart = undecoded(connection, [row[0] for row in rows]) if rows else {}
    for *row, parent in rows:
        child = _Relation(*row)
        meant = child.oid in oids or _left_out(tables, schemas, child.schema, child.name)
        fit = not _unfit(child) and child.oid not in apart
        found.setdefault(parent, {})[f"{child.schema}.{child.name}"] = Child(meant, fit)
    return found


def unselectable(connection: Connection, tables: Sequence[SourceTable]) -> list[str]:
    """The tables on which this role lacks SELECT (or USAGE on their schema)."""
    rows = connection.execute(
        "SELECT c.oid FROM pg_class c WHERE c.oid = ANY (%s::oid[]) AND NOT"
        " (has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))",
        ([t.oid for t in tables],),
    ).fetchall()
    denied = {row[0] for row in rows}
    return [t.qualified for t in tables if t.oid in denied]


def unsendable(connection: Connection, tables: Sequence[SourceTable]) -> list[tuple[str, str, str]]:
    """Columns that contain a type without a send function, as table, column and type. pgoutput fails for every row of
    such a table (logicalrep_write_tuple in src/backend/replication/logical/proto.c checks the column's own type
    only)."""
    return connection.execute(_UNSENDABLE, ([t.oid for t in tables],)).fetchall()  # type: ignore[return-value]


def filtered_by_policy(connection: Connection, tables: Sequence[SourceTable]) -> list[str]:
    """The tables in which a row-level policy could hide rows from this role (row_security_active)."""
    rows = connection.execute(
        "SELECT c.oid FROM pg_class c WHERE c.oid = ANY (%s::oid[]) AND c.relrowsecurity AND "
        "row_security_active(c.oid)",
        ([t.oid for t in tables if t.row_security],),
    ).fetchall()
    hidden = {row[0] for row in rows}
    return [t.qualified for t in tables if t.oid in hidden]
