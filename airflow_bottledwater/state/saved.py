"""The settings of a pipeline as its saved state has them: whoever comes after the creation of the slot need not give them again."""

from __future__ import annotations

import logging
from collections.abc import Collection

from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.settings import SETTINGS, Pipeline
from airflow_bottledwater.state.claim import Claim, read_state
from airflow_bottledwater.state.identity import check_cluster
from airflow_bottledwater.state.records import SAVED_SETTINGS, SavedSettings
from airflow_bottledwater.state.store import state_topic_name

log = logging.getLogger(__name__)


def remember(pipeline: Pipeline, claim: Claim) -> None:
    """Save the settings with which the pipeline starts, if they are not those of its last start."""
    before, now = claim.state.settings, pipeline.chosen()
    if before == now:
        return
    for name in sorted(before.keys() | now.keys()) if before is not None else ():
        was, now_is = (values.get(name, SETTINGS[name].default) for values in (before or {}, now))
        if name in SETTINGS and was != now_is:
            log.info("Setting %s is %r now; at the last start it was %r.", name, now_is, was)
    claim.write({SAVED_SETTINGS: SavedSettings(now)})


def completed(pipeline: Pipeline, given: Collection[str]) -> Pipeline:
    """A pipeline with the settings of its last start, but for those that are given; unchanged if there is no such pipeline.

    :param pipeline: has at least the slot's name and the connections.
    :param given: the names of the settings that are not taken from the saved state.
    :raises Outage: PostgreSQL or Kafka does not answer.
    :raises StateError: the state is another cluster's, or malformed.
    """
    with session(pipeline.postgres, "Reading the pipeline's settings") as connection:
        cluster = identify(connection)
    topic = state_topic_name(cluster.database, pipeline.slot)
    known = read_state(pipeline, topic)
    check_cluster(known, cluster, topic)
    values = {name: value for name, value in (known.settings or {}).items() if name not in given}
    return pipeline.with_(**values) if values else pipeline
