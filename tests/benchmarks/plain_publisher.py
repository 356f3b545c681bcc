"""The latency's reference: source transactions into Kafka transactions, and nothing else (no schema, state or
recovery).

What has arrived goes into one Kafka transaction: one for each source transaction would fall behind whenever the broker
takes longer for a commit than the source between two. Last in it is a record of a state topic; without a state topic,
nothing is in a transaction.

``python plain_publisher.py DSN SLOT PUBLICATION BOOTSTRAP TOPIC STATE``
"""

from __future__ import annotations

import select
import struct
import sys
import time

import psycopg
from confluent_kafka import Producer
from psycopg import pq

_XLOG_HEADER = 25


def main(dsn: str, slot: str, publication: str, bootstrap: str, topic: str, state: str) -> None:
    """Runs until it is terminated."""
    identity = {"transactional.id": slot} if state else {"enable.idempotence": "true"}
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, **identity})
    if state:
        producer.init_transactions()
    connection = psycopg.connect(f"{dsn} replication=database", autocommit=True).pgconn
    result = connection.exec_(
        (
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0"
            f" (proto_version '1', publication_names '{publication}', binary 'true')"
        ).encode()
    )
    assert result.status == pq.ExecStatus.COPY_BOTH, result.error_message
    rows: list[bytes] = []
    whole = arrived = flushed = 0
    told = time.monotonic()
    while True:
        size, message = connection.get_copy_data(1)
        if size == 0 and whole:
            if state:
                producer.begin_transaction()
            for row in rows[:whole]:
                # 'I', oid, 'N', number of columns; then of the first one 'b', its length, the bigint
                producer.produce(topic, row, row[13:21])
            if state:
                producer.produce(state, b"position", b"position")
                producer.commit_transaction()
            else:
                producer.flush()
            rows, whole, flushed = rows[whole:], 0, arrived
            connection.consume_input()
        elif size == 0:
            select.select([connection.socket], [], [], 1.0)
            connection.consume_input()
        elif size < 0:
            return
        else:
            data = bytes(message)
            if data[:1] == b"k" and data[17]:
                told = 0.0
            kind = data[_XLOG_HEADER : _XLOG_HEADER + 1] if data[:1] == b"w" else b""
            if kind == b"I":
                rows.append(data[_XLOG_HEADER:])
            elif kind == b"C" and rows:
                whole = len(rows)
                (arrived,) = struct.unpack_from(">q", data, _XLOG_HEADER + 10)
        if time.monotonic() - told > 1:
            told = time.monotonic()
            connection.put_copy_data(struct.pack(">cqqqqb", b"r", flushed, flushed, flushed, 0, 0))
            connection.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
