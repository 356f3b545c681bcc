"""Makes names that Avro and Kafka accept, in the same way as the original Bottled Water."""

from __future__ import annotations

import string
from typing import NamedTuple

_LETTERS = frozenset((string.ascii_letters + "_").encode())
_DIGITS = frozenset(string.digits.encode())

#: Topic.validate, clients/src/main/java/org/apache/kafka/common/internals/Topic.java
MAX_TOPIC_LENGTH = 249


def length_problem(topic: str) -> str:
    """The problem of a table whose topic's name is too long; each byte that is no ASCII letter becomes four
    characters of it."""
    return (
        f"Topic {topic!r} has {len(topic)} characters, and Kafka's limit is {MAX_TOPIC_LENGTH}. Give the table another "
        "name for its topic (topic in table_options), or shorten topic_prefix."
    )


def mangle(name: str, *, dots: bool = False) -> str:
    """Keep letters, digits (not first) and ``_``; every other byte of the UTF-8 name becomes ``_xx_``.

    :param dots: keep inner dots, as in namespaces and schema parts of topics.
    """
    raw = name.encode()
    kept = []
    for i, byte in enumerate(raw):
        inner = 0 < i < len(raw) - 1
        if byte in _LETTERS or (i > 0 and byte in _DIGITS) or (dots and inner and byte == ord(".")):
            kept.append(chr(byte))
        else:
            kept.append(f"_{byte:02x}_")
    return "".join(kept)


def symbol(label: str) -> str:
    """What a label of an enum is called in Avro, where no symbol may be empty."""
    return mangle(label) or "_"


def namespace(schema: str) -> str:
    """The Avro namespace of a schema's records; every component starts with a letter or ``_``."""
    # two dots in a row have an empty component between them
    return ".".join(["bottledwater", *(mangle(part) or "_" for part in mangle(schema, dots=True).split("."))])


class Record(NamedTuple):
    """The full name of a table's Avro record, and in the same namespace those of its key and of the envelope around the
    row; empty if there is none."""

    namespace: str
    name: str
    key: str
    envelope: str = ""

    @property
    def known(self) -> set[str]:
        """The full names of keys and values in the topic."""
        return {f"{self.namespace}.{name}" for name in (self.key, self.envelope or self.name)}


def record(topic: str, prefix: str) -> Record:
    """The name of the records in a topic: that of the table for which the topic was made. A table that is renamed keeps
    both, since a registry does not let the next schema of a subject have another name.

    :param prefix: that of the topic.
    """
    schema, _, table = topic.removeprefix(f"{prefix}." if prefix else "").rpartition(".")
    return named(schema or "public", table)


def named(schema: str, table: str) -> Record:
    """The name of a table's records.

    :param table: the table's name, or that part of its topic's.
    """
    return Record(namespace(schema), mangle(table), f"{mangle(table)}_key")


def enveloped(topic: str) -> Record:
    """The name of the records in a topic as Debezium gives it: the topic is their namespace."""
    parts = (mangle(part) or "_" for part in topic.split("."))
    return Record(".".join(parts), "Value", "Key", "Envelope")


def topic(schema: str, table: str, prefix: str = "") -> str:
    """``[prefix.][schema.]table``, ``public`` omitted."""
    parts = [prefix] if prefix else []
    if schema != "public":
        parts.append(mangle(schema, dots=True))
    parts.append(mangle(table))
    return ".".join(parts)


def service_topic(kind: str, prefix: str = "") -> str:
    """A topic of the pipeline itself, such as events or dead letters: ``[prefix.]_bottledwater_<kind>``."""
    return f"{prefix}._bottledwater_{kind}" if prefix else f"_bottledwater_{kind}"
