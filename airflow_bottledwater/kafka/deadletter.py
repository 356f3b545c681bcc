"""Dead letters: what could not be published, with enough to see why and to publish it later."""

from __future__ import annotations

import base64
import json
from typing import Any

#: a letter is cut to this many bytes of row text
MAX_TEXT = 64 * 1024


def letter(
    *, topic: str, op: str, position: str, relation: str, key: bytes | None, columns: dict[str, str | None], error: str
) -> bytes:
    """A dead letter as JSON.

    :param columns: the row as text where it has one, base64 of its bytes elsewhere; cut when too large.
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
        "key": base64.b64encode(key).decode() if key is not None else None,
        "columns": kept,
        "truncated": size > MAX_TEXT,
        "error": error,
    }
    return json.dumps(record, ensure_ascii=False).encode()
