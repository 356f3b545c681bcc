"""Dead letters: what could not be published, with enough to see why and to publish it later."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

#: a letter is cut to this many characters of row text; so many bytes of a value are enough for them
MAX_TEXT = 64 * 1024
MAX_BYTES = 4 * (MAX_TEXT + 1)


def letter(
    *,
    topic: str,
    op: str,
    position: str,
    relation: str,
    key: Sequence[str],
    columns: dict[str, str | None],
    error: str,
    again: dict[str, Any],
    message: bytes | None,
    limit: int,
) -> bytes:
    """A dead letter as JSON.

    :param key: the names of the key columns.
    :param columns: the row as text where it has one, hex of its binary form elsewhere; cut when too large.
    :param again: what it takes to encode ``message`` (pgoutput's) later; left out together with it where the letter would
        exceed ``limit`` bytes (or there is none), and then it cannot be re-driven.
    """
    kept: dict[str, Any] = {}
    size = 0
    for name, text in columns.items():
        room = max(0, MAX_TEXT - size)
        kept[name] = text if text is None or len(text) <= room else text[:room]
        size += len(text or "")
    record = {
        "topic": topic,
        "op": op,
        "pos": position,
        "relation": relation,
        "key": {name: kept.get(name) for name in key} if key else None,
        "columns": kept,
        "truncated": size > MAX_TEXT,
        "error": error,
    }
    if message is not None and len(message) < limit:
        encoded = base64.b64encode(message).decode()
        whole = json.dumps({**record, "again": {**again, "message": encoded}}, ensure_ascii=False)
        if len(found := whole.encode()) <= limit:
            return found
    return json.dumps({**record, "truncated": True}, ensure_ascii=False).encode()
