"""The command's log: lines on standard error, above a bar where one is shown."""

from __future__ import annotations

import logging

from rich.console import Console

#: of all lines and bars; two would write over each other
console = Console(stderr=True)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def setup_log() -> None:
    """Log as Bottled Water does."""
    handler = _Handler()
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx2", "httpx", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
