"""The readable report that ``status`` prints."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from airflow_bottledwater.jobs.alive import suspect
from airflow_bottledwater.jobs.status import PipelineReport, TableReport
from airflow_bottledwater.model.amounts import duration, size
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state import letters
from airflow_bottledwater.state.control_records import StatusRecord

#: counters that people read, and what they are called
_COUNTERS = {
    "published": "records",
    "events": "events",
    "messages": "logical messages",
    "superseded": "left out for a newer version of the row",
    "skipped_changes": "left to the snapshot, or of tables that are not followed",
}
_COLUMNS = ("Table", "Topic", "Snapshot", "Rows")


def show(report: PipelineReport, console: Console) -> None:
    """Print a report.

    :param console: a console with markup turned off, since names and errors may contain brackets.
    """
    lines = Table.grid("", "", padding=(0, 2))
    now = time.time()
    for name, text, style in _lines(report, now):
        lines.add_row(name, text, style=style)
    console.print(f"Pipeline {report.name} of database {report.database}")
    console.print(lines)
    table = Table(*_COLUMNS)
    table.columns[-1].justify = "right"
    for row in report.tables:
        table.add_row(row.table, row.topic, _snapshot(row), f"{row.rows:,}")
    if report.tables:
        console.print(table)


def _lines(report: PipelineReport, now: float) -> Iterator[tuple[str, str, str]]:
    """What is said, each with its name and its style."""
    job = report.job
    yield "Job", *_job(job, now)
    if job is not None and job.error:
        yield "Last error", job.error, "red"
    for problem in (each for each in job.standing if each.kind != letters.KIND) if job is not None else ():
        yield "Problem", f"{problem} (for {duration(now - problem.since)})", "red"
    for step in job.guard[-3:] if job is not None else ():
        yield "Guard", f"{duration(now - step.at)} ago: {step.reason}", "yellow"
    for name, counts in report.open_letters.items():
        yield "Dead letters", f"{name}: {letters.described(counts)}, open", "red"
    if job is not None and not job.ended and job.lag is not None:
        yield "Behind", f"{size(job.lag)} and {duration(job.delay or 0.0)}, as the job has measured", ""
    yield "Slot", *_slot(report.slot)
    yield "Snapshot", "complete" if report.complete else "not complete", ""
    counters = report.counters | (job.counters if job is not None else {})
    counted = [f"{counters[name]:,} {what}" for name, what in _COUNTERS.items() if counters.get(name)]
    yield "Published", ", ".join(counted) or "nothing by the stream yet", ""
    yield "Position", report.position or "none: nothing was streamed yet", ""


def _job(job: StatusRecord | None, now: float) -> tuple[str, str]:
    if job is None:
        return "none has ever reported", ""
    ago, where = duration(max(0.0, now - job.at)), f"process {job.job.pid} on {job.job.host}"
    if suspect(job, now):
        return f"has not reported for {ago}: it was killed, or hangs ({job.job.kind}, {where})", "red"
    kind = f"{job.job.kind} job"
    if job.ended:
        return f"{kind} {job.state} {ago} ago, {where}", "red" if job.failed else ""
    return f"{kind} {job.state}, reported {ago} ago by {where}", "yellow" if job.state == "waiting" else ""


def _slot(slot: SlotState | None) -> tuple[str, str]:
    if slot is None:
        return "there is none", "red"
    limit = "" if slot.safe_wal_size is None else f"; {size(slot.safe_wal_size)} more until it may be lost"
    text = f"{size(slot.lag)} behind; PostgreSQL keeps {size(slot.retained)} of WAL ({slot.wal_status}){limit}"
    return text, "" if slot.wal_status in ("reserved", "extended") and not slot.invalidated else "red"


def _snapshot(table: TableReport) -> str:
    done, _, all_ = table.ranges.partition("/")
    if table.complete:
        return "complete"
    return f"{done} of {all_} ranges" if all_ not in ("", "0") else "not begun"
