"""Parses the lines of a job's log: those of this package, and those of Spark and the JVM."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

#: a line of this package (:func:`airflow_bottledwater.spark.job.log_to_stderr`) or of Spark (its log4j2.properties; two-digit years)
_RECORD = re.compile(
    r"(?:(?P<ours>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})|\d\d/\d\d/\d\d \d\d:\d\d:\d\d) (?P<level>[A-Z]+) (?P<message>.*)",
    re.DOTALL,
)
#: names that Python's logging does not have
_LEVELS = {**logging.getLevelNamesMapping(), "TRACE": logging.DEBUG}


class Line(NamedTuple):
    """The first line of a log record.

    :param level: a level of :mod:`logging`.
    :param ours: whether it is a line of this package, and not Spark's.
    """

    level: int
    message: str
    ours: bool


def parse(line: str) -> Line | None:
    """A line of a job's log, parsed; None if it does not begin a record (a line of a traceback, for example)."""
    found = _RECORD.fullmatch(line.rstrip("\r\n"))
    if found is None or found["level"] not in _LEVELS:
        return None
    return Line(_LEVELS[found["level"]], found["message"], found["ours"] is not None)
