"""The lines of a job's log: ours, among those of Spark and of the JVM."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

# as airflow_bottledwater.spark.job.log_to_stderr sets it; Spark's own lines have a year of two digits
_OURS = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<message>.*)", re.DOTALL
)
_LEVELS = logging.getLevelNamesMapping()


class Line(NamedTuple):
    """A line of ours.

    :param level: of :mod:`logging`.
    """

    level: int
    message: str


def parse(line: str) -> Line | None:
    """What a line of a job's log says; None if it is not ours, or goes on with what an earlier one has begun."""
    found = _OURS.fullmatch(line.rstrip("\r\n"))
    return None if found is None else Line(_LEVELS[found["level"]], found["message"])
