"""A pipeline over real servers, with a password that must never be seen, and a picture of what set-up could change."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.schema_registry import SchemaRegistryClient
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.state import control_topic

PASSWORD = "Ma9ker"
"""The password of everybody and everything, though the local superuser, broker and registry ask for none."""


class Source:
    """A database, its server, and the pipeline that is made from it."""

    def __init__(self, server: PostgresServer, dsn: str, kafka: KafkaBroker, registry: SchemaRegistry) -> None:
        self.server, self.kafka, self.registry = server, kafka, registry
        self.name = f"p{uuid.uuid4().hex[:8]}"
        self.dsn = make_conninfo(dsn, password=PASSWORD)
        self.pipeline = Settings(
            postgres=self.dsn,
            kafka={"bootstrap.servers": kafka.bootstrap, "sasl.username": "bob", "sasl.password": PASSWORD},
            registry={"url": registry.url, "basic.auth.user.info": f"bob:{PASSWORD}"},
            slot=self.name,
            topic_prefix=self.name,
            tables=("items",),
            replication_factor=1,
            outage_timeout=10.0,
            create_slot_timeout=20.0,
        )

    def _topics(self) -> dict[str, int]:
        """How many partitions each topic of this database or pipeline has: other tests use the broker, too."""
        found = AdminClient({"bootstrap.servers": self.kafka.bootstrap}).list_topics(timeout=10).topics
        mine = self.name, str(conninfo_to_dict(self.dsn)["dbname"])
        return {name: len(each.partitions) for name, each in found.items() if any(one in name for one in mine)}

    def execute(self, statement: str, *more: str) -> list[tuple[Any, ...]]:
        """Run statements as superuser, each in its own transaction; returns the rows of the last."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for each in (statement, *more):
                cursor = connection.execute(each)
            return cursor.fetchall() if cursor.description else []

    def role(self, attributes: str = "REPLICATION", *grants: str) -> str:
        """Make a role; returns its connection string. In the grants, ``ROLE`` stands for its name."""
        name = f"r{uuid.uuid4().hex[:8]}"
        self.execute(
            f"CREATE ROLE {name} LOGIN {attributes} PASSWORD '{PASSWORD}'", *(g.replace("ROLE", name) for g in grants)
        )
        return make_conninfo(self.dsn, user=name)

    def picture(self) -> dict[str, Any]:
        """Publications and slots, topics with their end offsets, and our subjects with their versions."""
        topics = self._topics()
        # asks again while a topic that was created a moment ago has no leader
        ends = Topics({"bootstrap.servers": self.kafka.bootstrap}).all_ends(topics) if topics else {}
        # jobs of all other tests write there: only what names this pipeline is compared
        control = control_topic.read({"bootstrap.servers": self.kafka.bootstrap})
        schemas = SchemaRegistryClient({"url": self.registry.url})
        subjects = [s for s in schemas.get_subjects() if s.startswith(self.name)]
        return {
            "publications": self.execute("SELECT * FROM pg_publication ORDER BY pubname"),
            "published": self.execute("SELECT * FROM pg_publication_tables ORDER BY 1, 2, 3"),
            "slots": self.execute(
                "SELECT slot_name, plugin, slot_type, database, confirmed_flush_lsn::text"
                " FROM pg_replication_slots ORDER BY 1"
            ),
            "ends": ends,
            "control": {key: value for key, value in control.items() if self.name in key},
            "subjects": {s: schemas.get_versions(s) for s in subjects},
        }

    def changes(self, slot: str = "") -> list[bytes]:
        """What pgoutput gives from the slot, which stays where it is."""
        name = slot or self.name
        rows = self.execute(
            f"SELECT data FROM pg_logical_slot_peek_binary_changes('{name}', NULL, NULL, 'proto_version', '1',"
            f" 'publication_names', '{self.pipeline.publication_name},{self.pipeline.publication_name}_unkeyed')"
        )
        return [row[0] for row in rows]

    def clean(self) -> None:
        """Drop what this test left on the server: its database may be gone already."""
        database = conninfo_to_dict(self.dsn)["dbname"]
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE active_pid IS NULL AND (database = %s OR slot_name LIKE %s)",
                (database, f"{self.name}%"),
            )


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All log records of a test that is over, with their exceptions (``caplog.text`` is empty by then)."""
    records = [*caplog.get_records("setup"), *caplog.get_records("call")]
    return "\n".join(caplog.handler.format(record) for record in records)


@contextmanager
def refused(source: Source, *texts: str) -> Iterator[list[BottledWaterError]]:
    """The block must raise an error of ours with these texts, and leave source, Kafka and registry as they were.

    Gives a list that the error is in afterwards.
    """
    before = source.picture()
    errors: list[BottledWaterError] = []
    with pytest.raises(BottledWaterError) as raised:
        yield errors
    errors.append(raised.value)
    assert PASSWORD not in "".join(traceback.format_exception(raised.value))
    for text in texts:
        assert text in str(raised.value)
    assert source.picture() == before


def refuses(source: Source, pipeline: Settings, *texts: str) -> None:
    """Creating must raise an error of ours with these texts, and leave source, Kafka and registry as they were."""
    with refused(source, *texts):
        create(pipeline)
