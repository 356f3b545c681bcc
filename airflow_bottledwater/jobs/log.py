"""Parses the lines of a job's log: those of this package, and those of Spark and the JVM."""

from __future__ import annotations

import logging
import re
import time
from typing import NamedTuple

from airflow_bottledwater.errors import RecordError

#: a line of this package (:func:`airflow_bottledwater.spark.job.log_to_stderr`) or of Spark (its log4j2.properties;
#: two-digit years)
_RECORD = re.compile(
    r"(?:(?P<ours>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})|\d\d/\d\d/\d\d \d\d:\d\d:\d\d) (?P<level>[A-Z]+) "
    r"(?P<mark>\(not reported\) )?(?P<message>.*)",
    re.DOTALL,
)
#: what the JVM and Spark say at each start, whatever happens, and what nobody can act on
_NOISE = re.compile(
    r"NativeCodeLoader: Unable to load native-hadoop|Using incubator modules|Using Spark's default log4j profile|"
    r"Setting default log level to|To adjust logging level use|Setting Spark log level to|"
    r"HTTP Request: [A-Z]+ "
)
#: names that Python's logging does not have
_LEVELS = {**logging.getLevelNamesMapping(), "TRACE": logging.DEBUG}


#: what a record gets as ``extra`` (:mod:`logging`) that has values of rows: it is in the job's own log only, with this
#: mark (:func:`formatter`), and does not travel with the job's record in Kafka
UNREPORTED = {"mark": "(not reported) "}


class LogLine(NamedTuple):
    """The first line of a log record.

    :param level: a level of :mod:`logging`.
    :param ours: whether it is a line of this package, and not Spark's.
    :param at: when it was written, in seconds since 1970; 0 if it is Spark's.
    :param reported: whether it may be told elsewhere.
    """

    level: int
    message: str
    ours: bool
    at: float = 0.0
    reported: bool = True


def formatter() -> logging.Formatter:
    """The form of the lines of a job's log, as :func:`parse` reads them; what has values of rows is in one line."""
    return _LineFormatter("%(asctime)s %(levelname)s %(mark)s%(message)s", defaults={"mark": ""})


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text.replace("\n", "\\n") if getattr(record, "mark", "") else text


def tell_row(to: logging.Logger, error: BaseException) -> None:
    """Log which row an error is about, if it is about one: in the job's own log only.

    :param to: the log that the error itself is in.
    """
    if isinstance(error, RecordError) and error.row:
        to.error("It is %s.", error.row, extra=UNREPORTED)


def parse(line: str) -> LogLine | None:
    """A line of a job's log, parsed; None if it does not begin a record (a line of a traceback, for example)."""
    found = _RECORD.fullmatch(line.rstrip("\r\n"))
    if found is None or found["level"] not in _LEVELS:
        return None
    ours: str | None = found["ours"]
    at, level = _seconds(ours) if ours else 0.0, _LEVELS[found["level"]]
    return LogLine(level, found["message"], ours is not None, at, not found["mark"])


def noise(line: str) -> bool:
    """Whether a line says nothing to anybody."""
    return _NOISE.search(line) is not None


def _seconds(text: str) -> float:
    """The seconds since 1970 of a time of our own lines (:mod:`logging` writes the host's local time)."""
    whole, _, milliseconds = text.partition(",")
    try:
        return time.mktime(time.strptime(whole, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000
    except (ValueError, OverflowError):
        return 0.0
