"""The objects that describe a pipeline. Their settings, with rules, sentences and defaults, are those of
:mod:`~airflow_bottledwater.pipeline.groups`; only what tells where to connect is here."""

# without "from __future__ import annotations": these hold rules, which are to be objects and not texts

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from airflow_bottledwater.pipeline import groups
from airflow_bottledwater.pipeline.rules import about
from airflow_bottledwater.pipeline.section import Section
from airflow_bottledwater.pipeline.settings import SETTINGS

_ConnectionId = "the id of a connection of Airflow"
#: the settings that do not tell where to connect
_PUBLIC = {name for name, setting in SETTINGS.items() if not setting.secret}


@dataclass(frozen=True, kw_only=True, repr=False)
class Source(Section, groups.SourceSettings):
    """Where is read, and what."""

    AT: ClassVar[str] = "source."
    conn_id: Annotated[str, about("Airflow's connection of type Postgres.", allowed=_ConnectionId, pattern=r"\S")] = (
        field(default="postgres_default", kw_only=False)
    )
    dsn: Annotated[
        str,
        about(
            "For the command: connection string or URI of the source database (libpq's).",
            allowed="a connection string such as 'service=shop'",
        ),
    ] = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class Kafka(Section, groups.TopicSettings, groups.FormatSettings):
    """Where and how it is published."""

    AT: ClassVar[str] = "kafka."
    conn_id: Annotated[
        str, about("Airflow's connection of type Apache Kafka.", allowed=_ConnectionId, pattern=r"\S")
    ] = field(default="kafka_default", kw_only=False)
    registry: Annotated[
        str,
        about(
            "Airflow's connection of type Schema Registry; not used with JSON.", allowed=_ConnectionId, pattern=r"\S"
        ),
    ] = "schema_registry_default"
    properties: Annotated[
        dict[str, str], about("For the command: properties of librdkafka, with bootstrap.servers.")
    ] = field(default_factory=dict, repr=False)
    registry_properties: Annotated[
        dict[str, str], about("For the command: properties of the schema registry's client, with url.")
    ] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class Types(Section, groups.TypeSettings):
    """In which form types are published."""

    AT: ClassVar[str] = "types."


@dataclass(frozen=True, kw_only=True, repr=False)
class Spark(Section):
    """Where the jobs run."""

    AT: ClassVar[str] = "spark."
    conn_id: Annotated[str, about("Airflow's connection of type Spark.", allowed=_ConnectionId, pattern=r"\S")] = field(
        default="spark_default", kw_only=False
    )
    deploy_mode: Annotated[
        str,
        about(
            "Where the driver runs; empty: as the connection says.",
            allowed="client, cluster or nothing",
            pattern=r"^(client|cluster)?$(?!\n)",
        ),
    ] = ""
    conf: Annotated[dict[str, str], about("Spark's properties.")] = field(default_factory=dict)
    settings_file: Annotated[
        str,
        about("On Kubernetes: the path of the file with the connections in the pods.", allowed="a path"),
    ] = ""
    master: Annotated[str, about("For the command: Spark's master.", allowed="a master of Spark", pattern=r"\S")] = (
        "local[*]"
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedules(Section):
    """Which DAGs the pipeline gets beside the one that streams, and when they run: for files, from which one DAG file
    makes all DAGs."""

    AT: ClassVar[str] = "schedules."
    bounded: Annotated[
        str,
        about(
            "When to publish what was committed since, instead of streaming; empty: stream.",
            allowed="a cron expression or preset of Airflow",
        ),
    ] = ""
    verify: Annotated[
        str,
        about("When to compare topics with tables; empty: never.", allowed="a cron expression or preset of Airflow"),
    ] = ""
    backfill_by: Annotated[
        str,
        about(
            "The column that dates rows, for a DAG that publishes the rows of a day again; empty: none.",
            allowed="a column's name",
        ),
    ] = ""
    approve: Annotated[
        bool, about("A person is asked before a DAG takes something away, such as a slot with changes.")
    ] = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Description(
    Section,
    groups.Metrics,
    groups.VerificationSettings,
    groups.GuardSettings,
    groups.LimitSettings,
    groups.PerformanceSettings,
    groups.Errors,
):
    """A pipeline: its name, what it reads, where and how it publishes, where its jobs run, and all other settings of
    docs/settings.md.

    Values are converted and checked when it is made; a Jinja template is checked when Airflow has rendered it.

    :param name: of the replication slot, and so of the pipeline and its DAGs.
    :raises SettingError: a value is not allowed.
    """

    name: groups.SlotName = field(default="bottledwater", kw_only=False)
    source: Source = field(default_factory=Source)
    kafka: Kafka = field(default_factory=Kafka)
    types: Types = field(default_factory=Types)
    spark: Spark = field(default_factory=Spark)
    schedules: Schedules = field(default_factory=Schedules)
    saved: Annotated[
        bool,
        about("The pipeline exists: take the settings that are not given here from its saved state."),
    ] = False

    def settings(self) -> dict[str, Any]:
        """The slot's name and the settings that were given, or differ from the defaults, by their names in
        :data:`~airflow_bottledwater.pipeline.settings.SETTINGS`; without connections."""
        chosen = {
            name: value
            for section in (self.source, self.kafka, self.types, self)
            for name in section.described()
            if name in _PUBLIC
            and ((value := getattr(section, name)) != SETTINGS[name].default or name in section.given)
        }
        return {"slot": self.name, **chosen}

    def connections(self) -> dict[str, Any]:
        """The connections that the command makes, by their names in
        :data:`~airflow_bottledwater.pipeline.settings.SETTINGS`; they may hold secrets. What is not given is left
        out."""
        given = {
            "postgres": self.source.dsn,
            "kafka": self.kafka.properties,
            "registry": self.kafka.registry_properties,
        }
        return {name: value for name, value in given.items() if value}
