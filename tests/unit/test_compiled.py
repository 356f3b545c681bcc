"""The cache of compiled code: shared by processes, and not needed by any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import airflow_bottledwater
from airflow_bottledwater.encoding.kernels import writing

pytestmark = pytest.mark.slow
PACKAGE = Path(airflow_bottledwater.__file__).parent

CODE = """
import logging, os, resource, sys
if os.environ["ANOTHER"]:
    import numba
    numba.__version__ += ".post1"
if limit := int(os.environ["LIMIT"]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
logging.basicConfig(level=logging.INFO)
import numpy as np
from airflow_bottledwater.compiled import callee, compiled, warm_up
@callee
def times(a, n):
    return a[0] * n
@compiled
def twice(a):
    return times(a, 2)
made = []
warm_up("test", *(lambda kind=kind: made.append(int(twice(np.array([21], dtype=kind)))) for kind in sys.argv[1:]))
print(made, len(twice.stats.cache_hits))
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    # once: a process that is starting could read a file that is being written
    module = tmp_path / "module.py"
    module.write_text(CODE)
    (tmp_path / "temporary").mkdir()

    def start(
        *kinds: str, cache: str = "cache", limit: int = 0, another: str = "", **given: str
    ) -> subprocess.Popen[str]:
        environment = {
            "XDG_CACHE_HOME": str(tmp_path / cache),
            "TMPDIR": str(tmp_path / "temporary"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HOME": str(tmp_path),
            "LIMIT": str(limit),
            "ANOTHER": another,
            **given,
        }
        return subprocess.Popen(
            [sys.executable, str(module), *kinds],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def result(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err


def test_processes_that_start_cold_at_once_leave_a_cache_for_the_next(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    kinds = ["int64", "float64", "uint8"]
    cold = [start(*order) for order in (kinds, kinds[::-1], kinds[1:])]
    assert {result(process)[0].partition("]")[0] for process in cold} == {"[42, 42, 42", "[42, 42"}
    assert list((tmp_path / "cache").glob("bottledwater/compiled/*/complete-test-*"))
    # each variant is found, and is what it says that it is
    out, err = result(start(*kinds))
    assert (out, "Compiling" in err) == ("[42, 42, 42] 3", False)


@pytest.mark.parametrize("given", [False, True])
def test_what_another_numba_has_left_is_no_cache(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, given: bool
) -> None:
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)} if given else {}
    for another in ("", "numba"):
        # one process at a time fills it
        assert "Compiling code for this machine (test)" in result(start("int64", another=another, **folder))[1]
    assert "Compiling" not in result(start("int64", another="numba", **folder))[1]


def test_a_home_that_cannot_be_written_to_leaves_the_temporary_folder(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    out, err = result(start("int64", cache="file"))
    assert out == "[42] 0"
    assert "Compiling code for this machine (test)" in err.splitlines()[0]
    assert result(start("int64", cache="file"))[0] == "[42] 1"
    assert list((tmp_path / "temporary").glob("bottledwater-*/complete-test-*"))


def test_a_full_disk_costs_compiling_and_is_said(start: Callable[..., subprocess.Popen[str]]) -> None:
    for _ in range(2):
        out, err = result(start("int64", "float64", limit=1000))
        assert out == "[42, 42] 0"
        assert err.count("Compiled code cannot be kept, each start compiles anew") == 1


def test_what_only_compiled_code_calls_says_so() -> None:
    with pytest.raises(TypeError, match="varint is called by compiled functions only"):
        writing.varint(1, 2, 3)


def test_all_that_the_package_calls_is_compiled_before_the_first_transaction() -> None:
    """In a process of its own: in this one, other tests have called them."""
    files = sorted(PACKAGE.rglob("*.py"))
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for file in files
        if "\n@compiled\n" in file.read_text()
    ]
    assert len(modules) > 8
    script = (
        "import importlib, sys; from airflow_bottledwater import compiled, warm; warm.warm_up()\n"
        "for name in sys.argv[1:]:\n"
        "    for each in vars(importlib.import_module(name)).values():\n"
        "        kept = type(getattr(each, '_cache', None)) is compiled._Cache\n"
        "        if kept and getattr(each, 'signatures', None) == []:\n"
        "            print(each.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
