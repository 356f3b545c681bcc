"""``tables``: of 500 small tables, seconds in which slot, topics, schemas and records are made (``create``), and those
for which the snapshot holds its locks before the first row is read (``locks``).

Reference: as many pairs of schemas, registered one after the other by the registry's own client.
"""

from __future__ import annotations

import json
import time
from unittest import mock

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.postgres import snapshot
from airflow_bottledwater.snapshot import driver
from tests.benchmarks.common import Workload, emit, log, scaled
from tests.support import running

_TABLES = 500


def _register(stack: DataStack, count: int) -> float:
    client = SchemaRegistryClient({"url": stack.registry.url})
    schema = {"type": "record", "fields": [{"name": "id", "type": "long"}]}
    started = time.monotonic()
    for i in range(count):
        for part in ("key", "value"):
            client.register_schema(f"plain{i}-{part}", Schema(json.dumps({**schema, "name": f"{part}{i}"}), "AVRO"))
    return time.monotonic() - started


class _Exporter(snapshot.SnapshotExporter):
    """Remembers when its locks were taken."""

    locked = 0.0

    def open(self, *arguments: object, **options: object):  # type: ignore[no-untyped-def]
        found = super().open(*arguments, **options)  # type: ignore[arg-type]
        _Exporter.locked = time.monotonic()
        return found


def run(stack: DataStack) -> None:
    """See the module."""
    count = scaled(_TABLES, 10)
    source = Workload(stack, tables="many*")
    source.execute(
        f"""DO $$ BEGIN FOR i IN 1..{count} LOOP
            EXECUTE format('CREATE TABLE many%s (id int PRIMARY KEY, a text, b numeric(10,2))', i);
            EXECUTE format('INSERT INTO many%s SELECT g, g, g FROM generate_series(1, 10) g', i); END LOOP; END $$"""
    )
    started = time.monotonic()
    source.create()
    created = time.monotonic() - started
    held: list[float] = []

    def lanes(tasks):  # type: ignore[no-untyped-def]
        held.append(time.monotonic() - _Exporter.locked)
        return running.in_threads(source.pipeline)(tasks)

    with mock.patch.object(snapshot, "SnapshotExporter", _Exporter):
        result = driver.run(source.pipeline, lanes)
    assert result.tables == count
    log.info("created in %.1f s, locks held for %.1f s", created, held[0])
    plain = _register(stack, count)
    for moment, value in (("create", created), ("locks", held[0])):
        emit("tables", value, "s", {"register": plain}, moment=moment, tables=count, snapshot_seconds=result.seconds)
    source.drop()
