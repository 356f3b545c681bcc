"""Publish every few minutes what was committed since, instead of streaming continuously. Backfills that wait are taken,
too.

Prerequisite: the DAG ``bottledwater`` has created the slot and taken the snapshot (run it with the choice *Bounded*),
and its stream does not run. The settings are those of the pipeline's last start. For scheduled runs, set the values of
the form below. While the pipeline is stopped on request, its runs are skipped.
"""

from __future__ import annotations

from airflow_bottledwater import form

PIPELINE = ("name", "source.conn_id", "kafka.conn_id", "kafka.registry", "spark.conn_id")

dag = form.pipeline(PIPELINE).bounded_dag(
    "*/5 * * * *", dag_id="bottledwater_bounded", doc_md=__doc__, params=form.fields(PIPELINE)
)
