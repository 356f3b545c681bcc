"""Whether a job is alive: one rule, for whoever watches a job, waits for it or replaces it.

A job writes its record again at every heartbeat. It counts as dead when the record has not changed for ten heartbeats,
at least 30 seconds, by the clock of whoever looks, for all of which Kafka has answered. Who looks only once, and has no
time to wait, goes by the time in the record; since the clock of the job's host may be wrong, that is only a suspicion.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from airflow_bottledwater.state.control_records import JobRecord, StatusRecord, last_status, status_key
from airflow_bottledwater.state.control_topic import ControlTopic

#: how many heartbeats a living job may miss, and the seconds that it has in any case
_HEARTBEATS, _SHORTEST = 10, 30.0
#: heartbeats in which a job that is suspected to be dead has to report, and the seconds that it has in any case
_SUSPECTED, _SHORTEST_SUSPECTED = 3, 5.0
#: seconds between two looks
_LOOK = 0.5


def longest_silence(heartbeat: float = 0.0) -> float:
    """Seconds after which a job whose record did not change counts as dead.

    :param heartbeat: seconds after which it writes its record again; 0 if it has not reported yet.
    """
    return max(_SHORTEST, _HEARTBEATS * heartbeat)


def silence(topic: ControlTopic, changed: float, since: float) -> float:
    """Seconds for which a record has not changed, although Kafka has answered.

    :param changed: when it changed, see :meth:`ControlTopic.get`.
    :param since: when this was looked for first, by the monotonic clock.
    """
    return time.monotonic() - max(changed, since, topic.answering)


def suspect(record: StatusRecord | JobRecord, now: float) -> bool:
    """Whether a job has not reported lately although it has not ended, if the clock of its host is right.

    :param now: seconds since 1970.
    """
    return not record.ended and abs(now - record.at) > longest_silence(record.heartbeat)


def unheard(topic: ControlTopic, suspects: Mapping[str, StatusRecord]) -> set[str]:
    """Which of these pipelines do not report by this host's clock either; this takes some heartbeats.

    :param suspects: their last statuses, by their names.
    :raises Outage: Kafka does not answer.
    """
    silent, began = dict(suspects), time.monotonic()
    while silent and time.monotonic() - began < max(
        _SHORTEST_SUSPECTED, *(_SUSPECTED * (each.heartbeat or 2.0) for each in silent.values())
    ):
        time.sleep(_LOOK)
        silent = {name: each for name, each in silent.items() if topic.get(status_key(name))[1] < began}
    return set(silent)


def next_status(topic: ControlTopic, name: str, heartbeat: float) -> StatusRecord | None:
    """Wait until a pipeline's job reports, for at most the longest silence; None if it does not, so that it is dead.

    :param name: the pipeline's.
    :param heartbeat: see :func:`longest_silence`.
    :raises Outage: Kafka does not answer, or takes no records.
    :raises StateError: see :func:`last_status`.
    """
    topic.read_to_end()  # what is on its way is no sign of life
    began = time.monotonic()
    while silence(topic, 0.0, began) <= longest_silence(heartbeat):
        time.sleep(_LOOK)
        found, changed = topic.get(status_key(name))
        if changed > began and (status := last_status(name, found)) is not None:
            return status
    topic.probe()
    return None
