"""Prove every night that topics equal their tables, while the stream of the DAG ``bottledwater`` runs.

The task ``verify`` fails if a topic differs; its log has the first keys that do, and says how to mend them. Add an
alert on failure (``on_failure_callback``, or Airflow's notifiers). For scheduled runs, set the values of the form
below.
"""

from __future__ import annotations

from airflow.sdk import Param

from airflow_bottledwater import form

PIPELINE = ("name", "source.conn_id", "kafka.conn_id", "kafka.registry", "spark.conn_id")

dag = form.pipeline(PIPELINE).verify_dag(
    "@daily",
    tables="{{ params.verify_tables }}",
    sample="{{ params.sample }}",
    dag_id="bottledwater_verify",
    doc_md=__doc__,
    params={
        **form.fields(PIPELINE),
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
    },
)
