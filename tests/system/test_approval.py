"""A slot that is dropped only when a person has approved it, in a real Airflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.local.airflow import AirflowStack
from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from tests.support.describing import described
from tests.support.topics import Flow
from tests.support.waiting import until

pytestmark = pytest.mark.long

DAG_FILE = """
from airflow.sdk import DAG
from airflow_bottledwater.operators.approval import DropReplicationSlotApprovalOperator
from airflow.providers.standard.operators.empty import EmptyOperator

with DAG("asks", schedule=None, is_paused_upon_creation=False) as dag:
    begin = EmptyOperator(task_id="begin")
    drop = DropReplicationSlotApprovalOperator(task_id="drop", pipeline={pipeline!r}, when="always")
    begin >> drop.as_teardown(setups=begin.as_setup())
"""


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None, tables="a", skip_snapshot=True)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    made.create()
    made.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 100000) g")
    return made


@pytest.fixture
def stack(flow: Flow, postgres: PostgresServer, tmp_path: Path) -> Iterator[AirflowStack]:
    dsn = conninfo_to_dict(flow.dsn)
    connections = {
        "POSTGRES_DEFAULT": {
            "conn_type": "postgres", "host": dsn["host"], "port": int(dsn["port"]), "login": dsn["user"],
            "schema": dsn["dbname"],
        },
        "KAFKA_DEFAULT": {"conn_type": "kafka", "extra": flow.pipeline.kafka},
    }  # fmt: skip
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "asks.py").write_text(DAG_FILE.format(pipeline=described(flow.pipeline).as_dict()))
    postgres.createdb("asking")
    env = {f"AIRFLOW_CONN_{name}": json.dumps(value) for name, value in connections.items()}
    with AirflowStack(
        tmp_path / "airflow", dags_folder=tmp_path / "dags", metadata_dsn=postgres.url("asking"), env=env
    ) as made:
        made.client().wait_for_dag("asks", 300)
        yield made


@pytest.fixture
def client(stack: AirflowStack) -> AirflowClient:
    return stack.client()


def asked(stack: AirflowStack, client: AirflowClient, run_id: str) -> dict[str, Any]:
    """What a run asks, once it may be answered: Airflow's scheduler takes the end of the process that has asked for the
    end of the task if it learns of it only after the answer, which a busy machine can delay by many seconds."""
    log = stack.components["scheduler"].log_path

    def parked() -> bool:
        ended = [line for line in log.read_text().splitlines() if "TaskInstance Finished: " in line]
        return any(f"task_id=drop, run_id={run_id}," in line and "state=awaiting_input" in line for line in ended)

    until(parked, "it asks", 300, pause=0.5)
    return client.request("GET", f"dags/asks/dagRuns/{run_id}/taskInstances/drop/-1/hitlDetails")


def respond(client: AirflowClient, run_id: str, option: str) -> str:
    body = {"chosen_options": [option], "params_input": {}}
    client.request("PATCH", f"dags/asks/dagRuns/{run_id}/taskInstances/drop/-1/hitlDetails", json=body)
    client.wait_run("asks", run_id, 300)
    return str(next(t["state"] for t in client.task_instances("asks", run_id) if t["task_id"] == "drop"))


def test_a_slot_is_dropped_when_that_is_approved(flow: Flow, stack: AirflowStack, client: AirflowClient) -> None:
    slots = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{flow.pipeline.slot}'"
    run_id = client.trigger("asks")
    detail = asked(stack, client, run_id)
    assert detail["subject"] == "Drop the replication slot?" and "MB of WAL that are not published" in detail["body"]
    assert respond(client, run_id, "Reject") == "skipped" and flow.execute(slots)
    run_id = client.trigger("asks")
    asked(stack, client, run_id)
    assert respond(client, run_id, "Approve") == "success" and not flow.execute(slots)
    # there is nothing to be dropped any more, and nobody is asked
    run_id = client.trigger("asks")
    assert client.wait_run("asks", run_id, 300)["state"] == "success"
