"""The classes that msgspec makes of what is read."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
#: reentrant, since a signal's handler (on_kill) may decode what the interrupted code decodes
_lock = threading.RLock()


def prepare(*kinds: type[Any]) -> None:
    """Let msgspec look at classes now, while the module that decodes them is imported and nobody else can.

    It looks at a class when it meets it first, and keeps what it has found so far on the class, since the class may
    have itself as a field. Another thread that decodes the same class meanwhile uses that unfinished, and the process
    dies (msgspec 0.22: ``DataclassInfo_Convert`` and ``StructInfo_Convert`` in src/msgspec/_core.c).
    """
    with _lock:  # another module may have the same classes in its own
        for kind in kinds:
            msgspec.json.Decoder(kind)


def from_json(raw: bytes, kind: type[T]) -> T:
    """An object of a class that may not be prepared, since its module shall not need msgspec. Whoever has a signal's
    handler that decodes it, has to prepare it: the handler would use it unfinished, too.

    :raises ValueError: it is not one.
    """
    with _lock:
        return msgspec.json.decode(raw, type=kind)
