"""Which table a check is about, where it has looked at all of them together."""

from __future__ import annotations

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Refused
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.tables.checks import _blame, refused

TABLES = {name: SourceTable(number, "public", name, "d", ("id",), ()) for number, name in enumerate("abcdefgh")}


def test_only_what_is_unfit_is_blamed() -> None:
    asked = []

    def check(by_topic: dict[str, SourceTable]) -> list[str]:
        asked.append(len(by_topic))
        if "g" in by_topic:
            raise Refused("no rights on g")
        return [f"{name} is unfit" for name in by_topic if name in "bc"]

    assert _blame(check, TABLES) == {"b": ["b is unfit"], "c": ["c is unfit"], "g": ["no rights on g"]}
    assert asked[0] == len(TABLES)
    assert _blame(lambda _: [], TABLES) == {} == _blame(check, {})


def test_no_table_is_blamed_for_a_password() -> None:
    def check(_: dict[str, SourceTable]) -> list[str]:
        raise CredentialsRefused("The schema registry denies access.")

    with pytest.raises(CredentialsRefused):
        _blame(check, TABLES)
    with pytest.raises(CredentialsRefused):
        refused(CredentialsRefused("PostgreSQL refuses the connection."))
