"""Publish the rows of one day of a table again: each run takes the day of its data interval.

To do it for many days, choose *Backfill* in the trigger dialog, or run, for example::

    airflow backfill create --dag-id bottledwater_backfill --from-date 2026-03-01 --to-date 2026-03-10

The schedule publishes each day once it is over, with the values of the form as they are set in the DAG's file: give them those of the pipeline.

Prerequisite: a pipeline (the DAG ``bottledwater``, or the command) whose stream runs, or is run by ``bottledwater_bounded``. The rows are
published by the stream, between its changes; if none runs, the task waits until one does. To publish a day again does no harm: rows that
were changed meanwhile are left out, since the topic has them in their newer version.
"""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG, CronDataIntervalTimetable, Param

from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator

with DAG(
    dag_id="bottledwater_backfill",
    description="Publish the rows of one day again, while the stream runs",
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
    render_template_as_native_obj=True,
    # those without a section are open when the form comes up
    params={
        "slot": Param(
            "bottledwater",
            type="string",
            title="Replication slot",
            pattern="^[a-z0-9_]{1,63}$",
            description="Of the pipeline, whose stream publishes the rows.",
        ),
        "tables": Param(
            ["flights"],
            type="array",
            items={"type": "string"},
            minItems=1,
            title="Tables",
            description="Whose rows are published again: [schema.]table, one a line, with * and ?.",
        ),
        "column": Param(
            "time_hour",
            type="string",
            minLength=1,
            title="Date column",
            description="Column that dates a row (date, timestamp or timestamptz), in each of the tables; days are those of UTC.",
        ),
        "rows_per_second": Param(
            0,
            type="number",
            minimum=0,
            title="Rows per second",
            description="How many rows are read in a second at most; 0: as many as the stream has time for.",
        ),
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            section="Connections",
            title="Postgres connection",
            description="The pipeline's connection of type Postgres.",
        ),
        "kafka_conn_id": Param(
            "kafka_default",
            type="string",
            section="Connections",
            title="Kafka connection",
            description="The pipeline's connection of type Apache Kafka.",
        ),
        "schema_registry_conn_id": Param(
            "schema_registry_default",
            type=["string", "null"],
            section="Connections",
            title="Schema registry connection",
            description="The pipeline's connection of type Schema Registry. Not used with format json.",
        ),
        "output_format": Param(
            "avro",
            type="string",
            enum=["avro", "json"],
            section="Connections",
            title="Format",
            description="The pipeline's format of keys and values.",
        ),
    },
) as dag:
    BackfillToKafkaOperator(
        task_id="backfill",
        slot="{{ params.slot }}",
        tables="{{ params.tables }}",
        where="{{ params.column }} >= '{{ data_interval_start | ds }}' AND {{ params.column }} < '{{ data_interval_end | ds }}'",
        rows_per_second="{{ params.rows_per_second }}",
        postgres_conn_id="{{ params.postgres_conn_id }}",
        kafka_conn_id="{{ params.kafka_conn_id }}",
        schema_registry_conn_id="{{ params.schema_registry_conn_id }}",
        output_format="{{ params.output_format }}",
    )
