"""Which Airflow this is: several may have pipelines in one Kafka, with DAGs and runs of the same ids."""

from __future__ import annotations

from airflow.sdk.configuration import conf

from airflow_bottledwater.model.job import Owner


def instance() -> str:
    """The id of this Airflow; empty if neither setting is there. It is read from the configuration, since tasks cannot
    ask Airflow's database."""
    named = conf.get("bottledwater", "airflow_id", fallback="") or conf.get("api", "base_url", fallback="") or ""
    return str(named).strip().rstrip("/")


def ours(owner: Owner) -> bool:
    """Whether a task is one of this Airflow, as far as that is known: where one of both has no id, it counts as one."""
    mine = instance()
    return not owner.airflow or not mine or owner.airflow == mine
