"""Classes that msgspec decodes are looked at while their modules are imported: two threads that decode a class for the
first time would end the process."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from airflow_bottledwater import decoding
from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.state import control_records, records
from tests.support.waiting import until

PACKAGE = Path(decoding.__file__).parent


def decoded() -> Iterator[tuple[str, str]]:
    """Modules, and the names of the classes that they decode."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        source = file.read_text()
        if "msgspec." not in source:
            continue  # each process parses them when it collects tests
        for node in ast.walk(ast.parse(source)):
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


def test_a_signals_handler_decodes_what_the_interrupted_code_decodes(tmp_path: Path) -> None:
    """Of the same thread: Airflow calls on_kill in one."""
    written = run_directory.Submission("j", "stream")
    run_directory.write(tmp_path, written)
    found = list[Any]()

    def interrupted() -> None:
        with decoding._lock:
            found.append(run_directory.read(tmp_path, run_directory.Submission))

    threading.Thread(target=interrupted, daemon=True).start()
    until(lambda: found, "it is decoded", 10)
    assert found == [written]


def test_who_stops_jobs_has_the_records_of_run_directories_prepared() -> None:
    """In a process of its own: whoever has read one has prepared it, too."""
    script = (
        "from typing import get_args; from airflow_bottledwater.jobs import run_directory, stop;"
        "print(all('__msgspec_cache__' in vars(kind) for kind in get_args(run_directory.RunRecord)))"
    )
    assert subprocess.check_output([sys.executable, "-c", script]) == b"True\n"
