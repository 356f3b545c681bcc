"""``status --check``: an answer for probes of service managers and container platforms."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark.job import EXIT_FAILED

log = logging.getLogger("bottledwater")


def answer(pipeline: Settings, limits: Mapping[str, Any], *, timeout: float) -> None:
    """Say whether the pipeline's job works: a line on standard output if it does; otherwise one in the log, and exit
    code 1.

    :param limits: the arguments ``max_lag``, ``max_age`` and ``max_dead_letters`` of
        :func:`airflow_bottledwater.jobs.health.problem`.
    :param timeout: seconds to wait for PostgreSQL and Kafka.
    """
    from airflow_bottledwater.jobs import health

    try:
        found, status = health.look(pipeline, timeout=timeout)
        why = health.problem(found, status, **limits, now=time.time())
    except BottledWaterError as error:
        why = str(error)
    if why:
        log.error("Not ready: %s", " ".join(why.split()))
        sys.exit(EXIT_FAILED)
    assert found is not None
    assert status is not None
    age = max(0.0, time.time() - status.at)
    click.echo(f"Ready: {status.state}, {found.lag:,} bytes behind, reported {age:.0f} s ago.")
