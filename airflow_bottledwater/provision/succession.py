"""Gives the topics of dropped tables to those that were created under their names, without stopping the stream for long.

A topic passes to its heir behind the last change of the dropped table: what that was, is known when the heir is seen first, since the table
was dropped before. Then the heir is taken up as :mod:`airflow_bottledwater.provision.renew` does it, with a live snapshot and a sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from airflow_bottledwater.errors import BottledWaterError, StopRequested, TakenOver
from airflow_bottledwater.model.heir import Heir
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.server import end_of_wal
from airflow_bottledwater.provision import renew
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import heirs
from airflow_bottledwater.state.records import StateRecord, heir_key

log = logging.getLogger(__name__)


def note(connection: Connection, pipeline: Pipeline, claim: Claim, new: Mapping[int, str]) -> None:
    """Record which new tables are heirs, and up to where the changes of the dropped tables reach.

    :param new: the tables that are to be taken in, with their names.
    """
    known = claim.state
    found = heirs(connection, known, catalog.names(connection, list(new)), pipeline.topic_prefix) if new else set()
    if found == known.heirs.keys():
        return
    lsn = end_of_wal(connection)
    changes: dict[str, StateRecord | None] = {heir_key(oid): None for oid in known.heirs.keys() - found}
    for oid in found - known.heirs.keys():
        log.info(
            "%s: created under the name of a table that was dropped, whose last changes are published first.", new[oid]
        )
        changes[heir_key(oid)] = Heir(new[oid], lsn)
    claim.write(changes)


def take_up(pipeline: Pipeline, due: Mapping[int, Heir]) -> frozenset[int]:
    """Take heirs up, under claims of their own; returns the oids of those that could not be, of which the log says why.

    :param due: those whose predecessors' changes are all published.
    :raises Outage: the source or Kafka does not answer.
    :raises TakenOver: another job has claimed the slot.
    """
    left = set()
    for oid, heir in due.items():
        try:
            renew.inherit(pipeline, oid)
        except BottledWaterError as error:
            if transient(error) or isinstance(error, TakenOver | StopRequested):
                raise
            log.warning(
                "%s: created under the name of a table that was dropped, and not followed: %s", heir.name, error
            )
            left.add(oid)
    return frozenset(left)
