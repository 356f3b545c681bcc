"""Publish a PostgreSQL database to Kafka: a consistent snapshot, then every committed change, exactly once.

Prerequisites: connections of type Postgres, Apache Kafka, Schema Registry (for Avro) and Spark; trigger it with the form.
The task ``stream`` stays deferred while the stream runs; marking it failed stops the job and keeps the slot.
"""

from __future__ import annotations

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
    tags=["cdc", "postgresql", "kafka"],
    render_template_as_native_obj=True,
    params={
        "postgres_conn_id": Param("postgres_default", type="string", section="Source", title="Postgres connection"),
        "tables": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            section="Source",
            title="Tables",
            description="[schema.]table, one a line, with * and ?; empty: all tables.",
        ),
        "schemas": Param([], type=["array", "null"], items={"type": "string"}, section="Source", title="Schemas"),
        "slot": Param(
            "bottledwater",
            type="string",
            section="Source",
            title="Replication slot",
            pattern="^[a-z0-9_]{1,63}$",
            description="Names the pipeline: run again with the same name, it goes on where it was.",
        ),
        "kafka_conn_id": Param("kafka_default", type="string", section="Target", title="Kafka connection"),
        "schema_registry_conn_id": Param(
            "schema_registry_default", type=["string", "null"], section="Target", title="Schema registry connection"
        ),
        "topic_prefix": Param("", type=["string", "null"], section="Target", title="Topic prefix"),
        "output_format": Param("avro", type="string", enum=["avro", "json"], section="Target", title="Format"),
        "snapshot": Param(
            True, type="boolean", section="What", title="Snapshot first", description="Off: only changes from now on."
        ),
        "bounded": Param(
            False,
            type="boolean",
            section="What",
            title="Bounded",
            description="End when everything is published that is committed now; off: stream until stopped.",
        ),
        "allow_unkeyed": Param(False, type="boolean", section="What", title="Allow tables without a key"),
        "on_error": Param(
            "exit",
            type="string",
            enum=["exit", "log"],
            section="What",
            title="On a record that cannot be published",
            description="exit: stop before its transaction. log: write a dead letter and go on.",
        ),
        "drop_slot": Param(
            "retired",
            type="string",
            enum=["retired", "always", "never"],
            section="What",
            title="Drop the slot at the end",
            description="retired: only if the stream was stopped for good; the slot holds what is not yet published.",
        ),
        "settings": Param(
            {}, type=["object", "null"], section="More", title="Other settings", description="See docs/settings.md."
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
        bounded=_param("bounded"),
        drop_when=_param("drop_slot"),
    )
