"""Functions that only compiled code calls, so that a test can call them."""

from __future__ import annotations

from typing import Any

from airflow_bottledwater.compiled import compiled
from airflow_bottledwater.encoding.kernels import nested


def called(function: Any) -> Any:
    """A callee as a function that Python calls."""
    return compiled(function.py_func)


@compiled
def write_value(program: Any, column: Any, b: Any, p: Any, n: Any, out: Any, o: Any) -> Any:
    """Write a value; it calls itself, so it cannot be compiled once more under its own name."""
    return nested.write_value(program, column, b, p, n, out, o)
