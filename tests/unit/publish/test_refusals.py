"""How the records are found that a broker refuses, with a broker that is stood in for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.errors import RecordRefused, TooSlow
from airflow_bottledwater.kafka.publisher import Records, single
from airflow_bottledwater.publish import refusals
from airflow_bottledwater.publish.session import PublishSession

_INVALID_RECORD = 87


class Broker:
    """Refuses some records, and takes no more than so many one by one before a transaction has to end.

    :param refused: the times of the refused records.
    """

    def __init__(self, refused: set[int], most: int) -> None:
        self.refused, self.most, self.topics = refused, most, ["rows"]
        self.sent = 0

    def refusal(self, batches: Sequence[Records]) -> RecordRefused | None:
        (records,) = batches
        if len(records) > self.most:
            raise TooSlow("It takes too long.", 1 if self.most else 0, 30.0)
        self.sent += len(records)
        times = records.table["time"].tolist()
        bad = [number for number, time in enumerate(times) if time in self.refused]
        return RecordRefused("Kafka refuses a record.", bad[0], _INVALID_RECORD) if bad else None


def _records(count: int) -> Records:
    one = single(0, 0, b"k", b"v")
    table = np.repeat(one.table, count)
    table["time"] = np.arange(count)
    return Records(table, one.data, one.headers, one.label)


def _found(broker: Broker, count: int) -> set[int]:
    return set(refusals.find_refused(cast(PublishSession, cast(Any, broker)), _records(count)))


@given(st.data())
def test_all_refused_records_are_found_however_slow_the_broker_is(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3 * refusals._TOGETHER))
    refused = data.draw(st.sets(st.integers(0, count - 1), max_size=min(refusals._TRIED - 1, count - 1)))
    broker = Broker(refused, data.draw(st.integers(1, 2 * refusals._TOGETHER)))
    assert _found(broker, count) == refused


def test_records_that_were_accepted_are_not_sent_again_for_another_refused_one() -> None:
    broker = Broker({5, 40_000, 99_999}, 50_000)
    assert _found(broker, 100_000) == broker.refused
    assert broker.sent < 100_000 + 4 * refusals._TOGETHER


def test_a_topic_that_refuses_all_records_is_the_cause_and_no_row() -> None:
    with pytest.raises(Refused, match="'rows' refuses every record, so no row has a fault"):
        _found(Broker(set(range(3000)), 3000), 3000)


def test_a_broker_that_takes_nothing_is_waited_for() -> None:
    with pytest.raises(TooSlow):
        _found(Broker(set(), 0), 3)
