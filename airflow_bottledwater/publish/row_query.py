"""The query that finds the rows of a table by their keys, through the index of the key, and ends when they are large
enough."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from psycopg import pq, sql

from airflow_bottledwater.encoding import masks, types
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.postgres import row_filter
from airflow_bottledwater.postgres.catalog import OF_KEY
from airflow_bottledwater.postgres.connect import Connection

#: text, varchar, char and bytea, whose size PostgreSQL tells without reading a value that is stored out of line
#: (toast_raw_datum_size, src/backend/access/common/detoast.c)
_SIZED = (25, 1043, 1042, 17)


class Equality(NamedTuple):
    """How values of a column are compared.

    :param schema: that of the operator, whose name is ``operator``.
    :param collation: schema and name of the collation; None if it is that of the column, or none.
    """

    schema: str
    operator: str
    collation: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class RowQuery:
    """Makes the query.

    :param table: the relation version whose columns are used.
    :param name: the table's name today.
    :param key: the key's columns, in the order of the key.
    :param operators: see :func:`equality`.
    :param text: the columns that are read as text, see :func:`wire_types`.
    :param converted: the columns whose values are converted as a snapshot's are.
    """

    table: SourceTable
    name: sql.Identifier
    key: Sequence[Column]
    operators: Mapping[str, Equality]
    text: Collection[str] = ()
    converted: Collection[str] = ()

    def select(self, keys: sql.Composable, number: str, columns: Sequence[int], most: int) -> sql.Composed:
        """The query that joins rows with a list of keys; it returns the key's number, the row's columns, and the number
        of the next key that has a row. It ends behind the row whose values, together with those before, have ``most``
        bytes; rows that it leaves out cost little, since their values out of line are not read.

        Equality is that of the key's index, whatever schema its operator is in, and whatever its collation is, so that
        the index is used; if there is none any more, that of the type. Values that it takes for equal can differ
        (``citext``, a numeric's scale) and are then different keys in Kafka, so they are compared byte by byte, too.
        Keys have the types below all domains, whose constraints may have changed since.
        """
        same = []
        for k, column in enumerate(self.key):
            equality = self.operators.get(column.name, Equality("pg_catalog", "="))
            value = sql.Identifier("t", column.name)
            base = sql.SQL("{}::{}").format(value, sql.Identifier(column.type.schema, column.type.label))
            equal = sql.SQL("{t} OPERATOR({schema}.{operator}) {i}{collate} AND record_image_eq(ROW({t}), ROW({i}))")
            collation = equality.collation
            same.append(
                equal.format(
                    t=value if column.type.oid == column.type.base_oid else base,
                    i=sql.Identifier("i", f"k{k}"),
                    schema=sql.Identifier(equality.schema),
                    operator=sql.SQL(equality.operator),  # type: ignore[arg-type]
                    collate=sql.SQL(" COLLATE {}").format(sql.Identifier(*collation)) if collation else sql.SQL(""),
                )
            )
        made = [self._made(c) for c in columns]
        sizes = [_size(self.table.columns[c]) for c in columns]
        select = sql.SQL(
            "SELECT {named} FROM (SELECT {made}, sum({size}) OVER before AS before, lead({n}) OVER before AS following"
            " FROM {keys} JOIN {rows} t ON {same}"
            " WINDOW before AS (ORDER BY {n} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) found"
            " WHERE coalesce(before, 0) < {most} ORDER BY n"
        )
        n = sql.SQL("({})::int8").format(sql.SQL(number))  # type: ignore[arg-type]
        return select.format(
            named=sql.SQL(", ").join([sql.SQL("n"), *map(_value, columns), sql.SQL("following")]),
            made=sql.SQL(", ").join([sql.SQL("{} AS n").format(n), *made]),
            size=sql.SQL(" + ").join([sql.SQL("0::int8"), *sizes]),
            n=n,
            keys=keys,
            rows=self._rows(),
            same=sql.SQL(" AND ").join(same),
            most=sql.Literal(most),
        )

    def fulfilling(self, keys: sql.Composable, condition: sql.Composable) -> sql.Composed:
        """The query that returns the numbers of those of a list of keys that fulfil a condition for the key's
        columns."""
        columns = [
            sql.SQL("{} AS {}").format(sql.Identifier("i", f"k{k}"), sql.Identifier(column.name))
            for k, column in enumerate(self.key)
        ]
        return sql.SQL("SELECT bottledwater_n FROM (SELECT i.n::int8 AS bottledwater_n, {} FROM {}) t WHERE {}").format(
            sql.SQL(", ").join(columns), keys, condition
        )

    def _rows(self) -> sql.Composed:
        """The table, or those of its rows that are published."""
        table = sql.SQL("{}{}").format(sql.SQL("" if self.table.partitioned else "ONLY "), self.name)
        if not self.table.where:
            return table
        return sql.SQL("(SELECT * FROM {} WHERE {})").format(table, row_filter.condition(self.table.where))

    def _made(self, c: int) -> sql.Composed:
        column = self.table.columns[c]
        name = sql.Identifier("t", column.name)
        if column.name in self.converted and (convert := types.mapping(column.type).convert) is not None:
            return sql.SQL("{} AS {}").format(types.unless_null(convert, name), _value(c))
        text = sql.SQL("::text" if column.name in self.text else "")
        return sql.SQL("{}{} AS {}").format(masks.selected(column, name), text, _value(c))


def _value(column: int) -> sql.Identifier:
    """The name of a column of the table in a query's result."""
    return sql.Identifier(f"c{column}")


def _size(column: Column) -> sql.Composed:
    """SQL for about how many bytes a column's value has when it is sent. What is stored is compressed to less than a
    quarter only seldom."""
    size = "octet_length(t.{})::int8" if column.type.base_oid in _SIZED else "4 * pg_column_size(t.{})::int8"
    return sql.SQL(f"coalesce({size}, 0)").format(sql.Identifier(column.name))


def following_key(result: pq.abc.PGresult) -> int | None:
    """The number of the first key that a query of :meth:`RowQuery.select` left out; None if it did not leave out
    any."""
    number = result.get_value(result.ntuples - 1, result.nfields - 1) if result.ntuples else None
    return None if number is None else int.from_bytes(number, "big")


def listed(rows: int, width: int) -> sql.SQL:
    """A numbered list of keys, as parameters: ``(VALUES (0, $1, $2), (1, $3, $4)) i(n, k0, k1)``."""
    listed = ", ".join(f"({n}, {', '.join(f'${n * width + k + 1}' for k in range(width))})" for n in range(rows))
    return sql.SQL(f"(VALUES {listed}) i(n, {', '.join(f'k{k}' for k in range(width))})")


def unnested(width: int) -> sql.SQL:
    """A numbered list of keys from one array for each key column:
    ``ROWS FROM (unnest($1), unnest($2)) WITH ORDINALITY i(k0, k1, n)``."""
    arrays = ", ".join(f"unnest(${k + 1})" for k in range(width))
    return sql.SQL(f"ROWS FROM ({arrays}) WITH ORDINALITY i({', '.join(f'k{k}' for k in range(width))}, n)")


def wire_types(connection: Connection, table: SourceTable) -> tuple[set[str], dict[int, int]]:
    """How values of a table's types are sent and passed: the columns whose types have no send function (those of
    ``isn``, for example), which PostgreSQL sends as text, here as in the stream (logicalrep_write_tuple in
    src/backend/replication/logical/proto.c); and type → the type of its arrays, for :func:`unnested`, without arrays
    and composites, which ``unnest`` would take apart."""
    rows = connection.execute(
        "SELECT oid, typsend = 0, CASE WHEN typcategory = 'A' OR typrelid <> 0 THEN 0 ELSE typarray END"
        " FROM pg_type WHERE oid = ANY (%s::oid[])",
        (list({column.type.base_oid for column in table.columns}),),
    ).fetchall()
    as_text = {oid for oid, text, _ in rows if text}
    text_columns = {column.name for column in table.columns if column.type.base_oid in as_text}
    return text_columns, {oid: array for oid, _, array in rows if array}


#: the operators of equality of some operator classes of btree indexes
_EQUALITY = """
SELECT {of}, n.nspname, o.oprname, {collation}
FROM pg_opclass c JOIN pg_amop m ON m.amopfamily = c.opcfamily AND m.amopstrategy = 3 AND m.amoplefttype = c.opcintype
    AND m.amoprighttype = c.opcintype
JOIN pg_am i ON i.oid = m.amopmethod AND i.amname = 'btree'
JOIN pg_operator o ON o.oid = m.amopopr
JOIN pg_namespace n ON n.oid = o.oprnamespace
{where}
"""
#: those of types; one that has no class of its own is compared as another one of pg_catalog
_OF_TYPES = _EQUALITY.format(
    of="c.opcintype", collation="NULL", where="WHERE c.opcdefault AND c.opcintype = ANY (%s::oid[])"
)
#: those of the indexes of a key
_OF_INDEXES = _EQUALITY.format(
    of="a.attname",
    collation="(SELECT ARRAY[s.nspname::text, l.collname] FROM pg_collation l JOIN pg_namespace s"
    " ON s.oid = l.collnamespace WHERE l.oid = k.collated AND l.oid <> a.attcollation)",
    where="JOIN (pg_index x CROSS JOIN LATERAL"
    " unnest(x.indkey::int2[], x.indclass::oid[], x.indcollation::oid[]) k(attnum, opclass, collated))"
    " ON k.opclass = c.oid JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attnum"
    f" WHERE x.indrelid = %s AND {OF_KEY} ORDER BY x.indisprimary, x.indisreplident",
)


def equality(connection: Connection, oid: int, key: Sequence[Column]) -> dict[str, Equality]:
    """Key column → the equality of the key's index; of the column's type, if there is none today."""
    bases = {column.name: column.type.base_oid for column in key}
    rows = connection.execute(_OF_TYPES, (list(bases.values()),)).fetchall()  # type: ignore[arg-type]
    of_types = {kind: Equality(*found) for kind, *found in rows}
    rows = connection.execute(_OF_INDEXES, (oid, sorted(bases))).fetchall()  # type: ignore[arg-type]
    of_indexes = {name: Equality(*found) for name, *found in rows}
    return {name: of_types[kind] for name, kind in bases.items() if kind in of_types} | of_indexes
