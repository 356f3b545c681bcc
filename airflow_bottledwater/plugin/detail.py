"""One pipeline as the page shows it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, StateError
from airflow_bottledwater.jobs import status as reports
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.points import place
from airflow_bottledwater.metrics.rates import rate
from airflow_bottledwater.metrics.sample import newest
from airflow_bottledwater.plugin.overview import row
from airflow_bottledwater.plugin.watch import KafkaLook, KafkaWatch
from airflow_bottledwater.state import store
from airflow_bottledwater.state.control_records import (
    SnapshotReport,
    SnapshotRequest,
    VerifiedRecord,
    decode,
    is_below,
    reading_key,
    snapshots_prefix,
    verified_key,
)
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.tables.plan import NOT_FOLLOWED

#: seconds in which the saved state has to be read, and seconds for which it is kept
_READING, _KEPT = 1.5, 10.0
#: tables that are shown
_TABLES = 500

_states: dict[tuple[str, str], tuple[float, PipelineState | None, str, store.Kept]] = {}
_lock = threading.Lock()


def detail(watch: KafkaWatch, name: str, seen: KafkaLook) -> dict[str, Any]:
    """Everything of one pipeline that does not come from Airflow; no secrets.

    :param name: one of :attr:`KafkaLook.statuses`.
    """
    status = seen.statuses[name]
    shown = row(watch.conn_id, name, status, seen)
    known, unknown = _state(watch.kafka, name, shown["database"], status.slot)
    settings = (known.settings if known is not None else None) or {}
    return {
        **shown,
        "job": {
            "id": status.job.id, "host": status.job.host, "pid": status.job.pid, "epoch": status.job.epoch,
            "started": status.job.started, "repeats": status.repeats,
        },
        "error": status.error,
        "permanent": status.permanent,
        "position": status.position,
        "counters": status.counters,
        "problems": [
            {"kind": p.kind, "subject": p.subject, "reason": p.reason, "remedy": p.remedy, "since": p.since}
            for p in status.standing
        ],
        "pressure": {} if status.ended or name in seen.silent else status.pressure,
        "guard": [{"at": g.at, "limit": g.limit, "step": g.step, "reason": g.reason} for g in status.guard],
        "verification": _verification(name, seen),
        "live": _live(name, seen),
        "tables": _tables(known, name, seen),
        "open_letters": known.open_letters if known is not None else {},
        "publications": _publications(known),
        "settings": settings,
        "unknown": unknown,
    }  # fmt: skip


def settings_of(watch: KafkaWatch, name: str, seen: KafkaLook) -> Mapping[str, Any]:
    """The settings of a pipeline that its saved state has; no secrets.

    :raises StateError: the saved state is not known.
    """
    known, unknown = _state(watch.kafka, name, place(name)["database"], seen.statuses[name].slot)
    if known is None:
        raise StateError(unknown, "It is read again with the next look.")
    return known.settings or {}


def _state(kafka: Mapping[str, str], name: str, database: str, slot: str) -> tuple[PipelineState | None, str]:
    """The pipeline's saved state, some seconds old at most, and why it is not known."""
    key = (str(sorted(kafka.items())), name)
    with _lock:
        at, known, why, kept = _states.get(key, (0.0, None, "", store.Kept()))
    if time.monotonic() - at < _KEPT:
        return known, why
    topic = store.state_topic_name(database, slot)
    try:
        found = PipelineState(store.read_records(kafka, topic, timeout=_READING, kept=kept))
        # two clusters may have a database and a slot of these names: the topic is that of one of them
        other = found.system_identifier not in ("", name.partition("/")[0])
        known, why = (None, f"The topic {topic} has the state of another cluster.") if other else (found, "")
    except BottledWaterError as error:
        known, why = None, f"The saved state is not known: {error}"
    with _lock:
        _states[key] = (time.monotonic(), known, why, kept)
        for old in list(_states)[:-200]:
            del _states[old]
    return known, why


def _tables(known: PipelineState | None, name: str, seen: KafkaLook) -> list[dict[str, Any]]:
    """The tables with their topics, what is published of them, and why one is not followed."""
    status, samples = seen.statuses[name], seen.samples.get(name, ())
    found: dict[str, dict[str, Any]] = {}
    for table in reports.tables(known) if known is not None else ():
        found[table.table] = {"topic": table.topic, "ranges": table.ranges, "snapshot_rows": table.rows,
                              "complete": table.complete}  # fmt: skip
    last = newest(samples, time.time())
    for each in last.values.get(registry.ROWS.name, ()) if last is not None else ():
        table_name, operation = each.labels
        of = found.setdefault(table_name, {})
        of.setdefault("rows", {})[operation] = each.value
        of["rate"] = of.get("rate", 0.0) + rate(samples, registry.ROWS, table_name, operation)
    for each in last.values.get(registry.CHANGED.name, ()) if last is not None else ():
        found.setdefault(each.labels[0], {})["changed"] = each.value
    letters = known.open_letters if known is not None else {}
    for table_name, counts in letters.items():
        found.setdefault(table_name, {})["dead_letters"] = sum(counts.values())
    for problem in status.standing:
        # one that is not followed has no other line
        if problem.subject in found or problem.kind == NOT_FOLLOWED:
            found.setdefault(problem.subject, {}).setdefault("problems", []).append(
                {"kind": problem.kind, "reason": problem.reason, "remedy": problem.remedy}
            )
    ordered = sorted(found.items(), key=lambda item: ("problems" not in item[1], item[0]))
    return [{"table": table_name, **of} for table_name, of in ordered[:_TABLES]]


def _publications(known: PipelineState | None) -> list[str]:
    """The publications, and what each sends, as the stream has seen them last."""
    found = known.coverage.publications if known is not None and known.coverage is not None else {}
    return [f"{name} ({each.sends}{' of all tables' if each.all_tables else ''})" for name, each in found.items()]


def _verification(name: str, seen: KafkaLook) -> dict[str, Any] | None:
    found = decode(VerifiedRecord, seen.records.get(verified_key(name)))
    if found is None or not found.at:
        return None
    return {"at": found.at, "rows": found.rows, "different": found.different, "unverified": found.unverified}


def _live(name: str, seen: KafkaLook) -> list[dict[str, Any]]:
    """The live snapshots that were asked for, and those that have just ended."""
    requested, reported = snapshots_prefix(name), reading_key(name, "")
    requests = {key.removeprefix(requested): raw for key, raw in seen.records.items() if is_below(requested, key)}
    reports_ = {key.removeprefix(reported): raw for key, raw in seen.records.items() if is_below(reported, key)}
    found = []
    for each in requests.keys() | reports_.keys():
        request = decode(SnapshotRequest, requests.get(each))
        report = decode(SnapshotReport, reports_.get(each)) or SnapshotReport("asked for")
        found.append(
            {
                "id": each, "state": report.state, "open": request is not None and not report.ended,
                "paused": request is not None and request.paused, "what": report.what,
                "tables": report.tables or (list(request.tables) if request is not None else []),
                "where": request.where if request is not None else "", "rows": report.rows, "bytes": report.bytes,
                "total_bytes": report.total_bytes, "rows_per_second": report.rows_per_second,
                "seconds_left": report.seconds_left, "error": report.error, "at": report.at,
            }
        )  # fmt: skip
    return sorted(found, key=lambda each: (not each["open"], each["at"]))
