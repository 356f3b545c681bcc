"""Reads from the Spark provider how it would submit a job; this is the only module that uses the provider's private
attributes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.jobs import submit

#: takes the place of the provider's log
_quiet = logging.getLogger(f"{__name__}.provider")
_quiet.setLevel(logging.WARNING)


@contextlib.contextmanager
def making(conn_id: str) -> Iterator[None]:
    """Within this block, a ``SparkSubmitHook`` is made.

    :param conn_id: its connection.
    :raises Refused: the provider does not take the connection.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # of these two, the first is raised for a master on Kubernetes without the provider for it
        remedy = "Correct the connection: see docs/operations.md, Where the jobs run."
        if isinstance(error, RuntimeError) and "kubernetes" in str(error):
            remedy = "pip install apache-airflow-providers-cncf-kubernetes"
        said = str(error).rstrip(".!")
        raise Refused(f"Airflow's Spark provider does not accept connection {conn_id!r}: {said}.", remedy) from error


@dataclass(frozen=True, slots=True)
class SparkSubmit:
    """How a job is submitted.

    :param command: the whole command line; it contains no secrets.
    :param master: the connection's master.
    :param variables: what the operator adds to the job's environment (``env_vars``).
    """

    command: list[str]
    master: str
    variables: dict[str, str]


def submission(hook: Any, application: str) -> SparkSubmit:
    """What is needed to submit a job independently of the task, since the provider's own submission ends with the task.

    :param hook: a ``SparkSubmitHook``.
    :param application: path of the job's entry point.
    :raises Refused: see :func:`airflow_bottledwater.jobs.submit.refuse_secrets`: variables of the job's environment are
        properties on YARN and Kubernetes.
    """
    # it would log the command line, of a thousand characters, which the process list has, too
    hook._log = _quiet
    command = hook._build_spark_submit_command(application)
    given = [value.partition("=") for option, value in pairwise(command) if option == "--conf"]
    submit.refuse_secrets({name: value for name, _, value in given})
    # read after the command is made, which sets them
    variables = {str(name): str(value) for name, value in (hook._env or {}).items()}
    return SparkSubmit(command, str(hook._connection["master"] or ""), variables)
