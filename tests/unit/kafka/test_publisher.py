"""What a publisher asks of librdkafka."""

from __future__ import annotations

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.publisher import NO_RECORDS, Publisher, Records, keyed, merged
from airflow_bottledwater.kafka.room import room


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


@pytest.mark.parametrize(
    ("partitions", "given", "records", "kilobytes"),
    [
        (1, {}, 9_999, 1856),
        (4, {}, 9_999, 4639),
        (1, {"batch.num.messages": "20000"}, 39_999, 1856),
        (1, {"batch.num.messages": "1"}, 5_000, 1856),
        (1, {"message.max.bytes": "10000000"}, 9_999, 9766),
    ],
)
def test_the_queue_has_room_for_less_than_a_batch_more_than_may_be_under_way(
    partitions: int, given: dict[str, str], records: int, kilobytes: int
) -> None:
    config = {"batch.num.messages": "5000", "batch.size": "1000000", **given}
    assert room(config, partitions) == {
        "queue.buffering.max.messages": str(records),
        "queue.buffering.max.kbytes": str(kilobytes),
    }


def test_records_that_are_merged_are_in_the_order_of_their_changes_and_keep_their_bytes() -> None:
    def made(rows: list[int]) -> Records:
        records = keyed(0, [(b"k%d" % row, b"v%d" % row, 0) for row in rows])
        records.table["row"] = rows
        return records

    found = merged(made([0, 3, 4]), made([1, 2, 5]))
    assert found.table["row"].tolist() == [0, 1, 2, 3, 4, 5]
    for row in found.table:
        key, value = (bytes(found.data[row[part] : row[part] + row[f"{part}_length"]]) for part in ("key", "value"))
        assert (key, value) == (b"k%d" % row["row"], b"v%d" % row["row"])
    alone = made([7])
    assert merged(alone, NO_RECORDS) is alone and merged(NO_RECORDS, alone) is alone
