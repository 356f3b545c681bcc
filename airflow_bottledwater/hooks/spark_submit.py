"""What the Spark provider knows of a submission but does not offer: the only place that reads its private parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Submission:
    """How a job is submitted.

    :param command: the whole command line; it has no secret in it.
    :param master: of the connection.
    :param variables: that the operator adds to the job's environment (``env_vars``).
    """

    command: list[str]
    master: str
    variables: dict[str, str]


def submission(hook: Any, application: str) -> Submission:
    """The provider submits in a way that ends with the task; this is what a job of its own needs.

    :param hook: a ``SparkSubmitHook``.
    :param application: path of the job's entry point.
    """
    command = hook._build_spark_submit_command(application)
    # behind the command: making it sets them
    variables = {str(name): str(value) for name, value in (hook._env or {}).items()}
    return Submission(command, str(hook._connection["master"] or ""), variables)
