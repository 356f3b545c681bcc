"""What is said of rows of a snapshot that cannot be published."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace

from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.large_rows import LargeRow
from airflow_bottledwater.publish import rows
from airflow_bottledwater.publish.reject import Rejection
from airflow_bottledwater.spark.error_codec import pack, unpack
from tests.support import blocks
from tests.support.wire import TEXT, plain, table


def test_an_error_has_the_key_apart_from_its_message() -> None:
    """Whoever sees the pipeline's status need not be allowed to see rows."""
    version = Version(replace(table(("email", plain(TEXT)), ("v", plain(TEXT))), key=("email",)), "t")
    raw = struct.pack(">hi5si1s", 2, 5, b"j@x.y", 1, b"v")
    error = rows._record_error(version, blocks.rows([raw]), Rejection(0, "it is too large."))
    assert "it is too large. The job's log names it. Nothing" in str(error) and "j@x.y" not in str(error)
    for same in (error, pickle.loads(pickle.dumps(error)), unpack(str(pack(error)))):
        assert isinstance(same, RecordError) and same.row == "the row with email = j@x.y"
    unkeyed = Version(replace(version.table, key=()), "t")
    error = rows._record_error(unkeyed, blocks.rows([raw]), Rejection(0, "it is too large"))
    assert "it is too large. Nothing" in str(error) and not error.row


def test_what_is_said_of_a_large_row_has_no_key() -> None:
    large = LargeRow("(0,1)", {"email": "j@x.y"}, 1 << 30)
    assert "a row of 1,073,741,824 bytes" in large.unsendable and "j@x.y" not in large.unsendable
    assert str(large) == "the row with email = j@x.y (1,073,741,824 bytes)"
