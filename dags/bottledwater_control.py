"""Stop, retire or start a pipeline: trigger it with the form.

*stop* lets the pipeline's job end in order, wherever it runs, and keeps its slot; the task that runs it succeeds.
*retire* does the same for good: the DAG's teardown then drops the slot. After either, ``bottledwater_health`` does not
expect the pipeline to run. *start* says that it is meant to run again, and triggers its DAG.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param, task

from airflow_bottledwater import form
from airflow_bottledwater.dag import dag_of
from airflow_bottledwater.operators.control import PipelineControlOperator

PIPELINE = ("name", "source.conn_id", "kafka.conn_id")

with dag_of(
    "bottledwater_control",
    "Stop, retire or start a pipeline",
    doc_md=__doc__,
    # of several pipelines at a time
    max_active_runs=16,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=30)},
    params={
        **form.fields(PIPELINE),
        "action": Param(
            "stop",
            type="string",
            enum=["stop", "retire", "start"],
            title="Action",
            description="stop: end its job, keep the slot. retire: for good, so that the slot may be dropped. "
            "start: run it again.",
        ),
        "dag_id": Param(
            "bottledwater",
            type="string",
            section="Start",
            title="DAG",
            description="The DAG that runs the pipeline, which start triggers.",
        ),
        "conf": Param(
            {},
            type=["object", "null"],
            section="Start",
            title="Form of that DAG",
            description="A JSON object with those fields of its form that differ from their defaults; slot and "
            "connections are given to it.",
        ),
    },
) as dag:
    control = PipelineControlOperator(
        task_id="control",
        pipeline=form.pipeline(PIPELINE),
        action="{{ params.action }}",
    )

    @task.short_circuit
    def is_start(params: dict[str, object] | None = None) -> bool:
        """Whether the pipeline's DAG is to be triggered."""
        return (params or {}).get("action") == "start"

    start = TriggerDagRunOperator(
        task_id="start",
        trigger_dag_id="{{ params.dag_id }}",
        conf=(  # type: ignore[arg-type]
            "{{ dict(params.conf or {}, slot=params.slot, postgres_conn_id=params.postgres_conn_id, "
            "kafka_conn_id=params.kafka_conn_id) }}"
        ),
    )
    control >> is_start() >> start
