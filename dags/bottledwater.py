"""Publish a PostgreSQL database to Kafka: a consistent snapshot, then every committed change, exactly once.

Prerequisites: connections of type Postgres, Apache Kafka, Schema Registry (for Avro) and Spark; trigger it with the form.
The task ``stream`` stays deferred while the stream runs; marking it failed stops the job and keeps the slot. The replication slot is
how PostgreSQL remembers what is published; it keeps all changes since, on its disk, until the stream has published them.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_bottledwater.task_group import BottledWaterTaskGroup


def _param(name: str) -> str:
    return f"{{{{ params.{name} }}}}"


with DAG(
    dag_id="bottledwater",
    description="PostgreSQL to Kafka: snapshot, then every change, exactly once",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=1)},
    tags=["cdc", "postgresql", "kafka"],
    render_template_as_native_obj=True,
    # Airflow's form opens what has no section; named sections are closed at first
    params={
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            title="Postgres connection",
            description="Connection of type Postgres: the source database, by a role that may replicate.",
        ),
        "slot": Param(
            "bottledwater",
            type="string",
            title="Replication slot",
            pattern="^[a-z0-9_]{1,63}$",
            description="Names the pipeline: run again with the same name, it goes on where it was.",
        ),
        "tables": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Tables",
            description="[schema.]table, one a line, with * and ?; empty, with Schemas empty: all tables.",
        ),
        "schemas": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Schemas",
            description="Schemas whose tables are taken in addition, one a line, with * and ?.",
        ),
        "kafka_conn_id": Param(
            "kafka_default",
            type="string",
            title="Kafka connection",
            description="Connection of type Apache Kafka, with bootstrap.servers in its extra.",
        ),
        "schema_registry_conn_id": Param(
            "schema_registry_default",
            type=["string", "null"],
            title="Schema registry connection",
            description="Connection of type Schema Registry. Not used with format json.",
        ),
        "spark_conn_id": Param(
            "spark_default",
            type="string",
            title="Spark connection",
            description="Connection of type Spark that submits the snapshot and the stream: any master in deploy-mode client, or YARN in deploy-mode cluster.",
        ),
        "topic_prefix": Param(
            "",
            type=["string", "null"],
            title="Topic prefix",
            description="Put before each topic's name, with a dot: prefix shop makes shop.orders of table orders.",
        ),
        "output_format": Param(
            "avro",
            type="string",
            enum=["avro", "json"],
            title="Format",
            description="Of keys and values: avro (with a schema registry) or json.",
        ),
        "snapshot": Param(
            True,
            type="boolean",
            section="Behaviour",
            title="Snapshot first",
            description="Publish every row as of one moment, then the changes. Off: only changes from now on.",
        ),
        "bounded": Param(
            False,
            type="boolean",
            section="Behaviour",
            title="Bounded",
            description="End when everything is published that is committed now; off: stream until stopped.",
        ),
        "allow_unkeyed": Param(
            False,
            type="boolean",
            section="Behaviour",
            title="Allow tables without a key",
            description="Publish tables without a primary key or replica identity, too; their records have no key.",
        ),
        "on_error": Param(
            "exit",
            type="string",
            enum=["exit", "log"],
            section="Behaviour",
            title="On a record that cannot be published",
            description="exit: stop before its transaction. log: write a dead letter and go on.",
        ),
        "drop_slot": Param(
            "retired",
            type="string",
            enum=["retired", "always", "never"],
            section="Behaviour",
            title="Drop the slot at the end",
            description="retired: only if the stream was stopped for good; the slot holds what is not yet published.",
        ),
        "settings": Param(
            {},
            type=["object", "null"],
            section="Advanced",
            title="Other settings",
            description="A JSON object with any other setting of docs/settings.md, for example lanes.",
        ),
    },
) as dag:
    BottledWaterTaskGroup(
        "pipeline",
        prefix_group_id=False,
        pipeline={
            **{
                name: _param(name)
                for name in (
                    "postgres_conn_id",
                    "kafka_conn_id",
                    "schema_registry_conn_id",
                    "tables",
                    "schemas",
                    "slot",
                    "topic_prefix",
                    "output_format",
                    "allow_unkeyed",
                    "on_error",
                    "settings",
                )
            },
            "skip_snapshot": "{{ not params.snapshot }}",
        },
        spark_conn_id=_param("spark_conn_id"),
        bounded=_param("bounded"),
        drop_when=_param("drop_slot"),
    )
