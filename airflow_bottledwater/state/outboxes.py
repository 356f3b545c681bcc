"""Outboxes: tables whose rows, and prefixes whose messages, are published as the records that they describe. Here, what
their options must be: their topics are nobody else's, and their columns exist and can become keys, values and
headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from airflow_bottledwater.encoding import outbox
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.pipeline_state import PipelineState


def problems(mapping: TableMapping, table: SourceTable) -> list[str]:
    """What is wrong with the options of an outbox.

    :param table: with all its columns.
    """
    if mapping.options(table.schema, table.name).key:
        return [f"{table.qualified} is an outbox, whose rows have no key: take key out of table_options."]
    if mapping.options(table.schema, table.name).partition_by:
        return [
            f"{table.qualified} is an outbox, whose records are in the partitions that outbox_key chooses: take "
            "partition_by out of table_options."
        ]
    columns = [column.name for column in table.columns]
    hidden = {columns[place] for place in mapping.left_out(table.schema, table.name, columns)}
    published = [column for column in table.columns if column.name not in hidden]
    try:
        outbox.plan(mapping, table, mapping.route(table), tuple(published))
    except outbox.NoOutbox as error:
        return [f"{table.qualified} cannot be an outbox: {error} (table_options)."]
    if table.partitioned:
        return [f"{table.qualified} cannot be an outbox: it is partitioned. Use a table without partitions."]
    return []


def turned(pipeline: Settings, known: PipelineState, today: Iterable[SourceTable]) -> list[str]:
    """What is said of tables that would be outboxes from now on, or none any more, or to which the options give other
    topics than at the last start; one that was renamed keeps those that it has.

    :param today: as they are by today's options.
    """
    mapping, options = TableMapping.of(pipeline), (known.settings or {}).get("table_options", {})
    earlier = TableMapping.of(pipeline.with_(table_options=options))
    found = []
    for table in today:
        if (pinned := known.tables.get(table.oid)) is None:
            continue
        before = pinned.topic if pinned.table.outbox else "none"
        now = mapping.route(table) if table.outbox else "none"
        if now not in (before, earlier.route(table) if pinned.table.outbox else before):
            found.append(
                f"The outbox of {table.qualified} is {before}, and by table_options it would be {now} now. Set outbox "
                "back; or make another pipeline for the table, with a slot of its own."
            )
    return found


def in_the_way(mapping: TableMapping, outboxes: Mapping[str, SourceTable], topics: Sequence[str]) -> list[str]:
    """Which topics the records of outboxes could go to although they are somebody else's.

    :param outboxes: the tables by their topics, see :meth:`TableMapping.route`; those of messages are the mapping's.
    :param topics: those of other tables, and the pipeline's own.
    """
    found = []
    routes = {f"outbox {table.qualified}": (of, "outbox (table_options)") for of, table in outboxes.items()}
    routes |= {f"messages (to {route!r})": (route, "messages") for route in mapping.message_routes}
    for whose, (route, setting) in routes.items():
        written = re.compile(outbox.pattern_of(route))
        found += [
            f"The records of {whose} go to {route!r}, and {name!r} is another topic of the pipeline. "
            f"Give {setting} a name that no other topic begins with."
            for name in topics
            if written.fullmatch(name)
        ]
    return found
