"""Functions that only compiled code calls, so that a test can call them."""

from __future__ import annotations

from typing import Any

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import compiled
from airflow_bottledwater.encoding.kernels import nested


def called(function: Any) -> Any:
    """A callee as a function that Python calls."""
    return compiled(function.py_func)


def write_value(program: Any, column: Any, b: Any, p: Any, n: Any, out: Any, o: Any) -> Any:
    """Write a value; it calls itself, so it cannot be compiled once more under its own name. To compile it takes 15
    seconds, which one of the processes that test does for all."""
    if not _write_value.signatures:
        compiling.warm_up("test of one value", lambda: _write_value(program, column, b, p, n, out, o))
    return _write_value(program, column, b, p, n, out, o)


@compiled
def _write_value(program: Any, column: Any, b: Any, p: Any, n: Any, out: Any, o: Any) -> Any:
    return nested.write_value(program, column, b, p, n, out, o)
