"""The archive of a Python environment that a cluster unpacks for each application: this package, and what it needs with
Spark.

It is what `venv-pack` makes of a new environment with `airflow-provider-bottledwater[spark]`, without the download: the
files of the installed distributions, as they are. As there, the interpreter itself is a link to that of the machine.
Spark brings pyspark and py4j along, so they are left out.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

OURSELVES = "airflow-provider-bottledwater"
_ROOT = Path(__file__).parents[3]
_BY_SPARK = {"pyspark", "py4j"}
_NOT_NEEDED = {"tests", "__pycache__", "include"}


def make_archive(file: Path) -> Path:
    """Write the archive, a `.tar.gz`, and return it. `bin/python` in it is the interpreter."""
    base = Path(os.path.realpath(sys.executable))
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    version = ".".join(map(str, sys.version_info[:3]))
    made = file.parent / "pyvenv.cfg"
    made.write_text(f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {version}\n")
    link = tarfile.TarInfo("bin/python")
    link.type, link.linkname, link.mode = tarfile.SYMTYPE, str(base), 0o777
    # packed and unpacked once, on this machine: a smaller archive would cost more than it saves
    with tarfile.open(file, "w:gz", compresslevel=1) as archive:
        archive.add(made, "pyvenv.cfg")
        archive.addfile(link)
        for source, name in [*_ourselves(), *_others()]:
            archive.add(source, f"{packages}/{name}")
    made.unlink()
    return file


def _others() -> Iterator[tuple[Path, str]]:
    """The files of the distributions that this package requires with its extra spark, and where they belong."""
    for name in sorted(_required()):
        for path in metadata.distribution(name).files or []:
            if ".." not in path.parts and not _NOT_NEEDED.intersection(path.parts):
                yield Path(str(path.locate())), str(path)


def _required() -> set[str]:
    """Their names."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(OURSELVES, ""), (OURSELVES, "spark")]
    while todo:
        if (asked := todo.pop()) in seen:
            continue
        seen.add(asked)
        name, extra = asked
        found.add(name)
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(_normal(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    return found - _BY_SPARK - {OURSELVES}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _ourselves() -> Iterator[tuple[Path, str]]:
    """The files of this package, as in its wheel."""
    build = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    places = {package: package for package in build["packages"]} | build["force-include"]
    for source, name in places.items():
        whole = _ROOT / source
        for path in [whole] if whole.is_file() else sorted(whole.rglob("*")):
            if path.is_file() and not _NOT_NEEDED.intersection(path.relative_to(_ROOT).parts):
                yield path, name if whole.is_file() else f"{name}/{path.relative_to(whole)}"
    for path in metadata.distribution(OURSELVES).files or []:
        if path.parent.name.endswith(".dist-info") and path.name in ("METADATA", "entry_points.txt"):
            yield Path(str(path.locate())), str(path)
