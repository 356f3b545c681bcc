"""Where a process keeps what took time to make for the next one: compiled code."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folder(kind: str, fingerprint: str) -> Path | None:
    """A folder that belongs to this user and is writable; it is made if there is none.

    With a read-only home (a container, a service account) it is in the temporary folder.

    :param kind: what is kept.
    :param fingerprint: a hash of all that it is made from.
    :returns: None if neither place can be used.
    """
    for place in _places(kind, fingerprint):
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # another user's folder, or link, in a shared temporary directory could hold planted code
        found = place.lstat()
        if os.access(place, os.W_OK) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return place
    return None


def _places(kind: str, fingerprint: str) -> Iterator[Path]:
    """Where the folder could be. A user without a name and without HOME has no home, and there may be no temporary
    folder that can be written."""
    with contextlib.suppress(RuntimeError):
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bottledwater" / kind / fingerprint
    with contextlib.suppress(FileNotFoundError):
        yield Path(tempfile.gettempdir()) / f"bottledwater-{os.getuid()}-{fingerprint}"
