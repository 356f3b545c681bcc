"""What ``status`` prints for people."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from airflow_bottledwater.state.control_records import StatusRecord, decode

_COLUMNS = ("table", "topic", "boundary", "filtered", "ranges", "rows")


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report of :mod:`airflow_bottledwater.state.status`.

    :param console: one without markup: names and errors may have brackets.
    """
    console.print(f"Slot {report['name']}: {_slot(report['slot'])}")
    if (status := decode(StatusRecord, report["job"])) is not None:
        age = time.time() - status.at
        who = f"epoch {status.job.epoch} on {status.job.host}"
        console.print(f"Job: {status.state} ({age:,.0f} s ago), {who}; {status.counters}")
        if status.error:
            console.print(f"Last error: {status.error}", style="red")
    position = report["position"] or "(nothing streamed yet)"
    console.print(f"Stream at {position}; snapshot {'complete' if report['complete'] else 'not complete'}")
    table = Table(*_COLUMNS)
    for row in report["tables"]:
        table.add_row(*(str(row[column]) for column in _COLUMNS))
    console.print(table)


def _slot(slot: dict[str, Any] | None) -> str:
    if slot is None:
        return "there is none"
    return f"{slot['lag']:,} bytes behind, keeps {slot['retained']:,} bytes of WAL, {slot['wal_status']}"
