"""The properties of the connection, and which of them reach a client."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.clients import made, producer_config, reader_config, transactional_config

#: what a connection could have for other programs
THEIRS = {
    "bootstrap.servers": "k:9092",
    "transactional.id": "mine",
    "delivery.timeout.ms": "1",
    "message.timeout.ms": "1",
    "queue.buffering.max.kbytes": "1",
    "queue.buffering.max.messages": "1",
    "allow.auto.create.topics": "true",
    "compression.type": "zstd",
}


def test_a_record_is_neither_dropped_nor_kept_out_by_properties_of_the_connection() -> None:
    plain = producer_config(THEIRS)
    assert plain == {
        "bootstrap.servers": "k:9092", "compression.type": "zstd", "log_level": "2",
        "allow.auto.create.topics": "false",
    }  # fmt: skip
    own = {"transactional.id": "ours", "transaction.timeout.ms": "60000", "enable.idempotence": "true"}
    assert transactional_config(THEIRS, "ours", 60.0) == {**plain, **own}


@pytest.mark.parametrize(
    ("kind", "properties", "says"),
    [
        (Producer, {"compression.type": "brotli"}, "brotli"),
        (Producer, {"no.such": "1"}, "no.such"),
        # confluent-kafka wants a bool, which is no text
        (Producer, {"delivery.report.only.error": "true"}, "delivery.report.only.error"),
        (Consumer, {"fetch.max.bytes": "1000"}, "fetch.max.bytes"),
    ],
)
def test_a_property_that_a_client_does_not_take_is_refused(kind: Any, properties: dict[str, str], says: str) -> None:
    config = {"bootstrap.servers": "127.0.0.1:1", **properties}
    with pytest.raises(Refused, match=rf"does not accept a property: .*{says}"):
        made(kind, producer_config(config) if kind is Producer else reader_config(config))
