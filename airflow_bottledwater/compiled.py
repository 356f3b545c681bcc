"""Access to numba: compiled functions, their cache on disk, and C functions that they call.

Importing this module imports numba; only the data plane's hot loops do. Where numba is not installed, the import fails
with an error that names the missing extra.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from airflow_bottledwater import cache, prebuilt
from airflow_bottledwater.extras import explained

F = TypeVar("F", bound=Callable[..., Any])


with explained():
    import llvmlite.binding as llvm
    import numba
    import numba.extending
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
    from numba.core.ccallback import CFunc
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.registry import CPUDispatcher, cpu_target
    from numba.core.runtime import _nrt_python


def _fingerprint() -> str:
    """A hash of all that compiled code is made from and for: the sources, and where they are, the versions, and the
    processor. A kernel contains functions and constants of other files, but numba's own cache only checks the file that
    a function is in; what another numba, or another kind of processor, has left there is compiled anew; and each
    installation fills a cache of its own, one process at a time."""
    package = Path(__file__).parent
    shared = (
        "compiled",
        "encoding/wire",
        "encoding/layout",
        "encoding/outbox",
        "kafka/hashes",
        "kafka/librdkafka",
        "verify/fields",
        "verify/messages",
        "verify/skip",
    )
    processor = cpu_target.target_context.codegen().magic_tuple()
    digest = hashlib.sha256(repr((str(package), prebuilt.versions(), processor)).encode())
    for source in (*(package / f"{name}.py" for name in shared), *sorted((package / "encoding/kernels").glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


_MADE_FROM = _fingerprint()
# empty if there is no place for it: numba then compiles at every start
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache.folder("compiled", _MADE_FROM) or ""))
numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
# while the sources are those that are imported: a package may be replaced while a process runs
prebuilt.find()
# what code from the cache calls (numba/core/runtime/nrt.py, _Runtime.initialize). One that calls hash() would need
# more: the secrets of numba/cpython/hashing.py
for _name, _address in _nrt_python.c_helpers.items():
    llvm.add_symbol(_name if _name.startswith("_") else f"NRT_{_name}", _address)

__all__ = [
    "allocating",
    "callback",
    "callee",
    "compiled",
    "external",
    "generated",
    "has_instructions",
    "inlined",
    "instruction",
    "ir",
    "memcpy",
    "numba",
    "types",
    "warm_up",
]

log = logging.getLogger(__name__)
#: of all functions; one that said nothing of ``forceinline`` would be inlined where its caller is
_OPTIONS = {"nogil": True, "error_model": "numpy", "forceinline": False}
_kept: list[ctypes.CDLL] = []
#: where compiled code is written for wheels, instead of into the cache, and the parts of it; only ``prebuild`` sets it
prebuilding: Path | None = None
prebuilt_parts: list[str] = []


class _Locator(UserProvidedCacheLocator):  # type: ignore[misc]
    """In the cache folder, also if nothing can be written there: code may come with the wheel."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        return cls(py_func, py_file)

    def get_source_stamp(self) -> Any:
        # numba's is that of the function's own file; a folder that was given stays where it is when others change
        return super().get_source_stamp(), _MADE_FROM


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's cache, behind which is the code that the wheel brings. A failed write (such as on a full disk) is logged
    instead of ending the job."""

    _impl_class = _CacheImpl
    _told = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # numba first imports everything that it can compile, for half a second and 16 MB; it is only needed, and
        # done again, where something is compiled (numba/core/compiler.py, CompilerBase)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        if prebuilding:
            return None
        if os.environ["NUMBA_CACHE_DIR"] and (own := super()._load_overload(sig, target_context)) is not None:
            return own
        folder = prebuilt.find().folder
        found = self._prebuilt(folder).load(self._prebuilt_key(sig, target_context.codegen())) if folder else None
        return found and self._impl.rebuild(target_context, found)

    def _prebuilt(self, folder: Path) -> Any:
        """The file of this function's code in such a folder, whose manifest says whether it fits the sources."""
        function = self._py_func
        return IndexDataCacheFile(str(folder), f"{function.__module__}.{function.__qualname__}", source_stamp="")

    def _prebuilt_key(self, sig: Any, codegen: Any) -> Any:
        signature, _processor, function = self._index_key(sig, codegen)
        return signature, function

    def save_overload(self, sig: Any, data: Any) -> None:
        if prebuilding:
            assert self._impl.check_cachable(data), self._name
            self._prebuilt(prebuilding).save(self._prebuilt_key(sig, data.codegen), self._impl.reduce(data))
            return
        if not os.environ["NUMBA_CACHE_DIR"]:
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if not _Cache._told:
                log.warning("Compiled code cannot be kept, each start compiles anew: %s", error)
            _Cache._told = True


class _Callback(CFunc):  # type: ignore[misc]
    _pyfunc: Any

    def enable_caching(self) -> None:
        self._cache = _Cache(self._pyfunc)


class _LinkedCode(JITCodeLibrary):  # type: ignore[misc]
    """The code of a callee, as numba has it before it optimises it and makes machine code of it."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _CalleeCompiler(Compiler):  # type: ignore[misc]
    def define_pipelines(self) -> Any:
        self.state.flags.no_compile = True
        self.state.library = _LinkedCode(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


class _Callee(CPUDispatcher):  # type: ignore[misc]
    """A function that only compiled code can call.

    numba optimises each function, with all that it calls, and makes machine code of it. A function at the bottom of ten
    others would be optimised eleven times, which was four fifths of the time of a first start. This one is linked as it
    is into its callers, and optimised where Python calls one of them.
    """

    def add_overload(self, cres: Any) -> None:
        code = cres._replace(entry_point=object())  # by which callers find it
        self.targetctx.insert_user_function(code.entry_point, code.fndesc, [code.library])
        self.overloads[tuple(code.signature.args)] = code

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # a variant for each number that a caller writes there would take time to compile, and gain nothing
        plain = [types.unliteral(each) if isinstance(each, types.IntegerLiteral) else each for each in args]
        return super().get_call_template(plain, kws)

    def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.py_func.__qualname__} is called by compiled functions only; see compiled.compiled()")


def _callee(function: F, *, nrt: bool = False, inline: bool = False) -> F:
    options = {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}
    options |= {"_nrt": nrt, "forceinline": inline}
    return _Callee(function, targetoptions=options, pipeline_class=_CalleeCompiler)  # type: ignore[no-any-return]


def warm_up(part: str, *steps: Callable[[], None]) -> None:
    """Compile functions before they are needed, by calling them with nothing to do: this takes a second if they are in
    the cache or came with the wheel, and half a minute if not, which is logged at once.

    One process at a time fills the cache, and the others load what it has written: numba numbers the cache files of a
    function's variants without a lock, so two processes that compile different variants at once could load each other's
    code.

    :param part: a name for these functions; once they are all in the cache, processes do not wait for each other.
    :param steps: callables, each of which calls some of these functions.
    """
    with _filling_cache(part):
        for step in steps:
            step()


@contextlib.contextmanager
def _filling_cache(part: str) -> Iterator[None]:
    folder, started = Path(os.environ["NUMBA_CACHE_DIR"]), time.monotonic()
    kept = bool(os.environ["NUMBA_CACHE_DIR"])
    # the folder may be one that was given, or that of a process of another version which has started this one
    done = folder / f"complete-{part}-{_MADE_FROM}"
    if prebuilding:
        prebuilt_parts.append(part)
    if prebuilding or (kept and done.exists()) or part in prebuilt.find().parts:
        yield
        return
    place = f"the next start finds it in {folder}" if kept else "each start does, as there is no writable folder for it"
    place += f". Code from the wheel is not used: {prebuilt.find().why_not or 'it does not have this part'}"
    log.info("Compiling code for this machine (%s), up to a minute, or longer on a busy one; %s.", part, place)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if kept:
                fcntl.flock(stack.enter_context((folder / "lock").open("w")), fcntl.LOCK_EX)
        yield
        with contextlib.suppress(OSError):
            if kept:
                done.touch()
    log.info("Compiled in %.0f s.", time.monotonic() - started)


def compiled(function: F) -> F:
    """A function that Python calls: compiled at its first call, it runs without Python's global lock, and is kept on
    disk between processes. It calls functions that are marked by :func:`callee` and the others here.

    There is no reference counting. Every array in it is an argument that its caller keeps alive; atomic increments and
    decrements at each call took two thirds of the time of a row. It cannot create arrays.
    """
    jitted = numba.njit(_nrt=False, **_OPTIONS)(function)
    jitted._cache = _Cache(function)  # what enable_caching() does (numba/core/dispatcher.py)
    return jitted  # type: ignore[no-any-return]


def callback(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function that a C library calls, kept on disk like :func:`compiled`; its ``address`` is what the library gets.

    :param result: the numba type of the result; ``arguments`` are those of the parameters.
    """

    def made(function: Callable[..., Any]) -> Any:  # as numba.cfunc() does (numba/core/decorators.py)
        callback = _Callback(function, (arguments, result), locals={}, options={"nopython": True})
        callback.enable_caching()
        callback.compile()
        return callback

    return made


def callee(function: F) -> F:
    """A function that only compiled functions call; it cannot create arrays, either."""
    return _callee(function)


def inlined(function: F) -> F:
    """Like :func:`callee`, and inlined into each caller: an array argument takes seven words on the stack, and for a
    function that is called for every value, passing them costs more than the work itself."""
    return _callee(function, inline=True)


def allocating(function: F) -> F:
    """Like :func:`callee`, for a function that creates an array. It must be marked, because otherwise a callee is
    compiled the way its caller is."""
    return _callee(function, nrt=True)


def external(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """A C function that compiled code can call; pointers are passed as integers.

    It is registered with LLVM under its own name: numba can cache callers of such a function, but not callers of a
    ctypes object.

    :param result: the numba type of the result; ``arguments`` are those of the parameters.
    :raises AttributeError: if the library does not have the function.
    """
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    llvm.add_symbol(name, address)
    _kept.append(library)
    return types.ExternalFunction(name, result(*arguments))


def generated(function: F) -> F:
    """A function whose code is made by the generator that it returns, beside the types (numba's ``intrinsic``)."""
    return numba.extending.intrinsic(function)  # type: ignore[no-any-return]


def has_instructions(group: str) -> bool:
    """Whether the processor that is compiled for has a group of instructions; compiled code is kept by processor.

    :param group: LLVM's name of it.
    """
    return f"+{group}," in f"{cpu_target.target_context.codegen().magic_tuple()[2]},"


def instruction(builder: Any, name: str, result: Any, operands: list[Any]) -> Any:
    """An instruction of the processor, for the generator of an ``intrinsic``.

    :param builder: of the code.
    :param name: LLVM's name of it.
    :param result: LLVM's type of the result; ``operands`` are those of the operands.
    """
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, operands), name)


#: C's memcpy: destination and source address, and the length in bytes, as integers
memcpy = external(ctypes.CDLL(None), "memcpy", types.intp, types.intp, types.intp, types.intp)
