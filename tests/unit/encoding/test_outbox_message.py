"""Messages that describe records: what their content says, and what is no such content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_bottledwater.encoding.outbox_message import NoRecord, described
from tests.support.blocks import headers_of


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ('"é\\u00e9\\n\\u0000"', "éé\n\0".encode()),
        ('""', b""),
        ("null", None),
        ("42", b"42"),
        ("1.50e400", b"1.50e400"),
        ("true", b"true"),
        ('{"b": 1.0,  "a": [null, "\\u00e9"]}', b'{"b": 1.0,  "a": [null, "\\u00e9"]}'),
        ("[]", b"[]"),
    ],
)
def test_a_text_is_its_bytes_and_anything_else_the_json_that_it_is(said: str, part: bytes | None) -> None:
    found = described(f' {{"topic": "a", "key": {said} , "payload":{said}, "headers": {{"h": {said}}}}} '.encode())
    assert (found.topic, found.key, found.value) == (b"a", part, part)
    assert headers_of(found.headers) == [("h", part)]


def test_what_is_not_said_is_not_there() -> None:
    found = described(b'{"topic": "a", "payload": null}')
    assert (found.key, found.value, found.headers) == (None, None, b"")
    assert described(b'{"topic": "a", "payload": 1, "headers": null}').headers == b""


def test_bytes_are_in_base64() -> None:
    found = described(b'{"topic": "a", "key_base64": "AP+A", "payload_base64": ""}')
    assert (found.key, found.value) == (b"\x00\xff\x80", b"")


def test_headers_keep_their_order_and_their_names() -> None:
    names = [*(f"n{i}" for i in range(31)), "é" * 255]
    found = described(json.dumps({"topic": "a", "payload": 1, "headers": dict.fromkeys(names, "x")}).encode())
    assert headers_of(found.headers) == [(name, b"x") for name in names]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "JSON object"),
        (b"42", "JSON object"),
        (b"\x00\xff", "not UTF-8"),
        (b'{"topic": "a", "payload": {"x": "\xff"}}', "not UTF-8"),
        (b'{"topic": "a", "payload": yes}', "malformed"),
        (b'{"topic": "a", "payload": 1}{', "trailing"),
        (b'{"topic": "a", "payload": "\\ud800"}', "JSON object"),
        (b'{"topic": "a", "payload": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"payload": 1}', "required field `topic`"),
        (b'{"topic": 1, "payload": 1}', "got `int` - at `$.topic`"),
        (b'{"topic": "a"}', "no payload"),
        (b'{"topic": "a", "payload": 1, "Key": 1}', "unknown field `Key`"),
        (b'{"topic": "a", "payload_base64": "*"}', "base64"),
        (b'{"topic": "a", "payload": 1, "payload_base64": "AA=="}', "both payload and payload_base64"),
        (b'{"topic": "a", "payload": 1, "headers": {"": 1}}', "name"),
        (b'{"topic": "a", "payload": 1, "headers": {"a\\u0000b": 1}}', "name"),
        (b'{"topic": "a", "payload": 1, "headers": []}', "got `array` - at `$.headers`"),
    ],
)
def test_what_describes_no_record_says_why(content: bytes, said: str) -> None:
    with pytest.raises(NoRecord, match=said.replace("$", r"\$").replace("*", r"\*")):
        described(content)


@pytest.mark.parametrize("headers", [dict.fromkeys(map(str, range(33)), 1), {"x" * 256: 1}])
def test_a_record_has_as_many_headers_as_fit(headers: dict[str, Any]) -> None:
    with pytest.raises(NoRecord, match="header"):
        described(json.dumps({"topic": "a", "payload": 1, "headers": headers}).encode())
