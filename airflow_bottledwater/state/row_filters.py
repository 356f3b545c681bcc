"""The option ``where`` of tables, compared with PostgreSQL's rules for row filters and with what publications have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import psycopg

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, coverage, publication, row_filter
from airflow_bottledwater.postgres.connect import Connection, outage, quoted
from airflow_bottledwater.postgres.publication import Published
from airflow_bottledwater.postgres.row_filter import RowFilter
from airflow_bottledwater.state.pipeline_state import PipelineState

_DENIED = psycopg.errors.InsufficientPrivilege


def problems(connection: Connection, pipeline: Settings, tables: Iterable[SourceTable]) -> list[str]:
    """What is wrong with the row filters of tables: those that PostgreSQL does not take, those with which it would let
    the application's UPDATE and DELETE fail, and those that are not in a publication which others make.

    :param tables: with all their columns.
    :raises Outage: a condition cannot be checked now.
    """
    mapping = TableMapping.of(pipeline)
    wanted = [(table, where) for table in tables if (where := mapping.options(table.schema, table.name).where)]
    if not wanted:
        return []
    if connection.info.server_version < row_filter.SINCE:
        return [
            f"Table {table.qualified} has a row filter (where in table_options), and PostgreSQL "
            f"{connection.info.server_version // 10000} has none: version 15 is the first. Take it out, or upgrade the "
            "server."
            for table, _ in wanted
        ]
    both = publication.existing(connection, pipeline.publication_name)
    return [said for table, where in wanted if (said := _problem(connection, pipeline, both, table, where))]


def ineffective(connection: Connection, pipeline: Settings, known: PipelineState) -> dict[int, str]:
    """The followed tables of which rows are sent that their row filters hide: by oid, what is said of it, and what can
    be done. PostgreSQL sends a row that any publication lets through, so that one without the filter is enough.

    Under the filter with which a table is recorded nothing is sent that is not meant, also if its option is another one
    now: that is taken up together with its rows.

    :raises Outage: a filter cannot be compared now.
    """
    recorded = {oid: pinned.table.where for oid, pinned in known.tables.items() if pinned.table.where}
    if not recorded:
        return {}
    both = publication.existing(connection, pipeline.publication_name)
    names = publication.names(pipeline.publication_name)
    known_rows = known.coverage.tables if known.coverage is not None else {}
    rows = coverage.read(connection, names, list(recorded)).tables
    found = {}
    for table in catalog.load(connection, list(recorded), TableMapping.of(pipeline)):
        if not table.where:
            continue  # all of its rows are to be published from now on, or its options are under its earlier name
        # a row of the catalog keeps the filter with which it was made
        new = rows.get(table.oid, frozenset()) - known_rows.get(table.oid, frozenset())
        for each in (each for each in both if table.oid in each.tables):
            has = row_filter.read(connection, each.name, table.oid) if new and each.filters(table.oid) else None
            allowed = {table.where, recorded[table.oid]}
            if not each.filters(table.oid) or (
                new and not any(_is(connection, has, table, where) for where in allowed)
            ):
                found[table.oid] = (
                    f"{_difference(each, table, has, table.where)}. Until it has it, none of the table's changes is "
                    f"published. To mend it, {_change(each, table, table.where)}"
                )
    return found


def _is(connection: Connection, has: RowFilter | None, table: SourceTable, where: str) -> bool:
    """Whether a publication's filter of a table is the one that is wanted."""
    try:
        return has is not None and _same(has, _parsed(connection, table, where), where)
    except psycopg.Error as error:
        why = outage(error, f"Comparing the row filter of {table.qualified}")
        if isinstance(why, Outage):
            raise why from None
        return False  # it is none for the table as it is now


def _problem(
    connection: Connection, pipeline: Settings, both: Sequence[Published], table: SourceTable, where: str
) -> str:
    """
    :param both: the pipeline's publications, as far as they exist.
    """
    of = [each for each in both if table.oid in each.tables]
    try:
        found = _parsed(connection, table, where)
        published = [
            row_filter.read(connection, each.name, table.oid) if each.filters(table.oid) else None for each in of
        ]
        if pipeline.create_publication:
            # nothing else knows all rules of a publication
            if found is None or not of or any(each is None or each.text != found.text for each in published):
                found = row_filter.tried(connection, table, where)
        else:
            for each, has in zip(of, published, strict=True):
                if has is None or not _same(has, found, where):
                    return _another(each, table, has, found.text if found else where)
            found = next(iter(published), found)
    except _DENIED:
        return ""  # that the role may not publish, or read, the table is a problem of its own
    except psycopg.Error as error:
        why = outage(error, f"Checking the row filter {where!r} of {table.qualified}")
        if isinstance(why, Outage):
            raise why from None
        detail = error.diag.message_detail or ""
        return (
            f"PostgreSQL does not accept the row filter {where!r} of {table.qualified}: "
            f"{str(error).splitlines()[0].rstrip('.')}{f' ({detail.rstrip(chr(46))})' if detail else ''}. It is a "
            "condition over the table's own columns, with PostgreSQL's own types, operators and immutable functions."
        )
    if found is None or not table.identifiable or table.identity == "f":
        return ""
    lacking = sorted(found.columns - set(table.key))
    return publication.not_covered(table, table.key, lacking) if lacking else ""


def _parsed(connection: Connection, table: SourceTable, where: str) -> RowFilter | None:
    """See :func:`~airflow_bottledwater.postgres.row_filter.parsed`; None if the role may not make temporary tables."""
    try:
        return row_filter.parsed(connection, table, where)
    except _DENIED:
        return None


def _same(published: RowFilter, found: RowFilter | None, where: str) -> bool:
    """Whether a publication's filter is the one that is wanted.

    :param found: the latter as PostgreSQL reads it; None if that is not known: then only the same words are.
    """
    if found is not None:
        return published.text == found.text
    return "".join(published.text.split()) in ("".join(f"({where})".split()), "".join(where.split()))


def _another(published: Published, table: SourceTable, has: RowFilter | None, wanted: str) -> str:
    return (
        f"{_difference(published, table, has, wanted)}. The snapshot would read other rows than the stream. Give "
        f"table_options the publication's, or {_change(published, table, wanted)}"
    )


def _difference(published: Published, table: SourceTable, has: RowFilter | None, wanted: str) -> str:
    """
    :param has: the publication's filter.
    """
    return (
        f"Publication {published.name!r} has {f'the row filter {has.text}' if has else 'no row filter'} for "
        f"{table.qualified}, and table_options have where: {wanted}"
    )


def _change(published: Published, table: SourceTable, wanted: str) -> str:
    """What gives a publication the filter that is wanted, as the end of a sentence."""
    name, of = quoted(published.name), quoted(table.schema, table.name)
    if not published.takes_in(table):
        return (
            f"run as its owner: BEGIN; ALTER PUBLICATION {name} DROP TABLE ONLY {of}; ALTER PUBLICATION {name} ADD "
            f"TABLE ONLY {of} WHERE ({wanted}); COMMIT;"
        )
    change = "publish the table by its name, since FOR ALL TABLES and FOR TABLES IN SCHEMA have no filters"
    if published.all_tables:
        return change
    return f"{change}: ALTER PUBLICATION {name} DROP TABLES IN SCHEMA {quoted(table.schema)};"


def foreign(connection: Connection, published: Published, tables: Iterable[SourceTable]) -> list[str]:
    """What is said of tables that a publication of others filters, and the options do not."""
    found = []
    for table in tables:
        if not published.filters(table.oid) or table.where:
            continue
        has = row_filter.read(connection, published.name, table.oid)
        found.append(
            f"Publication {published.name!r} has a row filter on {table.qualified}, which the snapshot would not "
            f"respect. Give table_options the same (where: {has.text if has else ''}), or remove the filter."
        )
    return found


def refused(pipeline: Settings, known: PipelineState, today: Iterable[SourceTable]) -> list[str]:
    """The followed tables whose row filter cannot be changed: without a key, their topics cannot be brought to what
    another one leaves.

    :param today: the tables as they are by today's options.
    """
    mapping, found = TableMapping.of(pipeline), []
    for table in today:
        before = known.tables[table.oid].table
        # one that was renamed, and has its filter by the old name still, is set aside, and can be given it
        allowed = (table.where, mapping.options(before.schema, before.name).where)
        if not before.keyed and before.where not in allowed:
            found.append(
                f"The row filter of {table.qualified} cannot be changed from {before.where or 'none'} to "
                f"{table.where or 'none'}: the table has no key, by which its topic could be brought to it. Set where "
                "back; or drop the slot (bottledwater drop-slot --when always) and start again with a snapshot under "
                "another topic_prefix."
            )
    return found
