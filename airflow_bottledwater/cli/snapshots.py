"""The subcommands for live snapshots: ``snapshot`` asks for one and follows it, ``snapshots`` shows and changes
them."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from airflow_bottledwater.cli.log import console, say
from airflow_bottledwater.cli.options import Number, options, pipeline_of
from airflow_bottledwater.errors import JobFailed
from airflow_bottledwater.pipeline.rules import listed
from airflow_bottledwater.pipeline.settings import Settings

if TYPE_CHECKING:
    from airflow_bottledwater.state.control_records import SnapshotReport, SnapshotRequest

log = logging.getLogger("bottledwater")

#: seconds between two looks at a live snapshot
_INTERVAL = 1.0
#: seconds without a report after which it is said what is waited for
_SILENT = 10.0
_COLUMNS = ("id", "state", "tables", "where", "rows", "superseded", "tombstones", "done", "rows/s", "left", "error")


@click.command("snapshot")
@options(everything=False)
@click.option("--tables", required=True, help="Tables, as [schema.]table with * and ?, comma-separated.")
@click.option("--where", default="", metavar="CONDITION", help="Only these rows: SQL over the table's own columns.")
@click.option("--sweep", is_flag=True, help="Also publish tombstones for keys that the table does not have.")
@click.option(
    "--by-key", is_flag=True, help="Read in the order of the keys: goes on where it was if a table is rewritten."
)
@click.option("--rows-per-second", type=Number(min=0), default=0.0, help="Limit the pace.")
@click.option("--bytes-per-second", type=Number(min=0), default=0.0, help="Limit the pace.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Follow it to its end.")
def snapshot(
    tables: str,
    where: str,
    sweep: bool,
    by_key: bool,
    rows_per_second: float,
    bytes_per_second: float,
    wait: bool,
    **values: Any,
) -> None:
    """Publish rows of tables again while the stream runs, wherever it runs; an interrupted --wait leaves it going."""
    from airflow_bottledwater.live.wanted import check_named
    from airflow_bottledwater.provision import live
    from airflow_bottledwater.state.control_records import SnapshotRequest

    request = SnapshotRequest(tuple(listed(tables)), where, sweep, by_key, rows_per_second, bytes_per_second)
    check_named(request)
    pipeline = pipeline_of(values, later=True)
    name, request_id = live.ask(pipeline, request)
    say(f"Live snapshot {request_id} is asked for. {live.publishes(pipeline, name)}")
    if wait:
        _follow(pipeline, name, request_id)


def _follow(pipeline: Settings, name: str, request_id: str) -> None:
    """Show a live snapshot's progress until it ends.

    :raises JobFailed: it failed or was cancelled.
    """
    from airflow_bottledwater.jobs import snapshots
    from airflow_bottledwater.provision import live
    from airflow_bottledwater.state.control_records import SnapshotReport

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    heard, told = time.monotonic(), False
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("waiting", total=None)
        while True:
            request, report = snapshots.reports(pipeline, name).get(request_id, (None, None))
            if request is None and (report is None or not report.ended):
                report = SnapshotReport.removed()
            if report is not None:
                heard = time.monotonic()
                what = f"{report.state}: {report.rows:,} rows" + (f", waits for {report.what}" if report.what else "")
                bar.update(task, description=what, completed=report.bytes, total=report.total_bytes or None)
                if report.ended:
                    break
            elif time.monotonic() - heard > _SILENT and not told:
                told = True
                log.info("%s", live.publishes(pipeline, name))
            time.sleep(_INTERVAL)
    snapshots.forget(pipeline, name, request_id)
    if report.state != "finished":
        raise JobFailed(f"The live snapshot {report.state}: {report.error}".rstrip(": "))
    say(
        f"{report.rows:,} rows published, {report.superseded:,} superseded by newer ones of the stream, "
        f"{report.tombstones:,} tombstones, {report.dead_letters:,} dead letters."
    )


@click.command("snapshots")
@options(everything=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--pause", metavar="ID", help="Let one wait; what it has published stays.")
@click.option("--resume", metavar="ID", help="Let a paused one go on.")
@click.option("--cancel", metavar="ID", help="End one; what it has published stays.")
def snapshots_command(as_json: bool, pause: str | None, resume: str | None, cancel: str | None, **values: Any) -> None:
    """Show the live snapshots of a pipeline, or pause, resume or cancel one."""
    from airflow_bottledwater.jobs import snapshots
    from airflow_bottledwater.provision import live
    from airflow_bottledwater.state.control_records import SnapshotReport

    if sum(each is not None for each in (pause, resume, cancel)) > 1:
        raise click.UsageError("Give one of --pause, --resume and --cancel.")
    pipeline = pipeline_of(values)
    name = live.name_of(pipeline)
    for request_id, change, word in (
        (pause, functools.partial(snapshots.change, paused=True), "wait"),
        (resume, functools.partial(snapshots.change, paused=False), "go on"),
        (cancel, live.cancel, "end"),
    ):
        if request_id is not None:
            change(pipeline, name, request_id)
            say(f"Live snapshot {request_id} is asked to {word}.")
            return
    found = snapshots.reports(pipeline, name)
    if as_json:
        shown = {
            each: {
                "request": None if request is None else dataclasses.asdict(request),
                "report": None if report is None else dataclasses.asdict(report),
            }
            for each, (request, report) in found.items()
        }
        click.echo(json.dumps(shown, indent=2))
        return
    table = Table(Column(_COLUMNS[0], no_wrap=True), *_COLUMNS[1:])
    for each, (request, report) in found.items():
        table.add_row(each, *_row(request, report or SnapshotReport("asked for")))
    Console(markup=False).print(table)


def _row(request: SnapshotRequest | None, report: SnapshotReport) -> tuple[str, ...]:
    """A line of the table; what is not known is empty."""
    return (
        report.state,
        ", ".join(report.tables or (request.tables if request is not None else ())),
        request.where if request is not None else "",
        *(f"{count:,}" for count in (report.rows, report.superseded, report.tombstones)),
        f"{100 * report.bytes / report.total_bytes:.0f} %" if report.total_bytes else "",
        f"{report.rows_per_second:,.0f}" if report.rows_per_second else "",
        f"{report.seconds_left:,.0f} s" if report.seconds_left is not None else "",
        report.error or (f"waits for {report.what}" if report.what else ""),
    )
