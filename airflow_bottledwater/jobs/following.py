"""Passes the log of a job on to whoever watches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_bottledwater.jobs import supervise
from airflow_bottledwater.jobs.log import noise, parse

#: bytes of a job's log that are passed on at once
_LOG_BYTES = 1 << 20
#: called with the level and the text of each line of a job's log
Write = Callable[[int, str], Any]


class LogFollower:
    """Passes a job's log on as it grows: each line with its level, and without its time, since Airflow adds one.

    :param write: called with each line. A line that does not begin a record (of a traceback, for example) has the level
        of the last record.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._level = logging.INFO

    def lines(self, lines: list[str]) -> None:
        """Pass lines on, but for those that each start of Spark has."""
        for line in lines:
            if noise(line):
                continue
            record = parse(line)
            if record is not None:
                self._level = record.level
            self._write(self._level, line if record is None else record.message)


class FileFollower(LogFollower):
    """Follows the log in a run directory on this host.

    :param past: how many bytes of the existing log to begin with; None for all of it.
    """

    def __init__(self, folder: Path, write: Write, *, past: int | None = None) -> None:
        super().__init__(write)
        self._reader = supervise.LogReader(folder, past=past)

    def follow(self) -> None:
        """Pass on the new lines, up to a limit of bytes."""
        self.lines(self._reader.read(_LOG_BYTES))
