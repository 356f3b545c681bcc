"""The settings of a pipeline as its saved state has them: whoever comes after the creation of the slot need not give
them again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused, StateError
from airflow_bottledwater.pipeline.groups import TypeSettings
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import SAVED_SETTINGS, SavedSettings, StateRecord

log = logging.getLogger(__name__)

#: the settings that each verification has of its own
_OF_EACH_USE = {name for name, setting in SETTINGS.items() if setting.changes == "at each use"}
#: the settings that say which rows of a table its topic has, and how their values are written there
_OF_ROWS = ("table_options", "hash_key_version", *(each.name for each in fields(TypeSettings)))
#: the options of a table that say nothing of that
_NOT_OF_ROWS = {"partitions", "topic_config", "on_error"}


def changed(pipeline: Settings, known: PipelineState) -> dict[str, StateRecord | None]:
    """The record of the settings with which the pipeline starts; none if they are those of its last start. The next
    start is compared with it, so it is written only by who has compared these settings with those of before
    (:func:`airflow_bottledwater.state.options.check`), and has carried them out."""
    before, now = known.settings, pipeline.chosen()
    # a start without the key, which hashes nothing, leaves that of before
    key = TableMapping.of(pipeline).hash_key or known.hash_key
    if before == now and key == known.hash_key:
        return {}
    for name in sorted(before.keys() | now.keys()) if before is not None else ():
        if name not in SETTINGS:
            continue  # another version's
        was, now_is = (values.get(name, SETTINGS[name].default) for values in (before or {}, now))
        if was != now_is:
            log.info("Setting %s is %r now; at the last start it was %r.", name, now_is, was)
    return {SAVED_SETTINGS: SavedSettings(now, key)}


def check_started(pipeline: Settings, known: PipelineState) -> None:
    """Check that the settings for rows are those with which the stream has started: under others, its topics would not
    have what they say.

    :raises Refused: one is another.
    """
    now = pipeline.chosen()
    for name in _OF_ROWS if known.settings is not None else ():
        was, asked = (values.get(name, SETTINGS[name].default) for values in (known.settings or {}, now))
        if was == asked or (name == "table_options" and _alike(was, asked, known)):
            continue
        if isinstance(was, dict):
            patterns = [each for each in {**was, **asked} if was.get(each) != asked.get(each)]
            was, asked = ({each: values[each] for each in patterns if each in values} for values in (was, asked))
        raise Refused(
            f"The stream has not started with {name} = {asked}: at its last start it was {was}, and its topics have "
            "what that says.",
            "Start the stream with the new settings first (in Airflow, clear its task); or give the settings of its "
            "last start, which are in its saved state: leave them out, with the pipeline's name and connections only.",
        )


def _alike(was: Mapping[str, Any], asked: Mapping[str, Any], known: PipelineState) -> bool:
    """Whether two values of ``table_options`` say the same of the rows of all tables that the pipeline has."""

    def of_rows(values: Mapping[str, Any]) -> list[Any]:
        rules = {pattern: Table.of(options) for pattern, options in values.items()}
        found = [Table.of_table(rules, each.table.schema, each.table.name) for each in known.tables.values()]
        names = [each.name for each in fields(Table) if each.name not in _NOT_OF_ROWS]
        return [getattr(options, name) for options in found for name in names]

    return of_rows(was) == of_rows(asked)


def settings_of(pipeline: Settings) -> dict[str, Any]:
    """The settings of a pipeline's last start that differ from the defaults, by name; but for those that each use has
    of its own.

    :param pipeline: has at least the slot's name and the connections.
    :raises Outage: PostgreSQL or Kafka does not answer.
    :raises StateError: there is no such pipeline; or the state is another cluster's, malformed, or another version's.
    """
    found = _saved(pipeline)
    if found is None:
        raise StateError(
            f"There is no pipeline {pipeline.slot!r} in this database whose settings could be read.",
            "Create it first (bottledwater, or the task create_slot), or give its description instead of its name.",
        )
    return found


def completed(pipeline: Settings, given: Collection[str], *, exists: bool = False) -> Settings:
    """A pipeline with the settings of its last start (see :func:`settings_of`), but for those that are given; unchanged
    if there is no such pipeline.

    :param pipeline: has at least the slot's name and the connections.
    :param given: the names of the settings that are not taken from the saved state.
    :param exists: that there is no such pipeline is an error.
    :raises Outage: PostgreSQL or Kafka does not answer.
    :raises StateError: the state is another cluster's, or malformed; or there must be one, and there is none.
    """
    found = settings_of(pipeline) if exists else _saved(pipeline) or {}
    values = {name: value for name, value in found.items() if name not in given}
    return pipeline.with_(**values) if values else pipeline


def _saved(pipeline: Settings) -> dict[str, Any] | None:
    with session(pipeline.postgres, "Reading the pipeline's settings") as connection:
        cluster = identify(connection)
    found = read_own(pipeline, cluster).settings
    if found is None:
        return None
    if unknown := found.keys() - SETTINGS.keys():
        raise StateError(
            f"The saved settings of pipeline {pipeline.slot!r} have {min(unknown)!r}, which this version does not "
            "know. They were written by another version of the provider.",
            "Install that one here, too. If this version is to take its place, start the stream once with all settings "
            "given, not by its name only.",
        )
    return {name: value for name, value in found.items() if name not in _OF_EACH_USE}
