"""Classes that msgspec decodes are looked at while their modules are imported: two threads that decode a class for the
first time would end the process."""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from airflow_bottledwater import decoding
from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.state import control_records, records

PACKAGE = Path(decoding.__file__).parent


def decoded() -> Iterator[tuple[str, str]]:
    """Modules, and the names of the classes that they decode."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("msgspec.convert", "msgspec.json.decode"):
                kinds = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "type")]
                for kind in kinds:
                    if isinstance(kind, ast.Name) and kind.id[0] in "_ABCDEFGHIJKLMNOPQRSTUVWXYZ":
                        yield module, kind.id


def is_prepared(kind: Any) -> bool:
    # of a Struct, it is kept where only C sees it
    return "__msgspec_cache__" in vars(kind) or issubclass(kind, msgspec.Struct)


@pytest.mark.parametrize(("module", "name"), sorted(set(decoded())))
def test_a_class_that_is_decoded_is_prepared(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert is_prepared(getattr(found, name))
    if issubclass(getattr(found, name), msgspec.Struct):
        source = Path(str(found.__file__)).read_text()
        assert f"prepare({name})" in source or f"Decoder({name})" in source


def test_the_records_of_both_kinds_of_topics_are_prepared() -> None:
    kinds = [*records._KINDS.values(), *get_args(control_records.ControlRecord)]
    assert len(kinds) > 20 and all(map(is_prepared, kinds))


def test_the_records_of_run_directories_are_decoded_one_at_a_time(tmp_path: Path) -> None:
    written = run_directory.Submission("j", "stream")
    run_directory.write(tmp_path, written)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(run_directory.read(tmp_path, run_directory.Submission)))
    with decoding._lock:
        reader.start()
        reader.join(0.3)
        assert not found
    reader.join()
    assert found == [written]
