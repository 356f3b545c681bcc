"""The settings, group by group: each with its type, its rule, its sentence and its default.

The groups and their order are those of docs/settings.md, whose descriptions begin with the same sentences.
"""

# without "from __future__ import annotations": these hold rules, which are to be objects and not texts

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from airflow_bottledwater.model import forms
from airflow_bottledwater.model.lsn import POSITION
from airflow_bottledwater.model.slot import SLOT_NAME
from airflow_bottledwater.settings.kinds import Bytes, Heartbeat, Number, Properties, Seconds, Text, Whole

DEFAULT_BROKER = "localhost:9092"
DEFAULT_REGISTRY = "http://localhost:8081"

_TOPIC_CHARACTERS = re.compile(r"^[A-Za-z0-9._-]{0,180}\Z")


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Where it connects. These may hold secrets; they are never printed."""

    postgres: Annotated[
        str,
        Text("a connection string such as 'host=db dbname=shop user=cdc', or a URI", str.strip),
        "Connection string or URI of the source database (libpq's; a service or password file works).",
    ] = field(repr=False)
    kafka: Annotated[
        dict[str, str],
        Properties("properties of librdkafka with bootstrap.servers", required="bootstrap.servers"),
        "Properties of librdkafka: servers, security, tuning.",
    ] = field(repr=False, default_factory=lambda: {"bootstrap.servers": DEFAULT_BROKER})
    registry: Annotated[
        dict[str, str],
        Properties(
            "properties of confluent-kafka's registry client with the url of a schema registry (none with JSON)"
        ),
        "Properties of the schema registry's client; only with Avro.",
    ] = field(repr=False, default_factory=lambda: {"url": DEFAULT_REGISTRY})


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is read."""

    slot: Annotated[
        str,
        Text("1 to 63 lower-case letters, digits and underscores", SLOT_NAME.match),
        "Name of the replication slot, and so of the pipeline.",
    ] = "bottledwater"
    publication: Annotated[
        str,
        Text("at most 54 bytes (a second publication appends _unkeyed)", lambda name: len(name.encode()) <= 54),
        "Name of the publication of the keyed tables; empty: the slot's name.",
    ] = ""
    tables: Annotated[tuple[str, ...], "Tables, as [schema.]table with * and ?."] = ()
    schemas: Annotated[tuple[str, ...], "Schemas whose tables are published, too, with * and ?."] = ()
    new_tables: Annotated[
        Literal["add", "ignore", "stop"], "What happens when a table is created that the patterns cover."
    ] = "add"
    partitioned_tables: Annotated[
        Literal["auto", "root", "leaves"],
        "Publish a partitioned table as one, under the root's name, or each leaf partition under its own.",
    ] = "auto"
    allow_unkeyed: Annotated[
        bool, "Publish tables without a key: inserts, and under REPLICA IDENTITY FULL updates."
    ] = False
    skip_snapshot: Annotated[bool, "Start with the changes from now on."] = False
    create_publication: Annotated[bool, "Create the publications, and drop them with the slot."] = True
    adopt_slot: Annotated[bool, "Use a slot that exists and that this pipeline has not created."] = False


#: words in the names of those properties of Kafka clients that contain secrets
SECRET_PROPERTIES = ("password", "secret", "user.info", "token", "passphrase", "key.pem", "oauthbearer.config")


@dataclass(frozen=True, kw_only=True)
class Topics:
    """Where and how it is published."""

    topic_prefix: Annotated[
        str,
        Text("at most 180 letters, digits, dots, dashes and underscores", _TOPIC_CHARACTERS.match),
        "Put before every topic's name, with a dot.",
    ] = ""
    output_format: Annotated[Literal["avro", "json"], "Format of the records."] = "avro"
    create_topics: Annotated[bool, "Create missing topics."] = True
    share_topics: Annotated[bool, "Write to topics that belong to another pipeline."] = False
    partitions: Annotated[int, Whole(1, 10_000, "1 to 10000"), "Number of partitions of topics that are created."] = 1
    replication_factor: Annotated[
        int, Whole(1, 32, "1 to 32"), "Number of replicas of topics that are created; at most the number of brokers."
    ] = 3
    unkeyed_retention_ms: Annotated[
        int,
        Whole(-1, 2**63 - 1, "milliseconds, or -1 for ever"),
        "The property retention.ms of topics of unkeyed tables, of events and of dead letters.",
    ] = -1
    topic_config: Annotated[dict[str, str], "Properties of tables' topics that are created."] = field(
        default_factory=dict
    )
    xid_header: Annotated[bool, "Also send the source transaction's 32-bit id, as the header xid."] = False
    snapshot_headers: Annotated[bool, "Also send headers on rows of the snapshot: op is r, pos is all zeros."] = False


@dataclass(frozen=True, kw_only=True)
class Types:
    """In which form types are published."""

    arrays: Annotated[forms.Arrays, "Arrays as arrays of their elements, or as PostgreSQL's text."] = "array"
    composites: Annotated[
        forms.Composites, "Composite types as records of their attributes, or as PostgreSQL's text."
    ] = "record"
    ranges: Annotated[forms.Ranges, "Ranges and multiranges as PostgreSQL's text, or as records with both bounds."] = (
        "text"
    )
    enums: Annotated[forms.Enums, "Enums as strings, or as Avro's enum (not in JSON)."] = "string"
    numeric: Annotated[
        forms.Numeric,
        "numeric(p, s) as Avro's decimal; or all numerics as exact text, or as the nearest double.",
    ] = "decimal"
    json_numeric: Annotated[forms.JsonNumeric, "In JSON, numerics as strings, or as exact numbers."] = "string"
    json_documents: Annotated[
        forms.Documents, "In JSON, json and jsonb as strings, or as the values that they are."
    ] = "string"
    json_geometries: Annotated[forms.Geometries, "In JSON, PostGIS's types as hexadecimal EWKB, or as GeoJSON."] = (
        "ewkb"
    )
    regs: Annotated[
        forms.Regs, "regclass and its like as the number that is stored, or as the name that it has when it is read."
    ] = "number"
    not_null: Annotated[forms.NotNull, "With Avro, every field nullable, or those of NOT NULL columns required."] = (
        "nullable"
    )


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How errors are handled."""

    on_error: Annotated[Literal["exit", "log"], "What happens at a record that cannot be published."] = "exit"
    on_truncate: Annotated[Literal["event", "stop"], "What happens at a TRUNCATE."] = "event"
    skip_position: Annotated[
        str,
        Text(
            "a position as a record error names it, such as 00000000016B3748/0000000C",
            lambda position: not position or POSITION.fullmatch(position),
        ),
        "Skip this one change under on_error = exit.",
    ] = ""
    outage_timeout: Annotated[
        Seconds, "How long an outage of PostgreSQL, Kafka or the registry is waited out before the job ends, resumable."
    ] = 300.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pace."""

    engine: Annotated[Literal["continuous", "micro-batch"], "How Spark runs the stream."] = "continuous"
    lanes: Annotated[int, Whole(1, 256, "1 to 256"), "Snapshot tasks in parallel."] = 2
    range_bytes: Annotated[
        Bytes, "Size of a range of the snapshot: the unit of a Kafka transaction and of resuming."
    ] = 16 << 20
    batch_bytes: Annotated[Bytes, "Size at which a batch of the stream ends, at the next commit."] = 8 << 20
    live_share: Annotated[
        float,
        Number(0.01, 1.0, "0.01 to 1"),
        "The share of the stream's time that a live snapshot may take while the stream has work, too.",
    ] = 0.25
    executor_timeout: Annotated[
        Seconds, "How long the executors of a cluster have for a first task, in which they try what they need."
    ] = 60.0
    keepalive_interval: Annotated[Seconds, "How often the position moves where nothing is to be published."] = 5.0
    heartbeat_interval: Annotated[Heartbeat, "How often a job writes its status."] = 2.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits."""

    buffer_bytes: Annotated[Bytes, "Size of the receive buffer; when it is full, PostgreSQL is throttled."] = 64 << 20
    max_transaction_bytes: Annotated[
        Bytes,
        "A source transaction beyond this is cut into several Kafka transactions; large values that are filled in count, too.",
    ] = 16 << 20
    transaction_timeout: Annotated[
        float,
        Number(1, 900, "1 to 900 seconds (the broker's transaction.max.timeout.ms)"),
        "After this the broker aborts the transaction of a silent producer.",
    ] = 60.0
    create_slot_timeout: Annotated[
        Seconds,
        "How long creating the slot, and taking the snapshot, wait for running transactions, and for locks that others "
        "have on the tables.",
    ] = 300.0
    lock_queue_limit: Annotated[
        Seconds, "How long other sessions may wait behind the snapshot's table locks before the snapshot ends."
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Verification."""

    verify_tables: Annotated[
        tuple[str, ...], "Tables that are verified, as [schema.]table with * and ?; empty: all."
    ] = ()
    verify_sample: Annotated[
        float, Number(0.000001, 1, "more than 0, up to 1"), "Share of the rows that is verified, chosen by their keys."
    ] = 1.0
    verify_timeout: Annotated[Seconds, "How long a verification waits for the stream to come up to its snapshot."] = (
        300.0
    )
