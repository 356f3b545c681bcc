"""The subcommands for single tables of a pipeline that runs."""

from __future__ import annotations

import getpass
from typing import Any

import click

from airflow_bottledwater.cli.log import say
from airflow_bottledwater.cli.options import options, pipeline_of, timeout_option
from airflow_bottledwater.pipeline.rules import listed

_TABLES = click.option(
    "--tables", "of_tables", required=True, help="Tables, as [schema.]table with * and ?, comma-separated."
)
_TIMEOUT = timeout_option("Seconds to wait for the job's answer.")


@click.command("pause-table")
@options(everything=False)
@_TABLES
@click.option("--reason", default="", metavar="TEXT", help="Why, for whoever looks at the pipeline.")
@_TIMEOUT
def pause_table(of_tables: str, reason: str, timeout: float, **values: Any) -> None:
    """Publish no more changes of tables until resume-table, while the others go on. PostgreSQL still sends them."""
    _ask(of_tables, values, timeout, paused=True, why=reason)


@click.command("resume-table")
@options(everything=False)
@_TABLES
@_TIMEOUT
def resume_table(of_tables: str, timeout: float, **values: Any) -> None:
    """Go on with tables that were paused, or set aside because of a record: their rows are read again while the stream
    runs, and the topics are brought to what the tables hold."""
    _ask(of_tables, values, timeout, paused=False)


def _ask(of_tables: str, values: dict[str, Any], timeout: float, *, paused: bool, why: str = "") -> None:
    from airflow_bottledwater.provision import pausing

    pipeline = pipeline_of(values, later=True)
    asked = pausing.ask(pipeline, listed(of_tables), paused=paused, by=_user(), why=why)
    what = "Asked to pause the tables." if paused else "Asked to go on with the tables."
    say(f"{what} {pausing.outcome(pipeline, *asked, timeout=timeout)}")


def _user() -> str:
    """The name of whoever runs the command; empty if it is not known, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
