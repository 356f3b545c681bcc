"""Takes tables in that were created after a pipeline's slot, when its stream starts: they are published from then on, and their rows
are read by a live snapshot."""

from __future__ import annotations

import logging
import threading
import uuid

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection, identify, session
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import coverage, store
from airflow_bottledwater.state.identity import via_root
from airflow_bottledwater.state.pipeline_state import PipelineState

log = logging.getLogger(__name__)


def take_in(pipeline: Pipeline, stopped: threading.Event | None = None) -> tuple[str, ...]:
    """Take in the tables that the settings cover and the pipeline does not follow yet; returns the names of those that could not be. It
    does nothing before the first snapshot is complete, and unless ``new_tables`` is add.

    :raises Outage: the source or Kafka does not answer.
    """
    if pipeline.new_tables != "add":
        return ()
    with session(pipeline.postgres, "Looking for new tables", application="bottledwater new tables") as connection:
        cluster = identify(connection)
        topic = store.state_topic_name(cluster.database, pipeline.slot)
        # uncommitted, too: a job that died may have left a transaction open, which ends with the claim that follows, and that must not be
        # waited for; what is written is decided by the state that is read behind a claim
        known = PipelineState(store.read_records(pipeline.kafka, topic, committed=False))
        if known.slot is None or known.system_identifier != cluster.system_identifier or not known.complete:
            return ()
        names = coverage.unfollowed(connection, pipeline, known)
        if not names:
            return ()
        if known.position is not None and known.position.ordinal:
            log.info("%s: taken in when the large transaction at %s is published.", ", ".join(names), known.position)
            return ()
        if problem := _unfit(connection, pipeline, names, as_one=via_root(pipeline, known)):
            log.warning("%s", problem)
            return tuple(names)
    try:
        # no stopped snapshot is needed: their rows come by a live one, which is recorded together with them
        create(pipeline.with_(skip_snapshot=True), stopped=stopped, live=uuid.uuid4().hex[:12])
    except BottledWaterError as error:
        if transient(error):
            raise
        log.warning("%s: created since, and not followed: %s", ", ".join(names), error)
        return tuple(names)
    log.info("%s: taken in; their rows are read while the stream runs.", ", ".join(names))
    return ()


def _unfit(connection: Connection, pipeline: Pipeline, names: list[str], *, as_one: bool) -> str:
    """Why tables cannot be read while the stream runs, as a sentence; empty if they can.

    :param as_one: whether partitioned tables are published as one.
    """
    oids = catalog.resolve(connection, names, (), via_root=as_one)
    unkeyed = [table.qualified for table in catalog.load(connection, oids, forms=pipeline.forms) if not table.keyed]
    if not unkeyed:
        return ""
    return (
        f"{', '.join(unkeyed)}: created since the slot was, and not followed. Without a key, their rows can only be read while the stream "
        "does not run: stop it, then run create_slot and the snapshot again (or start the command again)."
    )
