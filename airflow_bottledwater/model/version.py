"""A relation version: a table as it was when rows were written, and the topic and schemas of its records."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_bottledwater.model.relation import SourceTable


@dataclass(frozen=True, slots=True)
class Version:
    """A table as it was when rows were written, with the topic and the schemas that these rows are published with.

    :param topic: the topic's name.
    :param key_schema: the registry's id of the key's schema, 0 for JSON.
    :param value_schema: the registry's id of the value's schema, 0 for JSON.
    :param refused: why the registry has no schema for its rows (their keys have one); empty if it has.
    """

    table: SourceTable
    topic: str
    key_schema: int = 0
    value_schema: int = 0
    refused: str = ""
