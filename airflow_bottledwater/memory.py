"""Memory that processes do not need while they rest."""

from __future__ import annotations

import ctypes
import time

#: seconds without work after which a process rests
_RESTS_AFTER = 5.0


def give_back() -> None:
    """Return to the kernel what malloc keeps of freed memory; the next work takes it anew."""
    # a GNU extension (https://man7.org/linux/man-pages/man3/malloc_trim.3.html); other C libraries keep less by themselves
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class Rest:
    """Gives memory back once whenever something begins to rest."""

    def __init__(self) -> None:
        self._worked = time.monotonic()
        self._kept = True

    def note(self, *, worked: bool) -> None:
        """Say whether there was something to do just now."""
        if worked:
            self._worked, self._kept = time.monotonic(), True
        elif self._kept and time.monotonic() - self._worked > _RESTS_AFTER:
            self._kept = False
            give_back()
