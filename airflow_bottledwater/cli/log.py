"""The command's log: lines on standard error, above the progress bar if one is shown."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from airflow_bottledwater.jobs.log import LogLine


class _Console(Console):
    """Standard error, whose reader may end before us: neither what is done nor the exit code depends on one."""

    def on_broken_pipe(self) -> None:
        """Be silent from now on, instead of ending the program."""
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            # what is left in the buffer would fail again at the end
            os.dup2(nowhere.fileno(), self.file.fileno())


#: the only console, for all lines and progress bars: two would overwrite each other's output
console = _Console(stderr=True)

#: the values of ``--log-format``
FORMATS = ("text", "json")


def _time(record: logging.LogRecord) -> str:
    """When the record was made, such as ``2026-11-22T09:09:14.123Z``."""
    made = datetime.fromtimestamp(record.created, UTC)
    return made.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Plain(logging.Formatter):
    """The format of the original Bottled Water: ``[INFO] message``. Each line of a longer message begins in this
    way."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = self.prefix(record)
        return "\n".join(f"{prefix} {line}" for line in super().format(record).splitlines() or [""])

    def prefix(self, record: logging.LogRecord) -> str:
        return f"[{record.levelname}]"


class _Stamped(_Plain):
    """The same with the time before it, for a log that nobody watches as it is written."""

    def prefix(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} [{record.levelname}]"


class _Json(logging.Formatter):
    """A JSON object a line: time, level, message (with the traceback, if there is one) and slot, if it is known."""

    def format(self, record: logging.LogRecord) -> str:
        found = {"time": _time(record), "level": record.levelname, "message": super().format(record)}
        if slot := getattr(record, "slot", ""):
            found["slot"] = slot
        return json.dumps(found, ensure_ascii=False)


def say(text: str) -> None:
    """Print a text as it is: what a subcommand has done, or a line of the log."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Handler(logging.Handler):
    """Prints the lines.

    :ivar slot: the slot that all lines are about; empty before it is known.
    """

    slot = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            record.slot = self.slot
            say(self.format(record))
        except Exception:
            self.handleError(record)


_handler = _Handler()


def setup_log() -> None:
    """Set up the log: in the format of the original Bottled Water at a terminal, elsewhere with the time of each
    line."""
    _handler.setFormatter(_Plain() if sys.stderr.isatty() else _Stamped())
    logging.basicConfig(level=logging.INFO, handlers=[_handler])
    logging.getLogger("numba").setLevel(logging.WARNING)


def use_format(name: str) -> None:
    """Choose the format of all further lines.

    :param name: one of :data:`FORMATS`.
    """
    _handler.setFormatter(_Json() if name == "json" else _Stamped())


def draws() -> bool:
    """Whether a progress bar may be drawn: at a terminal, and not between lines that a program reads."""
    return console.is_interactive and not isinstance(_handler.formatter, _Json)


def name_slot(slot: str) -> None:
    """Say which slot all further lines are about."""
    _handler.slot = slot


def show_line(log: logging.Logger, line: LogLine) -> None:
    """Log a line of a job's log as one of our own: with the same format, and the time at which the job wrote it."""
    if not log.isEnabledFor(line.level):
        return
    record = log.makeRecord(log.name, line.level, __file__, 0, "%s", (line.message,), None)
    if line.at:
        record.created = line.at
    log.handle(record)
