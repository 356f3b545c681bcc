"""Values far larger than usual: what is published, what is refused, and how much memory it takes to say so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_bottledwater.errors import RecordError
from tests.support.topics import MakeFlow

MIB = 1 << 20

#: one value, encoded as a lane and as the stream do it; prints the verdict, and by how much the peak grew, as a
#: multiple of its size
ENCODE = """
import resource, struct, sys
import numpy as np
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import encode_changes
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED, Completed
from airflow_bottledwater.warm import warm_up
from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.encoding.program import Target, compile_programs
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import FORMATS

size, format, limit, fill = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
warm_up()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
table = SourceTable(1, "public", "t", "d", (), (Column("v", ColumnType(25, -1, 25, -1, "b", "text")),))
programs = compile_programs([(table, Target(0, 1))], FORMATS[format], copied=False)
head = b"I" + struct.pack(">IcHci", 1, b"N", 1, b"b", size)
data = np.full(len(head) + size, fill, dtype=np.uint8)
data[: len(head)] = np.frombuffer(head, dtype=np.uint8)
changes = np.zeros(1, dtype=CHANGE)
changes[0]["kind"], changes[0]["length"] = ord("I"), data.size
batch = Batch(Position(0), Position(1), data, changes, (Version(table, "t"),))
encoded = encode_changes(Completed(batch, NOTHING_CONVERTED), programs, largest=limit)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(len(encoded.records), len(encoded.rejections), (peak - before) / size)
"""


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("format", "limit", "fill", "made"),
    [
        ("avro", 1 * MIB, 120, (1, 0)),  # made, and refused by its size behind that
        ("avro", 1_000_000_000, 120, (1, 0)),
        ("json", 1 * MIB, 120, (1, 0)),
        ("json", 1 * MIB, 1, (0, 1)),  # each character takes six
    ],
)
def test_a_value_of_500_megabytes_takes_at_most_four_times_its_size(
    format: str, limit: int, fill: int, made: tuple[int, int]
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", ENCODE, "500000000", format, str(limit), str(fill)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    records, rejections, times = process.stdout.split()
    assert (int(records), int(rejections)) == made
    assert float(times) <= 4.0


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT 1, repeat('x', 50000000)",
    )


@pytest.mark.long
def test_a_row_of_50_megabytes_goes_both_ways_where_its_topic_takes_it(make_flow: MakeFlow) -> None:
    flow = make_flow(topic_config={"max.message.bytes": "60000000"})
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO t SELECT 2, repeat('y', 50000000)")
    flow.stream()
    assert flow.compare("t").differences == []


def test_without_that_its_limit_is_said(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    with pytest.raises(RecordError, match=r"A row of public\.t cannot be published .* has more than 1,048,588 bytes"):
        flow.snapshot()
    flow.change(on_error="log")
    assert flow.snapshot().dead_letters == 1
    flow.execute("INSERT INTO t SELECT 2, repeat(chr(1), 50000000)")
    assert flow.stream()["dead_letters"] == 2
    letters = [m.value for m in flow.dead_letters()]
    assert [letter["truncated"] for letter in letters] == [True, True]
    assert "has more than 1,048,588 bytes, which is the largest max.message.bytes" in letters[1]["error"]
    assert not any("again" in letter for letter in letters)
