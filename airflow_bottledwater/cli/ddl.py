"""``ddl``: what tells a pipeline of DDL statements."""

from __future__ import annotations

from typing import Any

import click

from airflow_bottledwater.cli.log import say
from airflow_bottledwater.cli.options import source_of, source_options


@click.group("ddl")
def ddl_group() -> None:
    """Install or remove the event triggers that write DDL statements for the setting ddl_topic."""


@ddl_group.command("install")
@source_options
def install(**values: Any) -> None:
    """Make the event triggers in the source database, or make them anew; this needs a superuser."""
    from airflow_bottledwater.postgres import connect, ddl

    with connect.session(source_of(values), "Installing event triggers") as connection:
        ddl.install(connection)
    say(f"Event triggers {' and '.join(ddl.TRIGGERS)} are there, and their functions in schema {ddl.SCHEMA}.")


@ddl_group.command("remove")
@source_options
def remove(**values: Any) -> None:
    """Drop the event triggers from the source database, with all that install has made."""
    from airflow_bottledwater.postgres import connect, ddl

    with connect.session(source_of(values), "Removing event triggers") as connection:
        ddl.remove(connection)
    say("The event triggers are dropped.")
