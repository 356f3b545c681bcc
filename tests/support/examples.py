"""How many random examples a property is tried with."""

from __future__ import annotations

import os

#: ``make fuzz`` and the mutants take more
_FACTOR = int(os.environ.get("BOTTLEDWATER_EXAMPLES_FACTOR", "1"))


def examples(quick: int) -> int:
    """Of which ``make test`` tries ``quick``."""
    return quick * _FACTOR
