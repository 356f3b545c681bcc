"""The lines of a job's log: ours, and those of Spark and of the JVM."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

#: ours (:func:`airflow_bottledwater.spark.job.log_to_stderr`), or Spark's own (its log4j2.properties), whose year has two digits
_RECORD = re.compile(
    r"(?:(?P<ours>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})|\d\d/\d\d/\d\d \d\d:\d\d:\d\d) (?P<level>[A-Z]+) (?P<message>.*)",
    re.DOTALL,
)
#: names that Python's logging does not have
_LEVELS = {**logging.getLevelNamesMapping(), "TRACE": logging.DEBUG}


class Line(NamedTuple):
    """A line that begins a record.

    :param level: of :mod:`logging`.
    :param ours: and not Spark's.
    """

    level: int
    message: str
    ours: bool


def parse(line: str) -> Line | None:
    """What a line of a job's log says; None if it begins no record (of a traceback, for example)."""
    found = _RECORD.fullmatch(line.rstrip("\r\n"))
    if found is None or found["level"] not in _LEVELS:
        return None
    return Line(_LEVELS[found["level"]], found["message"], found["ours"] is not None)
