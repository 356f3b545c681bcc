"""Tables and topics as OpenLineage's datasets: schemas, from which column each field is made, counts and verdicts.

Datasets are named as https://openlineage.io/docs/spec/naming says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_bottledwater.pipeline.settings import Settings

if TYPE_CHECKING:
    from openlineage.client.event_v2 import Dataset

    from airflow_bottledwater.model.relation import Column
    from airflow_bottledwater.state.pinned import PinnedTable
    from airflow_bottledwater.state.verification import TableResult


class TableDatasets:
    """A table and its topic, as OpenLineage's datasets."""

    def __init__(self, pipeline: Settings, pinned: PinnedTable) -> None:
        from psycopg.conninfo import conninfo_to_dict

        source = conninfo_to_dict(pipeline.postgres)
        host, port = (str(source.get(name, default)).split(",")[0] for name, default in _DEFAULTS.items())
        self._table, self._topic = pinned.table, pinned.topic
        self._source: Any = {
            "namespace": f"postgres://{host}:{port}",
            "name": f"{source.get('dbname', source.get('user', ''))}.{pinned.table.qualified}",
        }
        self._target: Any = {"namespace": f"kafka://{pipeline.first_broker}", "name": pinned.topic}

    def source(self) -> Dataset:
        """The table, with the columns that are published."""
        from openlineage.client.event_v2 import InputDataset

        fields = [(each.name, each.type.name, each.comment) for each in self._table.columns]
        return InputDataset(**self._source, facets={"schema": _schema(fields)})

    def target(self, rows: int | None) -> Dataset:
        """The topic, with what each field is made of.

        :param rows: how many were published; None if that is not known.
        """
        from openlineage.client.event_v2 import OutputDataset
        from openlineage.client.facet_v2 import column_lineage_dataset, output_statistics_output_dataset

        lineage = column_lineage_dataset.ColumnLineageDatasetFacet(
            fields={each.field: self._made_of(each) for each in self._table.columns}
        )
        counted = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(rowCount=rows)
        return OutputDataset(
            **self._target,
            facets={"schema": self._fields(), "columnLineage": lineage},
            outputFacets={} if rows is None else {"outputStatistics": counted},
        )

    def compared(self, found: TableResult | None) -> Dataset:
        """The topic that a verification has read, with its verdict.

        :param found: None if it has not compared this one.
        """
        from openlineage.client.event_v2 import InputDataset
        from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality

        facets: dict[str, Any] = {}
        if found is not None and not found.dropped and not found.outbox:
            told = quality.Assertion(
                assertion="topic_equals_table",
                success=found.verdict == "equal",
                description=f"The topic {self._topic} has the rows of the table {self._table.qualified}.",
                actual=found.reason or found.verdict,
                expected="equal",
            )
            facets = {"dataQualityAssertions": quality.DataQualityAssertionsDatasetFacet(assertions=[told])}
        return InputDataset(**self._target, facets={"schema": self._fields()}, inputFacets=facets)

    def _fields(self) -> Any:
        columns = self._table.columns
        return _schema([(each.field, "text" if each.mask else each.type.name, each.comment) for each in columns])

    def _made_of(self, column: Column) -> Any:
        """From which column a field's values are, and whether they are masked."""
        from openlineage.client.facet_v2 import column_lineage_dataset as lineage

        how = lineage.Transformation(
            type="DIRECT",
            subtype="TRANSFORMATION" if column.mask else "IDENTITY",
            description=column.mask.partition(":")[0],
            masking=bool(column.mask),
        )
        return lineage.Fields([lineage.InputField(**self._source, field=column.name, transformations=[how])])


#: host and port of a connection that does not say them (PGHOST and PGPORT in
#: https://www.postgresql.org/docs/current/libpq-connect.html)
_DEFAULTS = {"host": "localhost", "port": "5432"}


def _schema(fields: list[tuple[str, str, str | None]]) -> Any:
    """
    :param fields: name, type and comment of each.
    """
    from openlineage.client.facet_v2 import schema_dataset

    return schema_dataset.SchemaDatasetFacet(
        fields=[
            schema_dataset.SchemaDatasetFacetFields(name=name, type=kind, description=comment)
            for name, kind, comment in fields
        ]
    )
