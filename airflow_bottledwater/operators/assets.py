"""The assets of a pipeline: its tables, and its topics, which change when a task has published to them.

Airflow takes inlets when the DAG is parsed, where no connection is known: so they are the tables that the description
names, by the id of the connection. Which topics there are is known only when the task runs, since tables are named by
patterns. So an operator's outlet is an alias, by the pipeline's name, to which the topics are added.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.model.changes import ChangeRange
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.rules import listed
from airflow_bottledwater.pipeline.section import templated
from airflow_bottledwater.pipeline.settings import Settings

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

#: seconds for which an outage is waited out
_PATIENCE = 60.0
#: the alias of pipelines whose name is a template, as in the ready DAGs
_ANY = "bottledwater"


def alias_of(pipeline: Mapping[str, Any] | str) -> AssetAlias:
    """The alias of all topics of a pipeline.

    :param pipeline: its nested values, or its name.
    """
    name = pipeline if isinstance(pipeline, str) else str(pipeline.get("name", _ANY))
    return AssetAlias(_ANY if templated(name) or name == _ANY else f"{_ANY}_{name}")


#: [schema.]table without patterns, in characters that the name of an asset may have
_TABLE = re.compile(r"(?:([\w$ -]+)\.)?([\w$ -]+)", re.ASCII)


def table_asset(conn_id: str, table: str) -> Asset:
    """A source table as an asset, as it is an inlet of the tasks that read it.

    :param conn_id: Airflow's connection of the source.
    :param table: ``schema.table``.
    """
    schema, _, name = table.rpartition(".")
    return Asset(name=f"{conn_id}/{table}", uri=f"x-postgres://{conn_id}/{quote(schema)}/{quote(name)}")


def inlets_of(pipeline: Mapping[str, Any] | str, tables: Any = None) -> list[Asset]:
    """The tables that a task reads, as far as that is known when the DAG is parsed: those that are named, without
    patterns and templates. A pipeline that is given by its name only has none.

    :param pipeline: its nested values, or its name.
    :param tables: those that the task reads; None for all of the pipeline.
    """
    if isinstance(pipeline, str):
        return []
    source = Description.of(pipeline).source
    tables = source.tables if tables is None else tables
    if templated(source.conn_id) or templated(tables):
        return []
    found = [match for each in listed(tables) if (match := _TABLE.fullmatch(each))]
    # the host of an address, in which a connection's id may not have all characters
    if not re.fullmatch(r"[A-Za-z0-9._-]+", source.conn_id):
        return []
    return [table_asset(source.conn_id, f"{schema or 'public'}.{name}") for schema, name in (m.groups() for m in found)]


def topic_uri(pipeline: Settings, topic: str) -> str:
    """The address of a topic as the Kafka provider's assets have it."""
    return f"kafka://{pipeline.first_broker}/{topic}"


class AssetEvents:
    """Tells Airflow what a task has published. A task must not succeed without its events, since no later one tells
    them: so each of these methods raises what keeps it from knowing them.

    :param outlets: the task's, of which one is the pipeline's alias.
    """

    def __init__(self, context: Mapping[str, Any], outlets: list[Any], pipeline: Settings) -> None:
        self._events = context.get("outlet_events")
        self._alias = next((each for each in outlets if isinstance(each, AssetAlias)), None)
        self._pipeline = pipeline

    def tell(self, topic: str, **extra: Any) -> None:
        """A topic has changed.

        :param extra: of the event, as JSON values.
        """
        if self._events is None or self._alias is None:
            return
        uri = topic_uri(self._pipeline, topic)
        self._events[self._alias].add(Asset(uri), extra={"topic": topic, **extra})

    def snapshot(self) -> dict[str, int]:
        """The rows of the pipeline's snapshot, by table. Returns how many each topic has got.

        :raises Outage: Kafka does not answer.
        """
        from airflow_bottledwater.jobs import status

        known = _known(lambda: status.known(self._pipeline))
        # the topics that rows of an outbox choose are not known, only what chooses them
        tables = [each for each in status.tables(known) if "{" not in each.topic]
        for table in tables:
            self.tell(table.topic, table=table.table, by="snapshot", rows=table.rows, to=table.insert_lsn)
        return {table.topic: table.rows for table in tables}

    def begin(self) -> dict[str, Any]:
        """Where the pipeline is, as JSON values for the task's state; or where it was when a verification has begun to
        publish in place of a bounded run, which tells nothing.

        :raises StateError: there is no such pipeline.
        :raises Outage: the source or Kafka does not answer, or a transaction stays open.
        """
        from airflow_bottledwater.jobs import changes
        from airflow_bottledwater.provision import live

        if self._events is None:
            return {}
        found = _known(lambda: changes.untold(self._pipeline, live.name_of(self._pipeline)) or self._since(None))
        return found.as_event()

    def begun(self) -> None:
        """A job is submitted, and the task's state has where a bounded run begins: no later run tells that, too, unless
        a server does not answer now. Behind a stream that runs on, which tells nothing, it would be told with all that
        this has published."""
        from airflow_bottledwater.jobs import changes
        from airflow_bottledwater.provision import live

        if self._events is None:
            return
        try:
            changes.take_untold(self._pipeline, live.name_of(self._pipeline))
        except BottledWaterError as error:
            log.warning("What a verification has published may be told again by the next bounded run: %s", error)

    def stream(self, begun: Mapping[str, Any] | None) -> None:
        """The changes of a bounded run, by table.

        :param begun: where it has begun, as :meth:`begin` gives it.
        :raises StateError: there is no such pipeline any more.
        :raises Outage: the source or Kafka does not answer, or a transaction stays open.
        """
        if self._events is None or not begun:
            return
        found = _known(lambda: self._since(ChangeRange.of_event(begun)))
        for table, each in found.tables.items():
            if each.records:
                payload = dataclasses.replace(found, tables={table: each}).as_event()
                self.tell(each.topic, table=table, by="stream", rows=each.records, payload=payload)

    def _since(self, begun: ChangeRange | None) -> ChangeRange:
        from airflow_bottledwater.jobs import changes
        from airflow_bottledwater.provision import live

        return changes.present(self._pipeline, live.name_of(self._pipeline), begun)

    def backfill(self, report: Mapping[str, Any]) -> None:
        """The rows of a live snapshot.

        :param report: the task's result.
        :raises Outage: the source or Kafka does not answer.
        """
        from airflow_bottledwater.jobs import changes
        from airflow_bottledwater.kafka.topics import Topics
        from airflow_bottledwater.provision import live

        def topics() -> Mapping[str, changes.FollowedTopic]:
            name, described = live.name_of(self._pipeline), Topics(self._pipeline.kafka)
            return changes.topics_of(self._pipeline, name, report["tables"], described)

        if self._events is None:
            return
        for table, topic in _known(topics).items():
            counts = {"rows": report["rows"], "tables": report["tables"], "to": report["boundary"]}
            self.tell(topic.name, table=table, by="backfill", **counts)


def _known(ask: Callable[[], _Found]) -> _Found:
    """What a server says. An outage is waited out for a minute, since the task may have no retry."""
    backoff = Backoff(
        _PATIENCE, report=functools.partial(log.warning, "The assets of the topics are told in a moment: %s")
    )
    while True:
        try:
            return ask()
        except Outage as error:
            why = error
        try:
            backoff.wait(why)
        except Outage:
            raise Outage(
                f"The assets of the topics cannot be told what this task publishes: {why}",
                "What is published stays. A retry tells all of it; if there is none, clear the task when the outage is "
                "over.",
            ) from None
