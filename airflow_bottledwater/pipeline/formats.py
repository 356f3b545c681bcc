"""The formats of records: what the other rooms must know of each, so that none of them compares its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A format of records.

    :param name: the value of the setting ``format``.
    :param title: its name in messages.
    :param uses_registry: whether its records carry the ids of schemas that a schema registry has.
    :param as_json: which branch of the kernels encodes it: that of JSON, or that of Avro.
    :param offers: the settings of types that it alone offers; with any other format they have their defaults.
    """

    name: str
    title: str
    uses_registry: bool
    as_json: bool
    offers: frozenset[str]


AVRO = Format("avro", "Avro", uses_registry=True, as_json=False, offers=frozenset({"enums", "not_null", "temporal"}))
JSON = Format(
    "json",
    "JSON",
    uses_registry=False,
    as_json=True,
    offers=frozenset({"json_numeric", "json_documents", "json_geometries"}),
)

#: all formats by name
FORMATS = {each.name: each for each in (AVRO, JSON)}
