"""Compiled code that a wheel brings, so that a new host need not compile before its first row.

It was made for processors of one kind (:mod:`airflow_bottledwater.prebuild`), by one version of numba, and from exactly
these sources. Where any of this differs, it is not used, and the host compiles for itself.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from airflow_bottledwater.decoding import prepare

_PACKAGE = Path(__file__).parent
#: x86-64-v3 in LLVM's words (https://gitlab.com/x86-psABIs/x86-64-ABI, "micro-architecture levels"): all servers since
#: Intel's Haswell and AMD's Excavator
_X86_64_V3 = (
    "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr", "lzcnt", "mmx", "movbe",
    "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave",
)  # fmt: skip
#: what a processor must have for each set of code, the best first; see
#: :func:`airflow_bottledwater.compiled.has_instructions`
PROCESSORS = {"x86-64-v3-sha": (*_X86_64_V3, "sha"), "x86-64-v3": _X86_64_V3}
#: the processor's name for LLVM
NAME = "x86-64-v3"
_MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True):
    """What a set of code was made with.

    :ivar versions: see :func:`versions`.
    :ivar parts: the steps of :func:`airflow_bottledwater.compiled.warm_up` that find all of their code here.
    :ivar sources: the hash of each module that was imported, by its path in the package: no function can contain code
        or constants of another one.
    """

    versions: dict[str, str]
    parts: tuple[str, ...]
    sources: dict[str, str]


prepare(Manifest)


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """The code that this process can use.

    :ivar folder: that holds it, if there is some.
    :ivar parts: see :class:`Manifest`.
    :ivar why_not: why there is none, as the end of a sentence.
    """

    folder: Path | None = None
    parts: frozenset[str] = frozenset()
    why_not: str = ""


def root() -> Path:
    """The folder of all code for this kind of Python and of system."""
    return _PACKAGE / "prebuilt_code" / str(sysconfig.get_config_var("SOABI"))


def versions() -> dict[str, str]:
    """What compiled code depends on, beside the sources and the processor. For Python and NumPy it is the minor
    version, which fixes their binary interface; what numba keeps on disk fits only the very same numba."""
    import llvmlite
    import llvmlite.binding
    import numba
    import numpy as np

    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "NumPy": ".".join(np.__version__.split(".")[:2]),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "system": llvmlite.binding.get_process_triple(),
    }


def hashes(paths: Iterable[str]) -> dict[str, str]:
    """The hashes of files of this package; that of a file that cannot be read is empty."""
    return {path: _hash(_PACKAGE / path) for path in paths}


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def write_manifest(folder: Path, parts: Iterable[str]) -> None:
    """Say what the code in a folder was made with: this process's versions, and all modules that it has imported."""
    files = (getattr(module, "__file__", None) for name, module in sys.modules.items() if _is_ours(name))
    paths = sorted({str(Path(file).relative_to(_PACKAGE)) for file in files if file})
    manifest = Manifest(versions(), tuple(parts), hashes(paths))
    (folder / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _is_ours(module: str) -> bool:
    return f"{module}.".startswith(f"{__package__}.")


def lacking(name: str) -> list[str]:
    """What this host's processor does not have of what a set of code needs."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return [feature for feature in PROCESSORS[name] if not features.get(feature)]


@functools.cache
def find() -> Prebuilt:
    """The best code that fits this process."""
    why_not = f"there is none for {root().name}"
    for name in PROCESSORS:
        folder = root() / name
        try:
            manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            continue
        if absent := lacking(name):
            why_not = f"this processor does not have {' and '.join(absent)}"
        elif differing := _difference(manifest):
            why_not = differing
        else:
            return Prebuilt(folder, frozenset(manifest.parts))
    return Prebuilt(why_not=why_not)


def _difference(manifest: Manifest) -> str:
    """What has changed since some code was made; empty if nothing has."""
    here = versions()
    if differing := [name for name in here if manifest.versions.get(name) != here[name]]:
        made, found = (" and ".join(f"{name} {of.get(name)}" for name in differing) for of in (manifest.versions, here))
        return f"it was made with {made}, and here is {found}"
    now = hashes(manifest.sources)
    if changed := [path for path, hashed in manifest.sources.items() if now[path] != hashed]:
        return f"{' and '.join(changed[:3])} {'are' if changed[1:] else 'is'} not what it was made from"
    return ""
