"""Accepts, on a person's request, that the keys in a table's topic become other bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Refused, StateError
from airflow_bottledwater.pipeline.rules import refuse_none
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision.beside import refuse_beside_job
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import resolve
from airflow_bottledwater.state.records import Gap, gap_key


def accept(pipeline: Settings, tables: Sequence[str]) -> list[str]:
    """Record that the keys of these tables may become others, because their schema ids are lost for good, or because a
    setting gives them another form. The next job publishes none of the tables' changes under the old keys, records the
    tables anew, and reads all of their rows with a sweep; a table that is paused or set aside stays so, and that is
    done when it goes on. Returns their names.

    :param tables: patterns, as in the setting ``tables``.
    :raises SettingError: no table is named.
    :raises PreflightError: a pattern matches nothing.
    :raises StateError: the pipeline's job is alive, or the first snapshot is not complete.
    :raises Refused: a table is not followed, or has no key.
    """
    refuse_none(tables)
    with session(pipeline.postgres, "Accepting new keys") as connection:
        cluster = identify(connection)
        refuse_beside_job(pipeline, cluster)
        claim = Claim(pipeline, cluster, "accept", Backoff(pipeline.outage_timeout))
        try:
            known = claim.state
            if not known.complete:
                raise StateError(
                    f"The snapshot of slot {pipeline.slot!r} is not complete: there are no keys yet.",
                    "Drop the slot (bottledwater drop-slot --when always) and start again.",
                )
            wanted = resolve(connection, pipeline, known, tables)
            named = {oid: known.tables[oid].table.qualified for oid in wanted if oid in known.tables}
            if refused := [oid for oid in wanted if oid not in named or not known.tables[oid].table.keyed]:
                raise Refused(
                    f"{len(refused)} of the tables are not followed, or have no key: "
                    f"{', '.join(named.get(oid, f'oid {oid}') for oid in refused[:5])}.",
                    "Name the others; 'bottledwater status' shows them.",
                )
            new = Gap("gets keys of other bytes, which were accepted")
            # one that is held stays so, and what a topic lacks already stays the reason
            claim.write({gap_key(oid): replace(known.gaps.get(oid, new), accepted=True) for oid in named})
            return sorted(named.values())
        finally:
            claim.close()
