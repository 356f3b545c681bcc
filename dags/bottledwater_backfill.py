"""Publish rows of a table again, one slice by day for each run: for scheduled backfills, ``airflow backfill create``, and the choice
*Backfill* of the trigger dialog.

Prerequisite: a pipeline (the DAG ``bottledwater``, or the command) whose stream runs, or is run by ``bottledwater_scheduled``. A slice
waits until a stream takes it. Each run publishes its slice once; to run it again does no harm.

Set the table and the column that dates its rows below, or by Airflow's variables ``bottledwater_backfill_table`` and
``bottledwater_backfill_column``.
"""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG, CronDataIntervalTimetable

from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator

with DAG(
    dag_id="bottledwater_backfill",
    description="Publish the rows of one day again, in the order of the stream",
    doc_md=__doc__,
    # each run has the interval of its day, also those that a backfill creates
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    # unpause it when the pipeline exists
    is_paused_upon_creation=True,
    # they queue at the slot anyway, and the triggerer holds them while they do
    max_active_runs=16,
    tags=["cdc", "postgresql", "kafka"],
    default_args={"retries": 3, "retry_delay": timedelta(minutes=1)},
):
    BackfillToKafkaOperator(
        task_id="backfill",
        slot="{{ var.value.get('bottledwater_slot', 'bottledwater') }}",
        output_format="{{ var.value.get('bottledwater_format', 'avro') }}",
        tables="{{ var.value.get('bottledwater_backfill_table', 'flights') }}",
        where=(
            "{{ var.value.get('bottledwater_backfill_column', 'day') }} >= '{{ data_interval_start | ds }}'"
            " AND {{ var.value.get('bottledwater_backfill_column', 'day') }} < '{{ data_interval_end | ds }}'"
        ),
    )
