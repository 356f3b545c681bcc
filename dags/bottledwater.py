"""Publish a PostgreSQL database to Kafka: a consistent snapshot, then every committed change, exactly once.

Prerequisites: connections of type Postgres, Apache Kafka, Schema Registry (for Avro) and Spark; trigger it with the
form. The task ``stream`` stays deferred while the stream runs; marking it failed stops the job and keeps the slot. The
replication slot is how PostgreSQL remembers what is published; it keeps all changes since, on its disk, until the
stream has published them.

This DAG has one run at a time: a second run, also one for another pipeline, stays queued until the first one has ended,
which a stream does only when it is stopped. Give each pipeline a DAG of its own: a copy of this file with another
`dag_id`, or `Pipeline.dags()`.
"""

from __future__ import annotations

from airflow.sdk import Param

from airflow_bottledwater import form

dag = form.pipeline().dag(
    dag_id="bottledwater",
    doc_md=__doc__,
    bounded="{{ params.bounded }}",
    drop_when="{{ params.drop_slot }}",
    approve="{{ params.approve }}",
    params={
        **form.fields(),
        "bounded": Param(
            False,
            type="boolean",
            section="Behaviour",
            title="Bounded",
            description="End when everything is published that is committed now; off: stream until stopped.",
        ),
        "drop_slot": Param(
            "retired",
            type="string",
            enum=["retired", "always", "never"],
            section="Behaviour",
            title="Drop the slot at the end",
            description="retired: only if the stream was stopped for good; the slot holds what is not yet published.",
        ),
        "approve": Param(
            False,
            type="boolean",
            section="Behaviour",
            title="Ask before the slot is dropped",
            description="A person is asked, who sees in numbers what is lost with it.",
        ),
    },
)
