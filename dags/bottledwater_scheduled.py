"""Publish every few minutes what was committed since, instead of streaming continuously. Live snapshots that wait are taken, too.

Prerequisite: the DAG ``bottledwater`` has created the slot and taken the snapshot (run it with the choice *Bounded*), and its stream
does not run.
"""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG

from airflow_bottledwater.operators.stream import StreamToKafkaOperator

with DAG(
    dag_id="bottledwater_scheduled",
    description="PostgreSQL to Kafka every five minutes",
    doc_md=__doc__,
    schedule="*/5 * * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    # unpause it when the pipeline exists
    is_paused_upon_creation=True,
    # a slot has one reader: a run that takes longer than the interval delays the next one
    max_active_runs=1,
    tags=["cdc", "postgresql", "kafka"],
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
):
    StreamToKafkaOperator(
        task_id="stream",
        slot="{{ var.value.get('bottledwater_slot', 'bottledwater') }}",
        output_format="{{ var.value.get('bottledwater_format', 'avro') }}",
        bounded=True,
    )
