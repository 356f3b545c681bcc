"""The settings, group by group: each with its type, its rule, its sentence and its default.

The groups and their order are those of docs/settings.md, whose descriptions begin with the same sentences.
"""

# without "from __future__ import annotations": these hold rules, which are to be objects and not texts

from dataclasses import dataclass, field
from typing import Annotated, Literal

from airflow_bottledwater.model import forms
from airflow_bottledwater.model.slot import SLOT_NAME
from airflow_bottledwater.pipeline.rules import about, limited
from airflow_bottledwater.pipeline.table import Table

#: the one property of librdkafka that must be given
SERVERS = "bootstrap.servers"
DEFAULT_BROKER = "localhost:9092"
DEFAULT_REGISTRY = "http://localhost:8081"

#: the end of a text; "$" alone would allow a line break before it, and patterns in browsers have no "\\Z"
_END = r"$(?!\n)"

#: the name of a topic that the settings name, without the prefix
_TOPIC = "at most 60 letters, digits, dashes, underscores and inner dots"
_TOPIC_NAME = "[A-Za-z0-9_-]([A-Za-z0-9._-]{0,58}[A-Za-z0-9_-])?"
#: one that messages choose
_ROUTE = f"{_TOPIC}; with one {{topic}} for what the messages name"
_CHOSEN_TOPIC = r"[A-Za-z0-9._-]{0,60}\{topic\}[A-Za-z0-9._-]{0,60}"

_CONNECTION = "the id of a connection of Airflow, or nothing"

Seconds = Annotated[float, limited("seconds, from 0.05 to a week", ge=0.05, le=7 * 86_400)]
#: whoever looks whether a job lives waits for several of these
Heartbeat = Annotated[float, limited("seconds, from 0.05 to 300", ge=0.05, le=300)]
_AMOUNT = "a number, or 0 (off)"
Bytes = Annotated[int, limited("bytes, from 64 KiB to 16 GiB", ge=64 << 10, le=16 << 30)]


@dataclass(frozen=True, kw_only=True)
class Connections:
    """Where it connects. These may hold secrets; they are never printed."""

    postgres: Annotated[
        str,
        about(
            "Connection string or URI of the source database (libpq's; a service or password file works).",
            allowed="a connection string such as 'host=db dbname=shop user=cdc', or a URI",
            pattern=r"\S",
        ),
    ] = field(repr=False)
    kafka: Annotated[
        dict[str, str],
        about(
            "Properties of librdkafka: servers, security, tuning.",
            allowed=f"properties of librdkafka with {SERVERS}",
        ),
    ] = field(repr=False, default_factory=lambda: {SERVERS: DEFAULT_BROKER})
    registry: Annotated[
        dict[str, str],
        about(
            "Properties of the schema registry's client; not with JSON.",
            allowed="properties of confluent-kafka's registry client with the url of a schema registry (none with "
            "JSON)",
        ),
    ] = field(repr=False, default_factory=lambda: {"url": DEFAULT_REGISTRY})
    hash_key: Annotated[
        str,
        about(
            "The key of masks that are hashes.",
            allowed="a secret text of at least 16 characters, or nothing",
            pattern=f"^([^\\0]{{16,}})?{_END}",
        ),
    ] = field(repr=False, default="")


SlotName = Annotated[
    str,
    about(
        "Name of the replication slot, and so of the pipeline.",
        allowed="1 to 63 lower-case letters, digits and underscores",
        changes="never",
        pattern=SLOT_NAME,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Name:
    """What it is called."""

    slot: SlotName = "bottledwater"


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """What is read."""

    publication: Annotated[
        str,
        about(
            "Name of the publication of the keyed tables; empty: the slot's name.",
            allowed="at most 54 bytes (a second publication appends _unkeyed)",
            changes="never",
            max_length=54,
        ),
    ] = ""
    tables: Annotated[tuple[str, ...], about("Tables, as [schema.]table with * and ?.")] = ()
    schemas: Annotated[tuple[str, ...], about("Schemas whose tables are published, too, with * and ?.")] = ()
    table_options: Annotated[
        dict[str, Table],
        about(
            "What is published of single tables, and where, by [schema.]table with * and ?.",
            allowed="options of docs/choose.md by the patterns of tables",
        ),
    ] = field(default_factory=dict)
    hash_key_conn_id: Annotated[
        str, about("Airflow's connection whose password is the key of masks that are hashes.", allowed=_CONNECTION)
    ] = ""
    hash_key_file: Annotated[
        str, about("The file whose first line is the key of masks that are hashes.", allowed="a path, or nothing")
    ] = ""
    hash_key_version: Annotated[
        int,
        about("Another number allows another key than at the last start.", allowed="0 to 1000000", ge=0, le=1_000_000),
    ] = 0
    new_tables: Annotated[
        Literal["add", "ignore", "stop"], about("What happens when a table is created that the patterns cover.")
    ] = "add"
    partitioned_tables: Annotated[
        Literal["auto", "root", "leaves"],
        about(
            "Publish a partitioned table as one, under the root's name, or each leaf partition under its own.",
            changes="never",
        ),
    ] = "auto"
    allow_unkeyed: Annotated[
        bool, about("Publish tables without a key: inserts, and under REPLICA IDENTITY FULL updates.")
    ] = False
    skip_snapshot: Annotated[bool, about("Start with the changes from now on.")] = False
    create_publication: Annotated[bool, about("Create the publications, and drop them with the slot.")] = True
    adopt_slot: Annotated[bool, about("Use a slot that exists and that this pipeline has not created.")] = False


#: words in the names of those properties of Kafka clients that contain secrets
SECRET_PROPERTIES = ("password", "secret", "user.info", "token", "passphrase", "key.pem", "oauthbearer.config")
#: the remedy where a Kafka wants a token that only a function makes
TOKENS = (
    "On Amazon MSK, log in with SCRAM or a client certificate instead of IAM; on Google's Managed Kafka with "
    "SASL/PLAIN (a service account and its key). Elsewhere let librdkafka fetch the tokens: sasl.oauthbearer.method = "
    "oidc, with sasl.oauthbearer.token.endpoint.url, sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret."
)


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """In which format it is published."""

    format: Annotated[
        Literal["avro", "json", "json-schema", "protobuf"], about("Format of the records.", changes="never")
    ] = "avro"
    envelope: Annotated[
        Literal["none", "debezium"],
        about(
            "A value is the row, or Debezium's envelope of the old row, the new one and the source.", changes="never"
        ),
    ] = "none"
    before: Annotated[
        Literal["none", "header"],
        about("Send the old row of an update or a deletion as a header, as far as the replica identity gives it."),
    ] = "none"
    envelope_schema: Annotated[
        bool,
        about(
            "With an envelope in JSON, put the schema of Kafka Connect in front of each key and value.",
            changes="never",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TopicSettings:
    """Where and how it is published."""

    topic_prefix: Annotated[
        str,
        about(
            "Put before every topic's name, with a dot.",
            allowed="at most 180 letters, digits, dots, dashes and underscores",
            changes="never",
            pattern=f"^[A-Za-z0-9._-]{{0,180}}{_END}",
        ),
    ] = ""
    create_topics: Annotated[bool, about("Create missing topics.")] = True
    share_topics: Annotated[
        bool,
        about(
            "Allow topics that other pipelines or programs write to, too; no sweep deletes from them what a table has "
            "lost."
        ),
    ] = False
    partitions: Annotated[
        int, about("Number of partitions of topics that are created.", allowed="1 to 10000", ge=1, le=10_000)
    ] = 1
    replication_factor: Annotated[
        int,
        about(
            "Number of replicas of topics that are created; at most the number of brokers.",
            allowed="1 to 32",
            ge=1,
            le=32,
        ),
    ] = 3
    unkeyed_retention_ms: Annotated[
        int,
        about(
            "The property retention.ms of topics created for unkeyed tables, ends of transactions and messages.",
            allowed="milliseconds, or -1 for ever",
            ge=-1,
            le=2**63 - 1,
        ),
    ] = -1
    allow_expiry: Annotated[
        bool, about("Publish tables with a key to topics that delete old records, and so rows that do not change.")
    ] = False
    topic_config: Annotated[dict[str, str], about("Properties of tables' topics that are created.")] = field(
        default_factory=dict
    )
    transaction_topic: Annotated[
        str,
        about(
            "The topic, behind topic_prefix, that gets the end of each source transaction; empty: none.",
            allowed=f"{_TOPIC}, or nothing",
            pattern=f"^({_TOPIC_NAME})?{_END}",
        ),
    ] = ""
    messages: Annotated[
        dict[str, Annotated[str, limited(_ROUTE, pattern=f"^({_TOPIC_NAME}|{_CHOSEN_TOPIC}){_END}")]],
        about(
            "The topics, behind topic_prefix, that get logical messages, by the messages' prefixes with * and ?.",
            allowed=f"prefixes with names of topics: {_ROUTE}",
        ),
    ] = field(default_factory=dict)
    ddl_topic: Annotated[
        str,
        about(
            "The topic, behind topic_prefix, that gets DDL statements, which event triggers tell; empty: none.",
            allowed=f"{_TOPIC}, or nothing",
            pattern=f"^({_TOPIC_NAME})?{_END}",
        ),
    ] = ""
    xid_header: Annotated[bool, about("Also send the source transaction's 32-bit id, as the header xid.")] = False
    snapshot_headers: Annotated[
        bool, about("Also send headers on rows of the snapshot: op is r, pos is all zeros.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TypeSettings:
    """In which form types are published."""

    arrays: Annotated[forms.Arrays, about("Arrays as arrays of their elements, or as PostgreSQL's text.")] = "array"
    composites: Annotated[
        forms.Composites, about("Composite types as records of their attributes, or as PostgreSQL's text.")
    ] = "record"
    ranges: Annotated[
        forms.Ranges, about("Ranges and multiranges as PostgreSQL's text, or as records with both bounds.")
    ] = "text"
    enums: Annotated[forms.Enums, about("Enums as strings, or as Avro's enum (not in JSON).")] = "string"
    numeric: Annotated[
        forms.Numeric,
        about("numeric(p, s) as Avro's decimal; or all numerics as exact text, or as the nearest double."),
    ] = "decimal"
    json_numeric: Annotated[forms.JsonNumeric, about("In JSON, numerics as strings, or as exact numbers.")] = "string"
    json_documents: Annotated[
        forms.Documents, about("In JSON, json and jsonb as strings, or as the values that they are.")
    ] = "string"
    json_geometries: Annotated[
        forms.Geometries, about("In JSON, PostGIS's types as hexadecimal EWKB, or as GeoJSON.")
    ] = "ewkb"
    regs: Annotated[
        forms.Regs,
        about("regclass and its like as the number that is stored, or as the name that it has when it is read."),
    ] = "number"
    temporal: Annotated[
        forms.Temporal,
        about("With Avro, dates and times with their logical types, as the same numbers without, or as ISO 8601 text."),
    ] = "logical"
    not_null: Annotated[
        forms.NotNull, about("With Avro, every field nullable, or those of NOT NULL columns required.")
    ] = "nullable"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How errors are handled."""

    on_error: Annotated[
        Literal["exit", "log", "isolate"], about("What happens at a record that cannot be published.")
    ] = "exit"
    on_truncate: Annotated[Literal["event", "stop"], about("What happens at a TRUNCATE.")] = "event"
    skip_position: Annotated[
        str,
        about(
            "Skip this one change under on_error = exit or isolate.",
            allowed="a position as a record error names it, such as 00000000016B3748/0000000C",
            pattern=f"^([0-9A-Fa-f]{{16}}/[0-9A-Fa-f]{{8}})?{_END}",
        ),
    ] = ""
    outage_timeout: Annotated[
        Seconds,
        about("How long an outage of PostgreSQL, Kafka or the registry is waited out before the job ends, resumable."),
    ] = 300.0


@dataclass(frozen=True, kw_only=True)
class PerformanceSettings:
    """Pace."""

    lanes: Annotated[int, about("Snapshot tasks in parallel.", allowed="1 to 256", ge=1, le=256)] = 2
    range_bytes: Annotated[
        Bytes, about("Size of a range of the snapshot: the unit of a Kafka transaction and of resuming.")
    ] = 16 << 20
    batch_bytes: Annotated[Bytes, about("Size at which a batch of the stream ends, at the next commit.")] = 8 << 20
    max_delay: Annotated[
        float,
        about(
            "How long a committed change may wait for others that then share its Kafka transaction.",
            allowed="seconds, from 0 to 10",
            ge=0,
            le=10,
        ),
    ] = 0.0
    live_share: Annotated[
        float,
        about(
            "The share of the stream's time that a live snapshot may take while the stream has work, too.",
            allowed="0.01 to 1",
            ge=0.01,
            le=1,
        ),
    ] = 0.25
    executor_timeout: Annotated[
        Seconds, about("How long the executors of a cluster have for a first task, in which they try what they need.")
    ] = 60.0
    keepalive_interval: Annotated[Seconds, about("How often the position moves where nothing is to be published.")] = (
        5.0
    )
    heartbeat_interval: Annotated[Heartbeat, about("How often a job writes its status.")] = 2.0


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Limits."""

    buffer_bytes: Annotated[Bytes, about("Size of the receive buffer; when it is full, PostgreSQL is throttled.")] = (
        64 << 20
    )
    max_transaction_bytes: Annotated[
        Bytes,
        about(
            "A source transaction beyond this is cut into several Kafka transactions; large values that are filled in "
            "count, too."
        ),
    ] = 16 << 20
    transaction_timeout: Annotated[
        float,
        about(
            "After this the broker aborts the transaction of a silent producer.",
            allowed="1 to 900 seconds (the broker's transaction.max.timeout.ms)",
            ge=1,
            le=900,
        ),
    ] = 60.0
    create_slot_timeout: Annotated[
        Seconds,
        about(
            "How long creating the slot, and taking the snapshot, wait for running transactions, and for locks that "
            "others have on the tables."
        ),
    ] = 300.0
    lock_queue_limit: Annotated[
        Seconds, about("How long other sessions may wait behind the pipeline's table locks before it gives them up.")
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """The guard."""

    guard_wal_bytes: Annotated[
        int,
        about("Bytes of WAL kept for the slot from which on live snapshots rest.", allowed=_AMOUNT, ge=0, le=2**63 - 1),
    ] = 20 << 30
    guard_wal_share: Annotated[
        float,
        about(
            "The same, as a share of max_slot_wal_keep_size, where the server has it.",
            allowed="0 (off) to 1",
            ge=0,
            le=1,
        ),
    ] = 0.5
    guard_xmin_age: Annotated[
        int,
        about(
            "Age of the xmin that reading tables holds, in transactions, at which its snapshot is given up for a new "
            "one.",
            allowed=_AMOUNT,
            ge=0,
            le=2_000_000_000,
        ),
    ] = 100_000_000
    guard_replica_lag: Annotated[
        float,
        about(
            "Replay lag of a physical standby, in seconds, from which on reading tables rests.",
            allowed="0 (off) to 86400",
            ge=0,
            le=86_400,
        ),
    ] = 60.0
    drop_slot_wal_bytes: Annotated[
        int,
        about(
            "Bytes of WAL kept for the slot at which the job ends and drops it.", allowed=_AMOUNT, ge=0, le=2**63 - 1
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class VerificationSettings:
    """Verification."""

    verify_tables: Annotated[
        tuple[str, ...],
        about("Tables that are verified, as [schema.]table with * and ?; empty: all.", changes="at each use"),
    ] = ()
    verify_sample: Annotated[
        float,
        about(
            "Share of the rows that is verified, chosen by their keys.",
            allowed="more than 0, up to 1",
            changes="at each use",
            ge=0.000001,
            le=1,
        ),
    ] = 1.0
    allow_unverified: Annotated[
        bool,
        about("Let a verification succeed although a table cannot be compared with its topic.", changes="at each use"),
    ] = False
    verify_timeout: Annotated[
        Seconds,
        about("How long a verification waits for the stream to come up to its snapshot.", changes="at each use"),
    ] = 300.0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics."""

    metrics_interval: Annotated[
        float,
        about(
            "How often a job writes a sample of what it measures.",
            allowed="seconds, from 0.1 to 3600",
            ge=0.1,
            le=3600,
        ),
    ] = 10.0
    metrics_retention_days: Annotated[
        float,
        about(
            "How long samples are kept, where their topic is created.",
            allowed="days, from 0.01 to 3650",
            ge=0.01,
            le=3650,
        ),
    ] = 7.0
    metrics_retention_bytes: Annotated[
        int,
        about(
            "How many bytes of samples of all pipelines are kept, where their topic is created.",
            allowed="bytes, 16 MiB or more",
            ge=16 << 20,
            le=2**63 - 1,
        ),
    ] = 1 << 30
