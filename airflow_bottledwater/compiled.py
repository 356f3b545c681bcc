"""The one door to numba: compiled functions, their cache on disk, and C functions that they call.

Importing this module imports numba; only the data plane's hot loops do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def _fingerprint() -> str:
    """Of the sources whose functions and numbers are compiled into those of other files: numba itself only looks at the file
    that a function is in."""
    encoding = Path(__file__).parent / "encoding"
    digest = hashlib.sha256()
    for source in (encoding / "wire.py", *sorted((encoding / "kernels").glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_directory() -> str:
    """Where compiled code is kept: a writable folder of this user, so that a worker starts warm.

    A read-only home (a container, a service account) falls back to the temporary folder; without either, numba
    compiles at every start.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    code = _fingerprint()
    temporary = Path(tempfile.gettempdir()) / f"bottledwater-{os.getuid()}-{code}"
    for folder in (home / "bottledwater" / "compiled" / code, temporary):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # another user's folder in a shared temporary directory could hold planted code
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return str(folder)
    return ""


os.environ.setdefault("NUMBA_CACHE_DIR", _cache_directory())

import llvmlite.binding as llvm  # noqa: E402  (numba reads the cache folder when it is imported)
import numba  # noqa: E402
from numba import types  # noqa: E402

# somebody (a plugin of pytest) may have imported it before us
numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]

__all__ = ["OPTIONS", "allocating", "compiled", "external", "memcpy", "numba", "types"]

_kept: list[ctypes.CDLL] = []


#: how everything is compiled: without the interpreter and its lock, kept on disk between processes
OPTIONS: dict[str, Any] = {"cache": bool(os.environ["NUMBA_CACHE_DIR"]), "nogil": True, "error_model": "numpy"}


def compiled(function: F) -> F:
    """Compile a function with :data:`OPTIONS` and without reference counts.

    Every array in it is an argument that the caller keeps alive; atomic increments and decrements at each call took two
    thirds of the time of a row. Code compiled so cannot make an array.
    """
    jitted: F = numba.njit(**OPTIONS, _nrt=False)(function)
    return jitted


def allocating(function: F) -> F:
    """The same for a function that makes an array (said explicitly: a callee inherits its caller's way otherwise)."""
    jitted: F = numba.njit(**OPTIONS, _nrt=True)(function)
    return jitted


def external(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """A C function that compiled code can call; pointers are passed as integers.

    It is registered with LLVM under its own name, which, unlike a ctypes object, keeps the caller cacheable.

    :raises AttributeError: if the library lacks it.
    """
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    llvm.add_symbol(name, address)
    _kept.append(library)
    return types.ExternalFunction(name, result(*arguments))


#: addresses and a length, as integers
memcpy = external(ctypes.CDLL(None), "memcpy", types.intp, types.intp, types.intp, types.intp)
