"""How a pipeline sees a table: in which forms its types are published, to which topic its rows go, and which schemas
they have there. Whatever depends on a pipeline's settings for tables is asked here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from airflow_bottledwater.encoding import avro, names
from airflow_bottledwater.model.forms import DEFAULT_TYPE_OPTIONS, TypeOptions
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.pipeline.formats import AVRO, Format
from airflow_bottledwater.pipeline.settings import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMapping:
    """How a pipeline sees its tables.

    :param format: of the records.
    :param forms: the forms in which types are published.
    :param prefix: that of all topics.
    """

    format: Format = AVRO
    forms: TypeOptions = DEFAULT_TYPE_OPTIONS
    prefix: str = ""

    @classmethod
    def of(cls, pipeline: Pipeline) -> TableMapping:
        """That of a pipeline."""
        return cls(format=pipeline.record_format, forms=pipeline.forms, prefix=pipeline.topic_prefix)

    @property
    def service_topics(self) -> tuple[str, str]:
        """The topics of the pipeline itself: of events, and of dead letters."""
        return names.service_topic("events", self.prefix), names.service_topic("dead_letters", self.prefix)

    def topic(self, table: Table) -> str:
        """The topic of a table by its name of today. A table that was renamed keeps the one that it has, see
        :func:`airflow_bottledwater.state.identity.topic_of`."""
        return names.topic(table.schema, table.name, self.prefix)

    def by_topic(self, tables: Iterable[Table]) -> dict[str, Table]:
        """These tables by their topics, see :meth:`topic`."""
        return {self.topic(table): table for table in tables}

    def record(self, topic: str) -> names.Record:
        """The name of the Avro records in a topic."""
        return names.record(topic, self.prefix)

    def subjects(self, topic: str, table: Table) -> list[tuple[str, str]]:
        """The registry's subjects of a table's topic, each with its schema; none if the format needs no registry.

        :raises SchemaRefused: see :func:`airflow_bottledwater.encoding.avro.value_schema`.
        """
        return list(avro.subjects(topic, table, self.record(topic))) if self.format.uses_registry else []
