"""The product's own verification, as its users run it: by the command, and by the DAG of the watch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.state.verification import Verification
from airflow_bottledwater.verify import driver
from tests.support.topics import Flow

VERIFY = "bottledwater_verify"


def start_command(flow: Flow) -> subprocess.Popen[str]:
    """``bottledwater verify``, which waits for the stream if it does not run yet."""
    command = [
        str(Path(sys.executable).parent / "bottledwater"), "verify", "--json", "-d", flow.dsn, "-s", flow.pipeline.slot,
        "-b", flow.kafka.bootstrap, "-p", flow.pipeline.topic_prefix, "-f", flow.pipeline.format, "--master",
        "local[2]",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended_equal(process: subprocess.Popen[str]) -> Verification:
    """What the command has found, which must be that every topic is its table, and that there was something to
    compare."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    found = msgspec.json.decode(output, type=Verification)
    _check(found)
    return found


def verified_by_command(flow: Flow) -> Verification:
    """Verify with the command, while the stream runs."""
    return ended_equal(start_command(flow))


def verify_beside_a_stream(flow: Flow) -> Verification:
    """Verify with the command's driver in this process, while what is left is streamed in it: for pipelines whose job
    has ended."""
    with flow.streaming() as errors:
        flow.streams()
        found = driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    assert not errors, errors
    return found


def verified_beside_a_stream(flow: Flow) -> Verification:
    """The same, in which all topics must be equal to their tables."""
    found = verify_beside_a_stream(flow)
    _check(found)
    return found


def _check(found: Verification) -> None:
    differences = [f"{table.table}: {each}" for table in found.tables for each in table.differences]
    assert {table.table: table.verdict for table in found.tables if table.verdict != "equal"} == {}, differences
    assert found.tables and found.rows > 0


def start_watch(client: AirflowClient, conf: Mapping[str, Any]) -> str:
    """Trigger the DAG of the watch; returns the run's id."""
    client.request("PATCH", f"dags/{VERIFY}", json={"is_paused": False})
    return client.trigger(VERIFY, conf)


def watched(
    client: AirflowClient, run: str, timeout: float = 300, *, dag: str = VERIFY
) -> tuple[str, dict[str, Any], str]:
    """Wait for the end of a run of the watch; returns the task's state, its result (empty if it failed) and its log."""
    client.wait_run(dag, run, timeout)
    (task,) = client.task_instances(dag, run)
    log = client.task_log(dag, run, "verify", max(1, task["try_number"]))
    result: dict[str, Any] = {}
    if task["state"] == "success":
        path = f"dags/{dag}/dagRuns/{run}/taskInstances/verify/xcomEntries/return_value"
        result = client.request("GET", path, params={"deserialize": True})["value"]
    return task["state"], result, log


def verified_in_airflow(client: AirflowClient, conf: Mapping[str, Any]) -> dict[str, Any]:
    """Run the DAG of the watch, which must find every topic equal to its table; returns the task's result."""
    return found_equal(client, start_watch(client, conf))


def found_equal(client: AirflowClient, run: str, *, dag: str = VERIFY) -> dict[str, Any]:
    """Wait for the end of a run of the watch, which must find every topic equal to its table; returns the task's
    result."""
    state, result, log = watched(client, run, dag=dag)
    assert state == "success", log[-3000:]
    assert result["equal"] and result["rows"] > 0, result
    assert {table["verdict"] for table in result["tables"].values()} == {"equal"}
    return result


def holds_snapshot(execute: Callable[[str], list[tuple[Any, ...]]], table: str) -> bool:
    """Whether a verification holds its snapshot, and with it a lock on the table: what is committed later is not
    compared.

    :param execute: runs a statement on the source, and returns its rows.
    """
    rows = execute(
        f"SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE relation = '{table}'::regclass AND granted"
        " AND application_name = 'bottledwater snapshot holder' AND backend_xmin IS NOT NULL"
    )
    return bool(rows)
