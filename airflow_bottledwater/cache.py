"""Where a process keeps what took time to make for the next one: compiled code."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def folder(kind: str, fingerprint: str) -> Path | None:
    """A folder that belongs to this user and is writable; it is made if there is none.

    With a read-only home (a container, a service account) it is in the temporary folder.

    :param kind: what is kept.
    :param fingerprint: a hash of all that it is made from.
    :returns: None if neither place can be used.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    temporary = Path(tempfile.gettempdir()) / f"bottledwater-{os.getuid()}-{fingerprint}"
    for place in (home / "bottledwater" / kind / fingerprint, temporary):
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # another user's folder, or link, in a shared temporary directory could hold planted code
        found = place.lstat()
        if os.access(place, os.W_OK) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return place
    return None
