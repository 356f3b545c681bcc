"""Takes tables in that were created after a pipeline's slot, when its stream starts: they are published from then on, and their rows
are read by a live snapshot."""

from __future__ import annotations

import logging
import uuid

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import coverage
from airflow_bottledwater.state.identity import resolve
from airflow_bottledwater.state.pipeline_state import PipelineState

log = logging.getLogger(__name__)


def new_tables(connection: Connection, pipeline: Pipeline, known: PipelineState) -> list[str]:
    """The names of the tables that are to be taken in: none before the first snapshot is complete, inside a large transaction, and unless
    ``new_tables`` is add.

    :param known: the state behind a claim.
    """
    if pipeline.new_tables != "add" or known.slot is None or not known.complete:
        return []
    names = coverage.unfollowed(connection, pipeline, known)
    if names and known.position is not None and known.position.ordinal:
        log.info("%s: taken in when the large transaction at %s is published.", ", ".join(names), known.position)
        return []
    return names


def take_in(connection: Connection, pipeline: Pipeline, known: PipelineState, names: list[str]) -> tuple[str, ...]:
    """Take in new tables, under a claim of its own; returns the names of those that could not be.

    :param names: the result of :func:`new_tables`.
    :raises Outage: the source or Kafka does not answer.
    """
    if problem := _unfit(connection, pipeline, known, names):
        log.warning("%s", problem)
        return tuple(names)
    try:
        # no stopped snapshot is needed: their rows come by a live one, which is recorded together with them
        create(pipeline.with_(skip_snapshot=True), live=uuid.uuid4().hex[:12])
    except BottledWaterError as error:
        if transient(error):
            raise
        log.warning("%s: created since, and not followed: %s", ", ".join(names), error)
        return tuple(names)
    log.info("%s: taken in; their rows are read while the stream runs.", ", ".join(names))
    return ()


def _unfit(connection: Connection, pipeline: Pipeline, known: PipelineState, names: list[str]) -> str:
    """Why tables cannot be read while the stream runs, as a sentence; empty if they can."""
    oids = resolve(connection, pipeline, known, names)
    unkeyed = [table.qualified for table in catalog.load(connection, oids, forms=pipeline.forms) if not table.keyed]
    if not unkeyed:
        return ""
    return (
        f"{', '.join(unkeyed)}: created since the slot was, and not followed. Without a key, their rows can only be read while the stream "
        "does not run: stop it, then run create_slot and the snapshot again (or start the command again)."
    )
