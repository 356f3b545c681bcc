"""Fail if a pipeline that is meant to run does not, every five minutes, for all pipelines of a Kafka.

It does not depend on the runs of the pipelines' own DAGs, so put your alert here (``on_failure_callback``, or Airflow's
notifiers): it also fails when such a run is paused, was deleted, or ended with nobody starting the stream again. A
pipeline that was stopped with ``bottledwater stop``, or with the DAG ``bottledwater_control``, is not meant to run.
Scheduled runs take the values of the form as they are set in the DAG's file.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import Param

from airflow_bottledwater.dag import dag_of, text_of
from airflow_bottledwater.operators.health import PipelineHealthOperator

with dag_of(
    "bottledwater_health",
    "Whether all pipelines are as they are meant to be",
    doc_md=__doc__,
    schedule="*/5 * * * *",
    # Kafka may be away for a moment; what is wrong with a pipeline fails the task at once
    default_args={"retries": 1, "retry_delay": timedelta(seconds=30)},
    params={
        "kafka_conn_id": Param(
            "kafka_default",
            type="string",
            title="Kafka connection",
            description="Connection of type Apache Kafka, whose pipelines are watched.",
        ),
        "pipelines": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Pipelines",
            description="Replication slots, one a line, with * and ?; empty: all pipelines of this Kafka. Where slots "
            "of several servers have one name: system identifier/database/slot.",
        ),
        "postgres_conn_ids": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Postgres connections",
            description="Connections of the sources whose slots are looked at, too, one a line.",
        ),
        "max_lag": Param(
            1 << 30,
            type=["integer", "null"],
            title="Lag",
            description="Bytes of WAL that a stream may be behind, or a slot of these sources; empty: any number.",
        ),
        "max_delay": Param(
            3600,
            type=["number", "null"],
            title="Delay",
            description="Seconds that the oldest change that is not published may be old; empty: any age.",
        ),
        "max_dead_letters": Param(
            0,
            type=["integer", "null"],
            title="Dead letters",
            description="How many of a pipeline may be open; empty: any number.",
        ),
        "max_pause": Param(
            3600,
            type=["number", "null"],
            title="Pause",
            description="Seconds between two bounded runs; empty: any number.",
        ),
        "max_unverified": Param(
            8 * 86400,
            type=["number", "null"],
            title="Verified",
            description="Seconds since all rows of all tables were verified (bottledwater_verify); empty: any number.",
        ),
    },
) as dag:
    PipelineHealthOperator(
        task_id="health",
        kafka_conn_id=text_of("kafka_conn_id"),
        pipelines="{{ params.pipelines }}",
        postgres_conn_ids="{{ params.postgres_conn_ids }}",
        max_lag="{{ params.max_lag }}",
        max_delay="{{ params.max_delay }}",
        max_dead_letters="{{ params.max_dead_letters }}",
        max_pause="{{ params.max_pause }}",
        max_unverified="{{ params.max_unverified }}",
    )
