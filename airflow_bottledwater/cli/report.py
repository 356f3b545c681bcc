"""The readable report that ``status`` prints."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from airflow_bottledwater.jobs.status import PipelineReport
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state import letters

_COLUMNS = ("table", "topic", "boundary", "filtered", "ranges", "rows")


def show(report: PipelineReport, console: Console) -> None:
    """Print a report.

    :param console: a console with markup turned off, since names and errors may contain brackets.
    """
    console.print(f"Slot {report.name}: {_slot(report.slot)}")
    if (job := report.job) is not None:
        age = time.time() - job.at
        console.print(f"Job: {job.state} ({age:,.0f} s ago), epoch {job.job.epoch} on {job.job.host}; {job.counters}")
        if job.error:
            console.print(f"Last error: {job.error}", style="red")
        for problem in (each for each in job.problems if each.kind != letters.KIND):
            console.print(f"Problem for {time.time() - problem.since:,.0f} s: {problem}", style="red")
    for name, counts in report.open_letters.items():
        console.print(f"Open dead letters of {name}: {letters.described(counts)}", style="red")
    position = report.position or "(nothing streamed yet)"
    console.print(f"Stream at {position}; snapshot {'complete' if report.complete else 'not complete'}")
    table = Table(*_COLUMNS)
    for row in report.tables:
        table.add_row(*(str(getattr(row, column)) for column in _COLUMNS))
    console.print(table)


def _slot(slot: SlotState | None) -> str:
    if slot is None:
        return "there is none"
    return f"{slot.lag:,} bytes behind, keeps {slot.retained:,} bytes of WAL, {slot.wal_status}"
