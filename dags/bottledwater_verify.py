"""Prove every night that topics equal their tables, while the stream of the DAG ``bottledwater`` runs.

The task ``verify`` fails if a topic differs; its log has the first keys that do, and says how to mend them. Scheduled runs take the values
of the form as they are set in the DAG's file: give them those of the pipeline. Add an alert on failure (``on_failure_callback``, or Airflow's
notifiers).
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from airflow_bottledwater.operators.verify import VerifyTopicsOperator

with DAG(
    dag_id="bottledwater_verify",
    description="Topics against tables, while the stream runs",
    doc_md=__doc__,
    schedule="@daily",
    catchup=False,
    is_paused_upon_creation=True,
    max_active_runs=1,
    tags=["cdc", "postgresql", "kafka"],
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
        "verify_tables": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Tables",
            description="Which are compared: [schema.]table, one a line, with * and ?; empty: all of the pipeline.",
        ),
        "sample": Param(
            1.0,
            type="number",
            title="Sample",
            description="Share of the rows, chosen by their keys: 0.01 is one in a hundred, another one each time.",
        ),
        "settings": Param(
            {},
            type=["object", "null"],
            title="Other settings",
            description="A JSON object with the pipeline's other settings of docs/settings.md.",
        ),
    },
) as dag:
    VerifyTopicsOperator(
        task_id="verify",
        postgres_conn_id="{{ params.postgres_conn_id }}",
        slot="{{ params.slot }}",
        kafka_conn_id="{{ params.kafka_conn_id }}",
        schema_registry_conn_id="{{ params.schema_registry_conn_id }}",
        conn_id="{{ params.spark_conn_id }}",
        topic_prefix="{{ params.topic_prefix }}",
        output_format="{{ params.output_format }}",
        verify_tables="{{ params.verify_tables }}",
        sample="{{ params.sample }}",
        settings="{{ params.settings }}",
    )
