"""Compile ahead of time what the first job would compile otherwise, for example when an image is built:
``python -m airflow_bottledwater.warm``."""

from __future__ import annotations

from airflow_bottledwater.kafka import topic_reader
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.publish import outbox, warm
from airflow_bottledwater.snapshot import latest
from airflow_bottledwater.stream import assembler
from airflow_bottledwater.verify import lane


def warm_up() -> None:
    """Compile all functions that jobs use; see :func:`airflow_bottledwater.compiled.warm_up`."""
    warm.warm_up([Table(partition_by=("*",))])
    outbox.warm_up()
    assembler.warm_up()
    topic_reader.warm_up()
    latest.warm_up()
    lane.warm_up()


if __name__ == "__main__":
    warm_up()
