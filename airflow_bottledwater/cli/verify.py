"""``bottledwater verify``: runs the verification as a Spark job, and prints what it has found."""

from __future__ import annotations

import json
import logging
import sys

import click
import msgspec
from rich.console import Console
from rich.table import Table

from airflow_bottledwater.cli import jobs
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark.job import EXIT_TRANSIENT
from airflow_bottledwater.state.verification import TableResult, Verification

log = logging.getLogger("bottledwater")

#: the exit code if a topic differs from its table; a failure has 1, as everywhere
EXIT_DIFFERENT = 2
#: the exit code if nothing is known of a table
EXIT_UNVERIFIED = 3


def run(pipeline: Settings, master: str, spark_conf: dict[str, str], *, as_json: bool) -> None:
    """Verify, and return if all topics equal their tables; otherwise exit with another code than 0.

    :param master: Spark's master.
    :param spark_conf: properties of Spark.
    :param as_json: whether the result is printed as JSON.
    :raises JobDied: the job failed for a transient reason.
    :raises JobFailed: the job failed.
    """
    from airflow_bottledwater.jobs import run_directory, supervise
    from airflow_bottledwater.jobs.run_directory import Differences

    stopped = jobs.stop_by_signal()
    with jobs.job_folder() as folder:
        jobs.start(folder, "verify", pipeline, master, spark_conf)
        jobs.follow(folder, stopped)
        outcome = supervise.final_outcome(folder)
        if not outcome.ok or outcome.stopped:
            jobs.check_outcome(folder, stopped)
            sys.exit(EXIT_TRANSIENT)  # it was interrupted: nothing is proven
        left = run_directory.read(folder, Differences)
    found = msgspec.convert(outcome.counts, Verification)
    answer(found.with_shown(left.shown) if left is not None else found, as_json=as_json)


def answer(found: Verification, *, as_json: bool) -> None:
    """Print what was found, and exit with its code if it is not that all are equal."""
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        # values may contain brackets, which rich would take for markup
        show(found, Console(markup=False))
    if advice := found.advice():
        log.error("%s", advice)
    if found.different:
        sys.exit(EXIT_DIFFERENT)
    if found.unsettled:
        sys.exit(EXIT_TRANSIENT)
    if found.unverified:
        sys.exit(EXIT_UNVERIFIED)


def show(found: Verification, console: Console) -> None:
    """Print a table of the tables, and the first differences of each."""
    part = f"a sample of {found.sample:.4%} of" if found.sample < 1 else "all"
    console.print(f"Topics against tables at {found.position}: {part} rows, {found.seconds:.1f} s")
    shown = Table()
    rows = []
    for table in found.tables:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in table.counts.items())
        more = f" (and {table.unexamined:,} keys not looked at)" if table.unexamined else ""
        rows.append(
            (
                table.table, table.topic, f"{table.rows:,}", table.verdict, counts + more,
                f"{table.unsettled:,}" if table.unsettled else "", f"{table.older:,}" if table.older else "",
            )
        )  # fmt: skip
    titles = ("table", "topic", "rows", "verdict", "differences", "unsettled", "written before an ALTER")
    # what is nowhere needs no column
    kept = [i for i in range(len(titles)) if i < 4 or any(row[i] for row in rows)]
    for i in kept:
        shown.add_column(titles[i], no_wrap=i < 2)
    for row in rows:
        shown.add_row(*(row[i] for i in kept))
    console.print(shown)
    for table in found.tables:
        _show_differences(table, console)


def _show_differences(table: TableResult, console: Console) -> None:
    if not table.verified:
        console.print(f"{table.table} is not verified: {table.reason}.")
    if table.left_out:
        console.print(
            f"{table.table}: not compared, since PostgreSQL's text does not tell: {', '.join(table.left_out)}"
        )
    for difference in table.differences:
        console.print(f"{table.table}: {difference}", soft_wrap=True)
