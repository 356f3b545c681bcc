"""Fill the caches ahead of time, for example when an image is built: ``python -m airflow_bottledwater.warm``. There is one of compiled
code, which the first job would fill otherwise, and one of Spark's classes, without which every job starts a second later."""

from __future__ import annotations

import logging

from airflow_bottledwater.kafka import topic_reader
from airflow_bottledwater.publish import warm
from airflow_bottledwater.snapshot import latest
from airflow_bottledwater.spark import submit
from airflow_bottledwater.stream import assembler
from airflow_bottledwater.verify import lane


def warm_up() -> None:
    """Compile all functions that jobs use; see :func:`airflow_bottledwater.compiled.warm_up`."""
    warm.warm_up()
    assembler.warm_up()
    topic_reader.warm_up()
    latest.warm_up()
    lane.warm_up()


def fill() -> None:
    """Compile all functions that jobs use, and archive the classes that Spark loads."""
    warm_up()
    submit.make_archive()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    fill()
