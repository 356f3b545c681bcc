"""Compiled code that a wheel brings: used where it fits, and never with other sources, versions or processors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import llvmlite.binding
import msgspec
import numba
import pytest

from airflow_bottledwater import prebuilt

ROOT = Path(__file__).parents[2]
PACKAGE = "airflow_bottledwater"

CALLEE = """
from airflow_bottledwater.compiled import callee
FACTOR = 2
@callee
def times(a):
    return a[0] * FACTOR
"""
KERNEL = """
import numpy as np
from airflow_bottledwater import compiled
from airflow_bottledwater.callee import times
@compiled.compiled
def twice(a):
    return times(a)
def warm_up():
    compiled.warm_up("test", lambda: twice(np.zeros(1, dtype=np.int64)))
"""
#: the result, and how often code was found instead of compiled
RUN = """
import logging
import numpy as np
from airflow_bottledwater import kernel
logging.basicConfig(level=logging.INFO)
kernel.warm_up()
print(int(kernel.twice(np.array([21]))), sum(kernel.twice.stats.cache_hits.values()))
"""


class Host:
    """An installation with one compiled function, which calls another one in another file."""

    def __init__(self, folder: Path) -> None:
        self.cache, self._folder = folder / "cache", folder
        self.package = folder / "site" / PACKAGE
        self.cache.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt_code", "www")
        shutil.copytree(ROOT / PACKAGE, self.package, ignore=ignored)
        (self.package / "callee.py").write_text(CALLEE)
        (self.package / "kernel.py").write_text(KERNEL)
        (self.package / "warm.py").write_text(f"from {PACKAGE}.kernel import warm_up")

    def python(self, *arguments: str, **environment: str) -> tuple[str, str]:
        base = {"PATH": os.environ["PATH"], "HOME": str(self._folder), "XDG_CACHE_HOME": str(self.cache)}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.package.parent,
            env={**base, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip(), done.stderr

    def kept(self) -> list[Path]:
        """What is in the host's own cache."""
        return [path for path in self.cache.rglob("*") if path.is_file()]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    if prebuilt.lacking("x86-64-v3"):
        pytest.skip("wheels bring no code for this kind of processor")
    host = Host(tmp_path)
    host.python("-m", f"{PACKAGE}.prebuild")
    return host


@pytest.mark.slow
def test_a_new_host_finds_the_code_and_need_not_compile(host: Host) -> None:
    out, err = host.python("-c", RUN)
    assert (out, "Compiling" in err, host.kept()) == ("42 1", False, [])
    # also if the host can write nowhere
    assert host.python("-c", RUN, NUMBA_CACHE_DIR="")[0] == "42 1"
    # and there is code for all processors that this one can stand for
    made = {path.name for path in (host.package / "prebuilt_code").glob("*/*")}
    assert made == {name for name in prebuilt.PROCESSORS if not prebuilt.lacking(name)}


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["callee.py", "compiled.py"])
def test_code_is_never_used_with_other_sources(host: Host, changed: str) -> None:
    source = host.package / changed
    before = source.stat()
    source.write_text(source.read_text().replace("FACTOR = 2", "FACTOR = 3") + "#")
    # a wheel's files may all have one time
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    out, err = host.python("-c", RUN)
    assert out == ("63 0" if changed == "callee.py" else "42 0")
    assert f"Code from the wheel is not used: {changed} is not what it was made from." in err
    assert host.kept()
    # what it has compiled is used from now on
    assert host.python("-c", RUN)[0].endswith(" 1")


@pytest.mark.slow
def test_what_a_host_has_compiled_for_itself_comes_first(host: Host) -> None:
    brought, away = host.package / "prebuilt_code", host.package / "away"
    brought.rename(away)
    out, err = host.python("-c", RUN)
    assert (out, "Code from the wheel is not used: there is none for" in err) == ("42 0", True)
    shutil.copytree(away, brought)
    for path in brought.rglob("*.nbc"):
        path.write_bytes(b"not read")
    assert host.python("-c", RUN)[0] == "42 1"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code for this process; returned is its manifest."""
    monkeypatch.setattr(prebuilt, "root", lambda: tmp_path)
    features = dict.fromkeys(prebuilt.PROCESSORS["x86-64-v3"], True)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: features)
    for name in prebuilt.PROCESSORS:
        (tmp_path / name).mkdir()
        prebuilt.write_manifest(tmp_path / name, ["publish"])
    return tmp_path / "x86-64-v3" / "manifest.json"


def found() -> prebuilt.Prebuilt:
    prebuilt.find.cache_clear()
    try:
        return prebuilt.find()
    finally:
        prebuilt.find.cache_clear()


def change(path: Path, part: str, **values: str) -> None:
    manifest = msgspec.json.decode(path.read_bytes())
    manifest[part] |= values
    path.write_bytes(msgspec.json.encode(manifest))


def test_the_best_code_for_the_processor_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found() == prebuilt.Prebuilt(here.parent, frozenset(["publish"]))
    features = dict.fromkeys(prebuilt.PROCESSORS["x86-64-v3-sha"], True)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: features)
    assert found().folder == here.parents[1] / "x86-64-v3-sha"
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: features | {"avx2": False, "fma": False})
    assert found() == prebuilt.Prebuilt(why_not="this processor does not have avx2 and fma")


@pytest.mark.parametrize("name", ["Python", "NumPy", "numba", "llvmlite", "system"])
def test_code_is_not_used_with_other_versions(here: Path, name: str) -> None:
    change(here, "versions", **{name: "0.1"})
    assert found().folder is None
    assert found().why_not.startswith(f"it was made with {name} 0.1, and here is {name} ")


def test_code_is_not_used_if_a_source_has_gone_or_nothing_says_what_it_was_made_of(here: Path) -> None:
    change(here, "sources", **{"encoding/gone.py": "00"})
    assert found().why_not == "encoding/gone.py is not what it was made from"
    here.write_text("{")
    assert found() == prebuilt.Prebuilt(why_not="this processor does not have sha")
    here.parents[1].joinpath("x86-64-v3-sha", "manifest.json").unlink()
    assert found().why_not.startswith("there is none for ")


def test_all_modules_that_were_imported_are_compared(here: Path) -> None:
    sources = msgspec.json.decode(here.read_bytes(), type=prebuilt.Manifest).sources
    assert {"prebuilt.py", "__init__.py"} <= set(sources)
    assert prebuilt.versions()["numba"] == numba.__version__


def test_the_wheel_has_the_code_where_it_is_looked_for() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert f"{prebuilt.root().parent.relative_to(ROOT)}/" in wheel["artifacts"]
    # too large for git, and part of the wheel although git leaves it out
    assert f"{prebuilt.root().parent.name}/" in (ROOT / ".gitignore").read_text().split()
