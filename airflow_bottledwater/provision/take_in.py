"""Takes tables in that were created after a pipeline's slot, when its stream starts: they are published from then on, and their rows
are read by a live snapshot."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from airflow_bottledwater.errors import BottledWaterError, StopRequested, TakenOver
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import coverage
from airflow_bottledwater.state.pipeline_state import PipelineState

log = logging.getLogger(__name__)


def new_tables(connection: Connection, pipeline: Pipeline, known: PipelineState) -> dict[int, str]:
    """The tables that are to be taken in, with their names: none before the first snapshot is complete, inside a large transaction, and
    unless ``new_tables`` is add.

    :param known: the state behind a claim.
    """
    if pipeline.new_tables != "add" or known.slot is None or not known.complete:
        return {}
    new = coverage.unfollowed(connection, pipeline, known)
    if new and known.position is not None and known.position.ordinal:
        log.info("%s: taken in when the large transaction at %s is published.", ", ".join(new.values()), known.position)
        return {}
    return new


def take_in(connection: Connection, pipeline: Pipeline, new: Mapping[int, str]) -> frozenset[int]:
    """Take in new tables, under claims of its own; returns the oids of those that could not be, of which the log says why, one by one.

    :param new: the result of :func:`new_tables`.
    :raises Outage: the source or Kafka does not answer.
    :raises TakenOver: another job has claimed the slot.
    """
    unkeyed = {table.oid for table in catalog.load(connection, list(new), forms=pipeline.forms) if not table.keyed}
    for oid in unkeyed:
        log.warning(
            "%s: created since the slot was, and not followed. Without a key, its rows can only be read while the stream does not run: "
            "stop it, then run create_slot and the snapshot again (or start the command again).",
            new[oid],
        )
    return frozenset(unkeyed) | _take(pipeline, {oid: name for oid, name in new.items() if oid not in unkeyed})


def _take(pipeline: Pipeline, new: Mapping[int, str]) -> frozenset[int]:
    """Take in tables together, if that can be done; otherwise one half after the other, so that only what is unfit is left out."""
    if not new:
        return frozenset()
    try:
        # no stopped snapshot is needed: their rows come by live ones, which are recorded together with them
        create(pipeline.with_(skip_snapshot=True), live=True, adding=frozenset(new))
    except BottledWaterError as error:
        if transient(error) or isinstance(error, TakenOver | StopRequested):
            raise
        if len(new) == 1:
            log.warning("%s: created since the slot was, and not followed: %s", *new.values(), error)
            return frozenset(new)
        each, half = list(new.items()), len(new) // 2
        return _take(pipeline, dict(each[:half])) | _take(pipeline, dict(each[half:]))
    log.info("%s: taken in; the rows that are there already are read while the stream runs.", ", ".join(new.values()))
    return frozenset()
