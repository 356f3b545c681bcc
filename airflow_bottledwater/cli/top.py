"""What ``top`` shows: the pipelines of a Kafka, those with something wrong first, or one with its tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from airflow_bottledwater.jobs.alive import suspect
from airflow_bottledwater.jobs.pipelines import HealthLimits, statuses, wrong
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.pipelines import Pipelines
from airflow_bottledwater.metrics.rates import quantile, rate
from airflow_bottledwater.metrics.sample import Sample, newest
from airflow_bottledwater.model.amounts import duration, size
from airflow_bottledwater.state.control_records import StatusRecord

_COLUMNS = ("Pipeline", "State", "Rows/s", "Behind", "Delay p95", "WAL kept", "Dead letters", "Memory")
_TABLE_COLUMNS = ("Table", "Inserts/s", "Updates/s", "Deletes/s")
#: tables that are shown of one pipeline
_TABLES = 30


def screen(found: Pipelines, slot: str = "") -> RenderableType:
    """What is shown now.

    :param slot: only the pipelines with this slot, with their tables; empty for all.
    """
    records, now = found.read(), time.time()
    shown = {name: status for name, status in statuses(records).items() if slot in ("", status.slot)}
    if not shown:
        return Text("No pipeline has ever reported to this Kafka." if not slot else f"No pipeline has a slot {slot!r}.")
    table = Table(*_COLUMNS, expand=True)
    for column in table.columns[2:]:
        column.justify = "right"
    trouble = {
        name: wrong(name, status, records, HealthLimits(), alive=not suspect(status, now), now=now)
        for name, status in shown.items()
    }
    for name, status in sorted(shown.items(), key=lambda item: (not trouble[item[0]], item[0])):
        samples = found.samples(name)
        table.add_row(*_row(name, status, samples, now), style="red" if trouble[name] else "")
    lines = [Text(f"{name}: {line}", style="red") for name, of in trouble.items() for line in of]
    tables = [_tables(found.samples(name), now) for name in shown] if slot else []
    return Group(table, *lines, *tables)


def _row(name: str, status: StatusRecord, samples: Sequence[Sample], now: float) -> list[str]:
    state = "does not report" if suspect(status, now) else status.state
    last = newest(samples, now)
    if last is None:
        return [name, state, "", "", "", "", f"{status.open_dead_letters:,}", ""]
    behind, seconds = last.value(registry.LAG_BYTES.name), last.value(registry.LAG_SECONDS.name)
    late = quantile(samples, registry.DELAY_SECONDS, 0.95)
    limit, kept = last.value(registry.WAL_LIMIT.name), last.value(registry.WAL_KEPT.name)
    return [
        name,
        state,
        f"{rate(samples, registry.ROWS):,.0f}",
        "" if behind is None else size(behind) + (f", {duration(seconds)}" if seconds else ""),
        "" if late is None else f"≤ {duration(late)}",
        "" if kept is None else size(kept) + (f" of {size(limit)}" if limit else ""),
        f"{status.open_dead_letters:,}",
        size(last.value(registry.MEMORY.name) or 0),
    ]


def _tables(samples: Sequence[Sample], now: float) -> Table:
    table, last = Table(*_TABLE_COLUMNS), newest(samples, now)
    rows = last.values.get(registry.ROWS.name, []) if last is not None else []
    rates = {
        name: [rate(samples, registry.ROWS, name, operation) for operation in ("insert", "update", "delete")]
        for name in {each.labels[0] for each in rows}
    }
    for name, of in sorted(rates.items(), key=lambda item: -sum(item[1]))[:_TABLES]:
        table.add_row(name, *(f"{each:,.0f}" for each in of))
    return table
