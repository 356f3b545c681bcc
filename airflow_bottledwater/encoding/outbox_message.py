"""Logical messages that describe a record, as the rows of an outbox do: the content is a JSON object that names the
topic, the key, the value and the headers."""

from __future__ import annotations

import struct

import msgspec

from airflow_bottledwater.pipeline.table import MOST_HEADERS

#: in the topic of a rule for messages: what the messages name
TOPIC = "{topic}"
_LONGEST_NAME = 255


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a message; an empty ``Raw`` is a part that is not given."""

    topic: str
    key: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()
    key_base64: bytes | None = None
    payload_base64: bytes | None = None
    headers: dict[str, msgspec.Raw] | None = None


class Described(msgspec.Struct, frozen=True):
    """The record that a message describes.

    :param topic: what stands for ``{topic}``.
    :param key: None for a record without a key; ``value`` likewise.
    :param headers: as :class:`~airflow_bottledwater.kafka.publisher.Records` have them.
    """

    topic: bytes
    key: bytes | None
    value: bytes | None
    headers: bytes


class NoRecord(ValueError):
    """Why a message describes no record; the text is the end of a sentence."""


_decoder = msgspec.json.Decoder(_Content)


def chooses(topic: str) -> bool:
    """Whether a topic of the setting ``messages`` is one that the messages name themselves."""
    return TOPIC in topic


def described(content: bytes) -> Described:
    """The record that the content of a message describes.

    :raises NoRecord: it describes none.
    """
    try:
        content.decode()  # of a part that is passed on as it is, the decoder would not look at the characters
        found = _decoder.decode(content)
        key = _part("key", found.key, found.key_base64)
        value = _part("payload", found.payload, found.payload_base64)
        if not found.payload and found.payload_base64 is None:
            raise NoRecord("has no payload (one that is null is a record without a value)")
        return Described(found.topic.encode(), key, value, _headers(found.headers or {}))
    except msgspec.MsgspecError as error:
        raise NoRecord(f"is not the JSON object that it has to be: {error}") from None
    except UnicodeError:
        raise NoRecord("is not the JSON object that it has to be: it is not UTF-8") from None
    except RecursionError:
        raise NoRecord("is not the JSON object that it has to be: it is nested too deeply") from None


def _part(name: str, said: msgspec.Raw, as_base64: bytes | None) -> bytes | None:
    if as_base64 is None:
        return _bytes(said)
    if said:
        raise NoRecord(f"has both {name} and {name}_base64")
    return as_base64


def _bytes(said: msgspec.Raw) -> bytes | None:
    """A text's own bytes, any other value as the JSON that it is; None for null, and for nothing."""
    text = bytes(said)
    if text in (b"", b"null"):
        return None
    return msgspec.json.decode(text, type=str).encode() if text[:1] == b'"' else text


def _headers(headers: dict[str, msgspec.Raw]) -> bytes:
    """Headers in the form of :func:`airflow_bottledwater.encoding.kernels.outbox.encode_outbox`."""
    if len(headers) > MOST_HEADERS:
        raise NoRecord(f"has {len(headers)} headers, and a record has at most {MOST_HEADERS} of its own")
    out = bytearray()
    for name, said in headers.items():
        if not 0 < len(name) <= _LONGEST_NAME or "\0" in name:
            raise NoRecord(
                f"has a header with the name {name[:_LONGEST_NAME]!r}, which has to have 1 to 255 characters"
            )
        value = _bytes(said)
        out += struct.pack(">i", len(name.encode()) + 1) + name.encode() + b"\0"
        out += struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    return bytes(out)
