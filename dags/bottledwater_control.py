"""Stop, retire or start a pipeline, read or pause tables, settle dead letters: trigger it with the form, or by the
buttons of the page *Bottled Water*.

*stop* lets the pipeline's job end in order, wherever it runs, and keeps its slot; the task that runs it succeeds.
*retire* does the same for good: the DAG's teardown then drops the slot. After either, ``bottledwater_health`` does not
expect the pipeline to run, and no run that waits, no schedule and no other DAG starts it again. *start* says that it is
meant to run again, and triggers its DAG: the one that has the slot's name, unless the field *DAG* names another one,
such as ``bottledwater``.
"""

from __future__ import annotations

from airflow.sdk import Param

from airflow_bottledwater import form

PIPELINE = ("name", "source.conn_id", "kafka.conn_id", "kafka.registry")

dag = form.pipeline(PIPELINE).control_dag(
    starts="{{ (params.dag_id or params.slot) | pprint }}",
    conf=(
        "{{ dict(params.conf or {}, slot=params.slot, postgres_conn_id=params.postgres_conn_id, "
        "kafka_conn_id=params.kafka_conn_id, schema_registry_conn_id=params.schema_registry_conn_id) }}"
    ),
    approve="{{ params.approve }}",
    dag_id="bottledwater_control",
    doc_md=__doc__,
    params={
        **form.fields(PIPELINE),
        "approve": Param(
            False,
            type="boolean",
            title="Ask first",
            description="Before something is taken away, such as a slot with changes, a person is asked, who sees in "
            "numbers what will happen. Its default is that of the page's buttons.",
        ),
        "dag_id": Param(
            "",
            type=["string", "null"],
            section="Start",
            title="DAG",
            description="The DAG that runs the pipeline, which start triggers; empty: the one with the slot's name.",
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
)
