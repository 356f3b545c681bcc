"""The command's log: lines on standard error, above the progress bar if one is shown."""

from __future__ import annotations

import logging

from rich.console import Console

#: the only console, for all lines and progress bars: two would overwrite each other's output
console = Console(stderr=True)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def setup_log() -> None:
    """Set up the log in the format of the original Bottled Water."""
    handler = _Handler()
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx2", "httpx", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
