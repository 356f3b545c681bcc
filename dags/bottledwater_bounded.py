"""Publish every few minutes what was committed since, instead of streaming continuously. Backfills that wait are taken, too.

Prerequisite: the DAG ``bottledwater`` has created the slot and taken the snapshot (run it with the choice *Bounded*), and its stream
does not run. Scheduled runs take the values of the form as they are set in the DAG's file: give them those of the pipeline.
"""

from __future__ import annotations

from datetime import timedelta

import pendulum
from airflow.sdk import DAG, Param

from airflow_bottledwater.operators.stream import StreamToKafkaOperator

with DAG(
    dag_id="bottledwater_bounded",
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
    render_template_as_native_obj=True,
    params={
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            title="Postgres connection",
            description="The pipeline's connection of type Postgres.",
        ),
        "slot": Param(
            "bottledwater",
            type="string",
            title="Replication slot",
            pattern="^[a-z0-9_]{1,63}$",
            description="Names the pipeline.",
        ),
        "tables": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Tables",
            description="As in the pipeline: [schema.]table, one a line; tables that were created since and match are taken in.",
        ),
        "schemas": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Schemas",
            description="As in the pipeline: schemas whose tables are taken in addition, one a line.",
        ),
        "kafka_conn_id": Param(
            "kafka_default",
            type="string",
            title="Kafka connection",
            description="The pipeline's connection of type Apache Kafka.",
        ),
        "schema_registry_conn_id": Param(
            "schema_registry_default",
            type=["string", "null"],
            title="Schema registry connection",
            description="The pipeline's connection of type Schema Registry. Not used with format json.",
        ),
        "spark_conn_id": Param(
            "spark_default",
            type="string",
            title="Spark connection",
            description="Connection of type Spark that submits the job.",
        ),
        "topic_prefix": Param(
            "", type=["string", "null"], title="Topic prefix", description="The pipeline's prefix of topics."
        ),
        "output_format": Param(
            "avro",
            type="string",
            enum=["avro", "json"],
            title="Format",
            description="The pipeline's format of keys and values.",
        ),
        "settings": Param(
            {},
            type=["object", "null"],
            title="Other settings",
            description="A JSON object with the pipeline's other settings of docs/settings.md.",
        ),
    },
) as dag:
    StreamToKafkaOperator(
        task_id="stream",
        postgres_conn_id="{{ params.postgres_conn_id }}",
        slot="{{ params.slot }}",
        tables="{{ params.tables }}",
        schemas="{{ params.schemas }}",
        kafka_conn_id="{{ params.kafka_conn_id }}",
        schema_registry_conn_id="{{ params.schema_registry_conn_id }}",
        conn_id="{{ params.spark_conn_id }}",
        topic_prefix="{{ params.topic_prefix }}",
        output_format="{{ params.output_format }}",
        settings="{{ params.settings }}",
        bounded=True,
    )
