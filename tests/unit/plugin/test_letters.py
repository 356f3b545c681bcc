"""What the page shows of the topic of dead letters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.plugin import letters
from airflow_bottledwater.postgres.large_rows import LargeRow

LETTER = {
    "pipeline": "7/shop/orders",
    "relation": "public.a",
    "oid": 7,
    "op": "c",
    "pos": "p",
    "by": "stream",
    "error": "bad",
}


def test_what_is_no_dead_letter_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the topic, too."""
    foreign = [b"not json", b"{}", b'"\xff"', b"", json.dumps({**LETTER, "key": 1}).encode()]
    values = [*foreign, json.dumps(LETTER).encode()]

    class Reader:
        def __init__(self, kafka: Any) -> None: ...

        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, *_: Any) -> Any:
            for number, value in enumerate(values):
                made = {"key": str(number).encode(), "value": value, "timestamp": (1, 5000)}
                yield SimpleNamespace(**{name: lambda held=held: held for name, held in made.items()})

    topics = SimpleNamespace(
        describe=lambda names: names, ends=lambda *_, **__: [len(values)], begins=lambda of: {name: [0] for name in of}
    )
    monkeypatch.setattr(letters, "Topics", lambda kafka: topics)
    monkeypatch.setattr(letters, "RangeReader", Reader)
    large = LargeRow("(0,1)", {"email": "j@x.y"}, 1 << 30)
    values.append(json.dumps({**LETTER, "key": large.key, "error": large.unsendable}).encode())
    assert "j@x.y" not in str(letters.newest({}, "7/shop/orders", "", keys=False))
    assert "j@x.y" in str(letters.newest({}, "7/shop/orders", "", keys=True)["letters"][0])
    values.pop()
    found = letters.newest({}, "7/shop/orders", "", keys=True)
    assert [each["reason"] for each in found["letters"]] == ["bad"] and found["complete"]
