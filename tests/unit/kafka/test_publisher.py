"""What a publisher asks of librdkafka."""

from __future__ import annotations

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.publisher import Publisher


@pytest.mark.parametrize("name", ["batch.num.messages", "batch.size", "message.max.bytes"])
def test_a_size_that_is_no_number_is_refused_before_anything_is_done(name: str) -> None:
    with pytest.raises(Refused, match=r"does not accept a property: a size is no number: .*'many'"):
        Publisher(
            {"bootstrap.servers": "nowhere:1", name: "many"},
            "bottledwater-1",
            [],
            transaction_timeout=20,
            waiting=lambda _: None,
        )
