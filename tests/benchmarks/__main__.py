"""``python -m tests.benchmarks [NAME …]``: one JSON line per engine or variant on standard output, logs on standard
error."""

from __future__ import annotations

import importlib
import logging
import signal
import sys

from tests.benchmarks.common import servers

NAMES = (
    "encode",
    "shape",
    "first_use",
    "snapshot",
    "stream",
    "latency",
    "memory",
    "several",
    "start",
    "command",
    "toast",
    "tables",
    "relations",
    "sweep",
    "verify",
    "live",
    "executors",
    "parts",
    "parse",
    "metrics",
    "watching",
)


def main(arguments: list[str]) -> int:
    """Run the named benchmarks, or all, each on servers of its own."""
    names = arguments or NAMES
    if unknown := sorted(set(names) - set(NAMES)):
        print(f"There is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}.", file=sys.stderr)
        return 1
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("bench").setLevel(logging.INFO)
    # asked to end: servers and jobs do not outlive this
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in names:
        with servers() as stack:
            importlib.import_module(f"tests.benchmarks.{name}").run(stack)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
