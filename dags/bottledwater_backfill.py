"""Publish the rows of one day of a table again: each run takes the day of its data interval.

To do it for many days, choose *Backfill* in the trigger dialog, or run, for example::

    airflow backfill create --dag-id bottledwater_backfill --from-date 2026-03-01 --to-date 2026-03-10

Prerequisite: a pipeline (the DAG ``bottledwater``, or the command) whose stream runs, or is run by
``bottledwater_bounded``. The rows are published by the stream, between its changes; if none runs, the task waits until
one does. To publish a day again does no harm: rows that were changed meanwhile are left out, since the topic has them
in their newer version. For scheduled runs, set the values of the form below.
"""

from __future__ import annotations

from airflow.sdk import Param

from airflow_bottledwater import form

PIPELINE = ("name", "source.conn_id", "kafka.conn_id", "kafka.registry")

dag = form.pipeline(PIPELINE).backfill_dag(
    by="{{ params.column }}",
    tables="{{ params.tables }}",
    rows_per_second="{{ params.rows_per_second }}",
    dag_id="bottledwater_backfill",
    doc_md=__doc__,
    params={
        **form.fields(PIPELINE),
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
            description="Column that dates a row (date, timestamp or timestamptz), in each of the tables; days "
            "are those of UTC.",
        ),
        "rows_per_second": Param(
            0,
            type="number",
            minimum=0,
            title="Rows per second",
            description="How many rows are read in a second at most; 0: as many as the stream has time for.",
        ),
    },
)
