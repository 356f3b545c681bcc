"""Whether a pipeline's job works, for probes: told by its status in Kafka and by the slot, so on any host, and within a
given time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.jobs.alive import longest_silence
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.dsn import describe
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state import control_topic, letters, problems
from airflow_bottledwater.state.control_records import StatusRecord, last_status, status_key


def problem(
    found: SlotState | None,
    status: StatusRecord | None,
    *,
    max_lag: int | None,
    max_age: float | None,
    now: float,
    max_dead_letters: int = 0,
) -> str:
    """Why a pipeline does not work, in one sentence; empty if it does.

    :param found: its slot; None if there is none.
    :param status: the last status of its job; None if there is none.
    :param max_lag: bytes of WAL that the slot may be behind; None for any number.
    :param max_age: seconds that the status may be old; None for ten heartbeats, at least 30.
    :param now: seconds since 1970.
    :param max_dead_letters: how many dead letters may be open.
    """
    if status is None:
        return "No job has ever reported."
    if status.failed:
        return f"The job failed {'for good' if status.permanent else 'for a transient reason'}: {status.error}"
    if status.ended:
        return f"No job runs: the last one is {status.state}. {status.error}".strip()
    age, allowed = now - status.at, longest_silence(status.heartbeat) if max_age is None else max_age
    if age > allowed:
        return f"The job has not reported for {age:.0f} s, more than {allowed:.0f} s: it died, or Kafka does not take its reports."
    if status.error:
        return f"The job reports an error: {status.error}"
    if status.state == "starting":
        return "The job is still starting."
    if found is None:
        return f"There is no slot {status.slot!r}."
    try:
        slot.check(found, found.database)
    except BottledWaterError as error:
        return str(error)
    if max_lag is not None and found.lag > max_lag:
        return f"The slot is {found.lag:,} bytes behind, more than {max_lag:,}."
    if status.open_dead_letters > max_dead_letters:
        return problems.summary(status.problems) or f"{letters.are_open(status.open_dead_letters)}."
    return problems.summary(each for each in status.problems if each.kind != letters.KIND)


def look(pipeline: Settings, *, timeout: float) -> tuple[SlotState | None, StatusRecord | None]:
    """The pipeline's slot, and the last status of its job; each None if there is none.

    :param timeout: seconds for both together, whatever the servers do.
    :raises Outage: PostgreSQL or Kafka has not answered by then, or cannot be reached.
    :raises BottledWaterError: one of them refuses to answer.
    """
    deadline = time.monotonic() + timeout
    source = _ask(lambda: _slot(pipeline))
    records = _ask(lambda: control_topic.read(pipeline.kafka))
    cluster, found = _answer(source, deadline, timeout, describe(pipeline.postgres))
    servers = pipeline.kafka.get("bootstrap.servers", "")
    told = _answer(records, deadline, timeout, f"Kafka at {servers}")
    name = cluster.pipeline(pipeline.slot)
    return found, last_status(name, told.get(status_key(name)))


def _slot(pipeline: Settings) -> tuple[Cluster, SlotState | None]:
    with session(pipeline.postgres, "Reading the slot") as connection:
        return identify(connection), slot.state(connection, pipeline.slot)


def _ask(question: Callable[[], Any]) -> queue.SimpleQueue[Any]:
    """Ask in a thread of its own, which is left alone if it does not end: a process ends without it.

    :returns: the queue that its answer, or its error, will be put into.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(question())
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=run, name="probe", daemon=True).start()
    return answers


def _answer(answers: queue.SimpleQueue[Any], deadline: float, timeout: float, who: str) -> Any:
    try:
        found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise Outage(f"{who} has not answered within {timeout:g} s.") from None
    if isinstance(found, BaseException):
        raise found
    return found
