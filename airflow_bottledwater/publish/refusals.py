"""Finds out why the broker refuses records: because of the topics' settings, missing rights, a clock, or a row.

A broker refuses a whole batch because of one record, so the refused records are found by sending them one by one. All
other causes are ruled out first, so that no row becomes a dead letter that has no fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.clients import GRANT
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused, TooSlow
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state.records import StateRecord

#: https://kafka.apache.org/protocol#protocol_error_codes
_MSG_SIZE_TOO_LARGE, _TOPIC_AUTHORIZATION_FAILED, _INVALID_TIMESTAMP = 10, 29, 32
#: UNKNOWN_TOPIC_OR_PARTITION and librdkafka's own _UNKNOWN_TOPIC, INVALID_TOPIC_EXCEPTION
_OF_A_TOPIC = (3, -188, 17)
#: records that are sent one by one in one transaction at first: each is a request of its own, of which five are under
#: way, and all have to be confirmed within half of the transaction's time-out
_TOGETHER = 1000
#: other records of a topic, the smallest first, of which none is accepted if the topic is the cause
_TRIED = 5


def rule_out(
    session: PublishSession,
    error: RecordRefused,
    service: Sequence[Records],
    progress: Mapping[str, StateRecord | None],
) -> None:
    """Raise an error if the broker's refusal has another cause than a row; return if a row may be the cause.

    :param service: the records for the service topics in the same transaction: events and dead letters.
    :param progress: see :meth:`PublishSession.transact`.
    :raises NewProducerNeeded: the topics' limits have changed, the topic does exist, or a clock is wrong: the work is
        to be repeated.
    :raises StateError: a topic is missing, or is no longer the one that was pinned.
    :raises Refused: trying again does not help: rights or the service topics' settings are the cause.
    """
    session.close()
    if session.compare_topics():
        raise NewProducerNeeded(f"{error.what} The limits of the topics were changed since they were last compared")
    if error.code in _OF_A_TOPIC:
        raise NewProducerNeeded(f"{error.what} The topic exists")
    if error.code == _TOPIC_AUTHORIZATION_FAILED:
        raise Refused(f"{error.what} Kafka denies Write on one of the topics {', '.join(session.topics)}.", GRANT)
    _check_time(error)
    if (refused := session.refusal([session.first_record, *service, *session.progress_records(progress)])) is not None:
        # of several records, the broker gives each the code of the batch that it was in
        _check_time(refused)
        raise Refused(
            f"The service topics do not take records: {refused.what}",
            f"Mend the settings (max.message.bytes if a record is too large) or rights of "
            f"{', '.join(session.topics[session.events :])}, then start again; no row has a fault.",
        )


def find_refused(session: PublishSession, records: Records) -> dict[int, str]:
    """Find the records that the broker refuses: each is refused even in a batch of its own, and the others are accepted
    without them.

    :returns: the reason for each, by the record's number.
    :raises NewProducerNeeded: the attempt failed, so that it is not known whether there are any; or a clock is wrong.
    :raises Refused: a topic accepts no record at all, so that no row has a fault.
    """

    def refusal(numbers: npt.NDArray[np.int64]) -> RecordRefused | None:
        return session.refusal([Records(records.table[numbers], records.data, records.headers, records.label)])

    found: dict[int, str] = {}
    accepted, size = 0, _TOGETHER
    while accepted < len(records):
        piece = np.setdiff1d(np.arange(accepted, min(accepted + size, len(records))), list(found))
        try:
            error = refusal(piece) if len(piece) else None
        except TooSlow as slow:
            if len(piece) < 2 or not slow.confirmed:
                raise
            size = len(piece) // 2
            continue
        if error is None:
            accepted += size
            continue
        _check_time(error)  # when records are sent together, the broker reports another code for this
        culprit = int(piece[error.record])
        if error.code != _MSG_SIZE_TOO_LARGE:
            topic = records.table[culprit]["topic"]
            others = np.setdiff1d(np.flatnonzero(records.table["topic"] == topic), [*found, culprit])
            others = others[np.argsort(records.sizes()[others], kind="stable")]
            tried = np.unique(np.linspace(0, len(others) - 1, min(len(others), _TRIED)).astype(np.int64))
            if len(others) and all(refusal(others[[each]]) is not None for each in tried):
                raise Refused(
                    f"{error.what} Topic {session.topics[int(topic)]!r} refuses every record, so no row has a fault.",
                    "Mend the topic's settings, or what checks its records in the broker; then start again.",
                )
        found[culprit] = error.what
    return found


def _check_time(error: RecordRefused) -> None:
    """Check that a record is not refused for its timestamp.

    :raises NewProducerNeeded: it is. A host that comes from sleep has the right time some minutes later.
    """
    if error.code == _INVALID_TIMESTAMP:
        raise NewProducerNeeded(
            f"{error.what} The time of a record is too far from the broker's.",
            "Compare the clocks of this host, of PostgreSQL and of the brokers, and see the topics' "
            "message.timestamp.after.max.ms and message.timestamp.before.max.ms.",
        )
