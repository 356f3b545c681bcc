"""Files and functions stay small enough to be read: compiled functions may be longer, since a call costs what its
arguments weigh."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "airflow_bottledwater"
FILES = sorted(PACKAGE.rglob("*.py"))


def is_kernel(path: Path) -> bool:
    return path.parent.name == "kernels"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_and_its_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno and f.end_lineno - f.lineno >= 60}
    assert is_kernel(path) or long == {}
