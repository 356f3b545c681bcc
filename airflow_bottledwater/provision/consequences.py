"""What something that takes something away will do, in numbers, for a person who is asked whether it may be done."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.pipeline.rules import refuse_none, selected
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.pressure import drop_cost
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision.drop import keeps, kept_letters
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.state.identity import resolve
from airflow_bottledwater.state.letters import are_open

#: what becomes of tables that are read again with a sweep
_SWEPT = {
    "snapshot": "Read again",
    "resume_table": "Taken up again, with all of their rows",
    "accept_new_keys": "Given keys of other bytes, under which all rows are published again",
}


def of_drop(pipeline: Settings, when: str) -> str:
    """What dropping the slot costs; empty if it is kept, or there is nothing to be dropped.

    :param when: see :func:`airflow_bottledwater.provision.drop.drop`.
    :raises StateError: the saved state is another cluster's.
    """
    with session(pipeline.postgres, f"Reading slot {pipeline.slot!r}") as connection:
        cluster = identify(connection)
        found, known = slot.state(connection, pipeline.slot), read_own(pipeline, cluster)
        whole = cluster.pipeline(pipeline.slot)
        shared = control_topic.read(pipeline.kafka)
        if keeps(when, shared, whole, known.claim) or (found is None and not known.tables):
            return ""
        cost = str(drop_cost(connection, pipeline.slot, known.tables))
    name = f"Slot {pipeline.slot!r} of database {cluster.database!r}"
    if count := sum(each.open for each in kept_letters(pipeline, known, whole).values()):
        cost += (
            f" {are_open(count)}, and {'stays' if count == 1 else 'stay'} so: a pipeline that is made with this slot "
            "name and this topic_prefix can re-drive them."
        )
    if found is None:
        return f"{name} is gone already; its saved state is deleted. {cost}"
    lost = " PostgreSQL has invalidated it already." if found.wal_status == "lost" else ""
    return f"{name} is dropped, with its publications and its saved state.{lost} {cost} Topics keep their records."


def of_action(pipeline: Settings, action: str, tables: Sequence[str] | str | None, *, sweep: bool) -> str:
    """What an action takes away; empty if nothing.

    :param action: one of :data:`airflow_bottledwater.operators.control.ACTIONS`.
    :param tables: the patterns of the tables that it is about.
    :param sweep: whether ``snapshot`` removes keys.
    :raises SettingError: no table is named, and the action needs one.
    :raises PreflightError: a pattern matches nothing.
    """
    if action in ("retire", "drop_slot"):
        said = of_drop(pipeline, "always")
        return f"The stream ends for good, and its DAG drops the slot. {said}" if said and action == "retire" else said
    if action == "dismiss":
        return _dismissed(pipeline, selected(tables))
    if action not in _SWEPT or (action == "snapshot" and not sweep):
        return ""
    tables = selected(tables)
    refuse_none(tables)
    with session(pipeline.postgres, "Looking at the tables") as connection:
        known = read_own(pipeline, identify(connection))
        oids = [oid for oid in resolve(connection, pipeline, known, tables) if oid in known.tables]
        found = drop_cost(connection, pipeline.slot, oids)
    names = ", ".join(sorted(known.tables[oid].table.qualified for oid in oids)[:10])
    return (
        f"{_SWEPT[action]}: {found.counted} ({found.sized}: {names}{', …' if len(oids) > 10 else ''}). Then each key "
        "that a topic has and its table has not gets a tombstone: how many that are, only the sweep itself finds out."
    )


def _dismissed(pipeline: Settings, tables: Sequence[str]) -> str:
    with session(pipeline.postgres, "Looking at the dead letters") as connection:
        known = read_own(pipeline, identify(connection))
    if not (count := known.counters["open_dead_letters"]):
        return ""
    of = f"Those of the tables {', '.join(tables)} among the" if tables else "All"
    return f"{of} {count:,} open dead letters are given up: their rows are missing in the topics from then on."
