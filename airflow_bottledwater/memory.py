"""What is kept of memory that is not used any more: by malloc, much in a process that publishes, and nothing while it
rests; by Python, what refers to itself until it is collected."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

#: seconds without work after which a process rests
_RESTS_AFTER = 5.0
#: parameters of mallopt, in malloc.h of glibc (https://man7.org/linux/man-pages/man3/mallopt.3.html)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep() -> None:
    """Let malloc keep up to 64 MiB of freed memory, also of pieces as large as Kafka's batches, instead of giving it
    back to the kernel each time, which has to clear it: that saves a fifth of the processor time for values of 8 kB."""
    _glibc("mallopt", _M_TRIM_THRESHOLD, 64 << 20)
    _glibc("mallopt", _M_MMAP_THRESHOLD, 32 << 20)


def settle() -> None:
    """Once in a process, when it has imported and compiled all that it works with: Python does not look through this
    again when it collects what refers to itself (https://docs.python.org/3/library/gc.html#gc.freeze). It does so when
    a quarter of what it has looked through is new: beside 100,000 objects, most of them numba's, the publishers and
    sources of many tables that came and went stayed for long, with their buffers."""
    if not gc.get_freeze_count():
        gc.freeze()


def give_back() -> None:
    """Free what refers to itself, and return to the kernel what malloc keeps of freed memory; the next work takes it
    anew."""
    gc.collect()
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    """Call a function that tells the GNU C library's malloc what to keep
    (https://man7.org/linux/man-pages/man3/malloc_trim.3.html); other libraries have none, and keep less by
    themselves."""
    if (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)


class Rest:
    """Gives memory back once whenever something begins to rest.

    :param release: frees what its owner does not need while it rests.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._worked = time.monotonic()
        self._kept = True

    def note(self, *, worked: bool) -> None:
        """Say whether there was something to do just now."""
        if worked:
            self._worked, self._kept = time.monotonic(), True
        elif self._kept and time.monotonic() - self._worked > _RESTS_AFTER:
            self._kept = False
            self._release()
            give_back()
