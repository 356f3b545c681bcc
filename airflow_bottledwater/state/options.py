"""The options of single tables (``table_options``), compared with the catalog and with those of the last start."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from airflow_bottledwater.encoding import masks
from airflow_bottledwater.encoding.mapping import TableMapping, matches, rule_of
from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.model import renames
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.pipeline.patterns import describes
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection, quoted
from airflow_bottledwater.postgres.storage import stored_apart
from airflow_bottledwater.state import outboxes, row_filters
from airflow_bottledwater.state.coverage import renamed
from airflow_bottledwater.state.identity import other_partitions, resolve
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState


def problems(
    connection: Connection, pipeline: Settings, oids: Collection[int], followed: Mapping[int, PinnedTable] | None
) -> list[str]:
    """What is wrong with the options of these tables.

    :param followed: those that are recorded; each rule has to match one of them, or one of the others. None if the
        tables are not all that the settings name: then a rule may match others.
    """
    mapping = TableMapping.of(pipeline)
    if not mapping.rules:
        return []
    loaded = catalog.load(connection, list({*oids, *(followed or ())}), mapping.all_columns())
    found = _without_match(mapping, loaded, followed) if followed is not None else []
    whole = [table for table in loaded if table.oid in oids]
    for table in whole:
        columns = [column.name for column in table.columns]
        found += _unfit_choosers(mapping, table)
        if mapping.options(table.schema, table.name).outbox:
            found += outboxes.problems(mapping, table)
            table = replace(table, key=())
        elif mapping.options(table.schema, table.name).key and not table.keyed:
            found.append(
                f"Table {table.qualified} cannot have the key that table_options give it: {table.key_problem}. Mend "
                "that, or take key out."
            )
        left_out = {columns[place] for place in mapping.left_out(table.schema, table.name, columns)}
        found += [
            f"Column {name!r} is in the key of {table.qualified}, and table_options leave it out: a key is published "
            "whole. Take it out of exclude, or name it in include; or leave the table out."
            for name in table.key
            if name in left_out
        ]
        found += [
            f"The mask {said!r} of column {column.name!r} of {table.qualified} {why}"
            for column in table.columns
            if (said := rule_of(mapping.options(table.schema, table.name).mask, column.name))
            and (why := _unfit(mapping, table, column, said))
        ]
        found += _not_looked_up(connection, mapping, table)
    return [*found, *_unsettled(mapping, whole).values(), *row_filters.problems(connection, pipeline, whole)]


def _unfit_choosers(mapping: TableMapping, table: SourceTable) -> list[str]:
    """What is said of the columns that are to choose the partitions of a table's records, if they cannot.

    :param table: with its key.
    """
    options = mapping.options(table.schema, table.name)
    outside = [name for name in options.partition_by if name not in table.key]
    if not outside or options.outbox or (options.key and not table.keyed):
        return []  # of an outbox, or a key that the options name, it is said elsewhere
    if not table.keyed:
        return [
            f"Table {table.qualified} has no key, and table_options name columns of a key by which the partitions of "
            "its records are chosen (partition_by). Give it a primary key, or take partition_by out."
        ]
    return [
        f"Column {outside[0]!r} cannot choose the partitions of {table.qualified} (partition_by of table_options): it "
        f"is not one of its key ({', '.join(table.key)}), so that the records of one key could be in two partitions, "
        "without an order, and compaction would keep one in each. Name columns of the key only; or give the table a "
        "key that has this column (primary key, or option key)."
    ]


def _unfit(mapping: TableMapping, table: SourceTable, column: Column, said: str) -> str:
    """Why a column cannot have a mask, and what can be done; empty if it can."""
    if column.name in table.key and mapping.options(table.schema, table.name).mask.get(column.name) != "hash":
        return (
            "cannot be: the column is in the key, by which the rows of the table are told apart. Take it out; or "
            "publish its hash, by a rule that names the column without wildcards."
        )
    if not masks.fits(said, column.type):
        needed = "a text, an integer or a uuid" if said == "hash" else "a text"
        return f"needs {needed}, and its type is {column.type.name}. Use null, or leave the column out."
    return ""


def _not_looked_up(connection: Connection, mapping: TableMapping, table: SourceTable) -> list[str]:
    """What is said of a table whose rows cannot be looked up, as its key is published as a hash, and may have to be.

    :param table: with all its columns.
    """
    said = mapping.options(table.schema, table.name).mask
    hashed = [name for name in table.key if said.get(name) == "hash"]
    if not hashed or table.identity == "f":
        return []
    places = mapping.left_out(table.schema, table.name, [column.name for column in table.columns])
    if not (apart := stored_apart(connection, table.without(places))):
        return []
    return [
        f"Column {hashed[0]!r} of the key of {table.qualified} is published as a hash, by which a row cannot be looked "
        f"up: the value of column {apart[0]!r} may be stored apart, and is then not sent if an update leaves it as it "
        f"was. Run: ALTER TABLE {quoted(table.schema, table.name)} REPLICA IDENTITY FULL; or leave such columns out."
    ]


def unsettled(connection: Connection, pipeline: Settings, tables: Iterable[SourceTable]) -> dict[int, str]:
    """The tables with columns that the options do not allow, see :func:`unsettled_columns`; by oid."""
    mapping = TableMapping.of(pipeline)
    options = {table.oid: mapping.options(table.schema, table.name) for table in tables}
    some = [oid for oid, each in options.items() if each.new_columns == "error" or each.rename]
    return _unsettled(mapping, catalog.load(connection, some, mapping.all_columns())) if some else {}


def _unsettled(mapping: TableMapping, whole: Iterable[SourceTable]) -> dict[int, str]:
    """See :func:`unsettled`.

    :param whole: the tables with all their columns.
    """
    found = {}
    for table in whole:
        if why := unsettled_columns(mapping, table.schema, table.name, [column.name for column in table.columns]):
            found[table.oid] = why
    return found


def unsettled_columns(mapping: TableMapping, schema: str, name: str, columns: Sequence[str]) -> str:
    """What is said of a table with columns of which no option says whether they are published, where that is an error,
    or with two that would have the same name in its records; empty if all is well.

    :param columns: the names of all columns that PostgreSQL sends.
    """
    if unnamed := mapping.unnamed(schema, name, columns):
        return (
            f"{schema}.{name} has a column {unnamed[0]!r} that neither include nor exclude names, and new_columns is "
            "error. Name it in one of them (table_options), and start again."
        )
    if (same := mapping.namesakes(schema, name, columns)) is not None:
        return (
            f"Columns {same[0]!r} and {same[1]!r} of {schema}.{name} would both be published as {same[2]!r}. Change "
            "rename in table_options, or leave one of them out, and start again."
        )
    return ""


def exposed(pipeline: Settings, known: PipelineState, today: Iterable[SourceTable]) -> dict[int, str]:
    """The tables whose columns would not be left out or masked any more, or whose keys would have other forms, since
    they have got other names; by oid.

    :param today: tables as they are published by today's options; those that the state does not know are left out.
    """
    mapping = TableMapping.of(pipeline)
    found = {}
    for table in today:
        if (before := known_as(known, table)) is None:
            continue
        pinned = known.tables.get(table.oid)
        why = exposed_now(mapping, before, table)
        if not why and pinned is not None and table.oid not in known.accepted:
            why = _other_form(pinned, table)
        if why:
            found[table.oid] = why
    return found


def known_as(known: PipelineState, table: SourceTable) -> SourceTable | None:
    """A table as it is recorded, whether it is followed or not: one that was detached from a partitioned table as its
    rows were published before, by that one's name. None if the state does not know it.

    :param table: as it is today.
    """
    if table.oid in known.tables:
        return known.tables[table.oid].table
    if table.oid in known.stopped:
        return known.stopped[table.oid]
    root = next((root for root, parts in known.partitions.items() if table.oid in parts), None)
    # a partition has numbers of its own
    return None if root is None else replace(known.tables[root].table, oid=table.oid, sent=table.sent)


def _other_form(pinned: PinnedTable, table: SourceTable) -> str:
    """What is said of a table whose key would have another form by its new name; empty if all is well.

    :param table: as it is published by today's options.
    """
    if pinned.table.qualified == table.qualified:
        return ""
    try:
        pinned.check_forms(table)
    except Refused:
        return (
            f"{table.qualified} was {pinned.table.qualified}, and by its new name table_options give its key another "
            "form, name or hash than the keys in its topic have. Put its options under the new name, and start again."
        )
    return ""


def exposed_now(mapping: TableMapping, before: SourceTable, table: SourceTable) -> str:
    """See :func:`exposed_table`.

    :param table: as the catalog has it.
    """
    columns = [column.name for column in table.columns]
    others = renames.by_number(table.sent, before.sent)
    return exposed_table(mapping, before, table.schema, table.name, columns, others)


def exposed_table(
    mapping: TableMapping,
    before: SourceTable,
    schema: str,
    name: str,
    columns: Sequence[str],
    others: renames.Names | None = None,
) -> str:
    """What is said of a table whose columns would not be left out or masked any more; empty if all is well.

    :param before: the table as it was called; it has ``schema`` and ``name`` now.
    :param columns: see :meth:`~airflow_bottledwater.encoding.mapping.TableMapping.exposes`; ``others`` as well.
    """
    if not mapping.exposes(before, schema, name, columns, others):
        return ""
    if (before.schema, before.name) == (schema, name):
        shown = mapping.exposed(before, schema, name, columns, others)[0]
        hidden = [
            each for each in (others or {})[shown] if mapping.exposed(before, schema, name, [shown], {shown: [each]})
        ]
        return (
            f"Column {shown!r} of {schema}.{name} was {' or '.join(map(repr, hidden))}, of which table_options hide "
            "more. Name it in exclude or mask, beside the name that it had, and start again; or take that one out, if "
            "it is to be shown."
        )
    if before.outbox or mapping.options(schema, name).outbox:
        return (
            f"{schema}.{name} was {before.qualified}, and only one of these names is an outbox by table_options. Put "
            "its options under the new name, and start again."
        )
    return (
        f"{schema}.{name} was {before.qualified}, for which table_options leave out rows or columns, or mask columns, "
        "and they hide less of its new name. Put its options under the new name, and start again."
    )


def check(connection: Connection, pipeline: Settings, known: PipelineState) -> None:
    """Check the options of a pipeline that exists, if they are others than at its last start: a rule that means no
    column leaves nothing out.

    :raises PreflightError: there are problems.
    :raises Refused: see :func:`check_hash_key`.
    """
    check_hash_key(pipeline, known)
    asked = pipeline.chosen().get("table_options", {})
    if known.settings is None or known.settings.get("table_options", {}) == asked:
        return
    wanted = resolve(connection, pipeline, known, pipeline.tables, pipeline.schemas, strict=False)
    today = catalog.load(connection, list(known.tables), TableMapping.of(pipeline))
    wrong = row_filters.refused(pipeline, known, today) + _unkeyed(pipeline, known, today) + _divided(known, today)
    wrong += outboxes.turned(pipeline, known, today)
    named = {*wanted, *renamed(connection, pipeline, known, set(wanted))}
    wrong += _shown(pipeline, known, [table for table in today if table.oid not in named])
    if wrong := wrong + problems(connection, pipeline, {*wanted, *known.tables}, known.tables):
        raise PreflightError(wrong)


def _shown(pipeline: Settings, known: PipelineState, unnamed: Iterable[SourceTable]) -> list[str]:
    """What is said of followed tables that the settings do not name, and of which the options would show more than at
    the last start: whoever has removed both together does not mean that.

    :param unnamed: these tables, as they are by today's options.
    """
    now = TableMapping.of(pipeline)
    before = TableMapping.of(pipeline.with_(table_options=(known.settings or {}).get("table_options", {})))
    return [
        f"{table.qualified} is still streamed although the settings do not name it any more, and table_options would "
        "show more of it than at the last start. Give it the options of before until it is not followed any more: take "
        "it out of the publication, too, and start the stream once with them; or name it, if it is to be shown."
        for table in unnamed
        if now.shows_more(before, table)
    ]


def _divided(known: PipelineState, today: Iterable[SourceTable]) -> list[str]:
    """What is said of tables whose new keys are accepted although their keys are those of before, and whose partitions
    other columns would choose: the earlier records would stay where they are.

    :param today: the tables as they are by today's options.
    """
    found = []
    for table in today:
        if table.oid not in known.accepted or not table.partition_by:
            continue
        pinned = known.tables[table.oid]
        if table.partition_by == pinned.table.partition_by:
            continue
        try:
            pinned.check_key(table)
        except Refused:
            continue
        found.append(" ".join(other_partitions(pinned.table, table.partition_by)))
    return found


def _unkeyed(pipeline: Settings, known: PipelineState, today: Iterable[SourceTable]) -> list[str]:
    """What is said of followed tables that are to get a key, and whose topics have records without one.

    :param today: the tables as they are by today's options.
    """
    mapping = TableMapping.of(pipeline)
    return [
        f"Table {table.qualified} was taken in without a key, and table_options give it one now: the records of "
        "its topic could not be told from its rows. Take key out; or drop the slot (bottledwater drop-slot --when "
        "always) and start again with a snapshot under another topic_prefix."
        for table in today
        if not known.tables[table.oid].table.keyed and mapping.options(table.schema, table.name).key
    ]


def check_hash_key(pipeline: Settings, known: PipelineState) -> None:
    """Check that values are hashed with the key of before, unless another one is meant.

    :raises Refused: it is another one.
    """
    key, before = TableMapping.of(pipeline).hash_key, known.hash_key
    version = (known.settings or {}).get("hash_key_version", SETTINGS["hash_key_version"].default)
    if key and before and key != before and pipeline.hash_key_version == version:
        raise Refused(
            f"The key of masks that are hashes is another one than at the last start (its id is {key}, that of before "
            f"is {before}): equal values would have other hashes than before.",
            "Give the key of before. If another one is meant, set hash_key_version to another number than "
            f"{version}, start again, and read the tables with hashes again.",
        )


def _by_all_names(tables: Iterable[SourceTable], followed: Mapping[int, PinnedTable]) -> list[SourceTable]:
    """These tables, and those among them that were renamed also by the names that they had: a rule for one of these is
    no mistake, as it says what the new name has to hide.

    :param followed: the tables that are recorded.
    """
    found = []
    for table in tables:
        recorded = followed[table.oid].table if table.oid in followed else table
        found.append(table)
        if recorded.qualified != table.qualified:
            found.append(replace(table, schema=recorded.schema, name=recorded.name))
    return found


def _without_match(
    mapping: TableMapping, today: Iterable[SourceTable], followed: Mapping[int, PinnedTable]
) -> list[str]:
    """The rules that match no table, or name no column of the tables that they match; also by the names that these, and
    their columns, had when they were recorded."""
    found, tables = [], _by_all_names(today, followed)
    for pattern, rule in mapping.rules.items():
        meant = [table for table in tables if describes(pattern, table.schema, table.name)]
        if not meant:
            names = [named for table in tables for named in (table.qualified, table.name)]
            found.append(f"No table of the pipeline matches {pattern!r} of table_options{_nearest(pattern, names)}.")
            continue
        of = meant[0].qualified if len(meant) == 1 else f"the {len(meant)} tables of {pattern!r}"
        columns = {column.name for table in meant for column in table.columns}
        columns |= {name for table in meant if table.oid in followed for _, name in followed[table.oid].table.sent}
        dated = {name for table in meant for name in _dated(table)}
        for option in ("include", "exclude", "mask", "rename", "temporal"):
            known = sorted(dated if option == "temporal" else columns)
            found += [
                f"No column{' with dates or times' if option == 'temporal' else ''} of {of} matches {each!r}, which "
                f"{option} of table_options names{_nearest(each, known)}."
                for each in getattr(rule, option)
                if each not in known and (option == "rename" or not any(matches([each], c) for c in known))
            ]
    return found


def _dated(table: SourceTable) -> list[str]:
    """The columns of which ``temporal`` says something."""
    return [column.name for column in table.columns if column.type.temporal]


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
