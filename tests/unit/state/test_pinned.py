"""Which keys mean the same as those in a topic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.encoding import avro, names
from airflow_bottledwater.errors import TableRefused
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.state.pinned import PinnedTable

TEXT = ColumnType(25, -1, 25, -1, "b", "text")


def enum(schema: str, label: str = "region", oid: int = 50000) -> ColumnType:
    made = ColumnType(oid, -1, 50000, -1, "e", f"{schema}.{label}", schema=schema, label=label, form="enum")
    return ColumnType(*(getattr(made, name) for name in made.__slots__[:12]), labels=("eu", "us"), form="enum")


def array(schema: str) -> ColumnType:
    return ColumnType(50010, -1, 50010, -1, "b", f"{schema}.region[]", enum(schema), 1, schema, "_region")


def composite(schema: str) -> ColumnType:
    inside = (Column("region", enum(schema)), Column("n", TEXT))
    return ColumnType(50020, -1, 50020, -1, "c", f"{schema}.place", None, 0, schema, "place", "", inside)


def table(schema: str, kind: ColumnType) -> SourceTable:
    return SourceTable(1, schema, "orders", "d", ("id",), (Column("id", kind), Column("text", TEXT)))


@pytest.mark.parametrize("made", [enum, array, composite])
def test_a_schema_that_gets_another_name_leaves_the_keys_as_they_are(made: object) -> None:
    """The schema of the keys has the names of its types, and its id is in each key."""
    assert callable(made)
    pinned = PinnedTable(table("tenant", made("tenant")), "tenant.orders", "id", 1, 7, 8, 700)
    found, record = pinned.check_key(table("old", made("old"))), names.record("tenant.orders", "")
    assert avro.key_schema(found, record) == avro.key_schema(pinned.table, record)
    assert (found.schema, found.columns[0].type.name) == ("old", made("old").name), "all else is as it is today"
    assert pinned.check_key(found) == found
    assert pinned.check_key(pinned.table) == pinned.table


def test_another_type_is_another_key_whatever_its_schema_is_called() -> None:
    pinned = PinnedTable(table("tenant", enum("tenant")), "tenant.orders", "id", 1, 7, 8, 700)
    for other in (enum("old", "area"), enum("tenant", oid=50001), TEXT):
        with pytest.raises(TableRefused, match="the type of a column"):
            pinned.check_key(table("old", other))


def test_a_composite_with_another_attribute_is_another_key_also_as_a_hash() -> None:
    before = replace(composite("tenant"), form="hash")
    more = replace(before, schema="old", attributes=(*before.attributes, Column("more", TEXT)))
    with pytest.raises(TableRefused, match="the type of a column"):
        PinnedTable(table("tenant", before), "tenant.orders", "id", 1, 7, 8, 700).check_key(table("old", more))


def test_a_domain_is_looked_up_by_the_name_that_its_schema_has_today() -> None:
    """So its rows are read again, under keys with that name."""
    domain = PinnedTable(table("tenant", enum("tenant", oid=60000)), "tenant.orders", "id", 1, 7, 8, 700)
    with pytest.raises(TableRefused, match="the type of a column"):
        domain.check_key(table("old", enum("old", oid=60000)))
