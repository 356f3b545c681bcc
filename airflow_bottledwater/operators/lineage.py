"""What tasks tell OpenLineage: which tables go to which topics, column by column, how many rows were published, and
what a verification has found.

Airflow's OpenLineage provider asks operators for it, if it is installed and configured
(``get_openlineage_facets_on_start``, ``…_on_complete``: airflow/providers/openlineage/extractors/base.py). Datasets
are named as https://openlineage.io/docs/spec/naming says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.operators.assets import server_of
from airflow_bottledwater.pipeline.settings import Settings

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset

    from airflow_bottledwater.model.relation import Column, SourceTable
    from airflow_bottledwater.state.pinned import PinnedTable
    from airflow_bottledwater.state.verification import TableResult, Verification

log = logging.getLogger(__name__)


class LineageMixin:
    """Tells OpenLineage the tables and topics of a task's pipeline.

    :ivar published: rows by topic, once they are counted.
    :ivar verified: what a verification has found.
    """

    published: Mapping[str, int] | None = None
    verified: Verification | None = None
    _kept: OperatorLineage | None = None

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """The pipeline's tables and topics when the task begins. A stream has no other end than being stopped, so this
        is what is known of it while it runs."""
        return self._lineage()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        """The same when the task has ended, with what was counted or compared; see :meth:`keep_lineage`."""
        return self._kept

    def keep_lineage(self) -> None:
        """Read what the provider will ask for at the task's end. The provider asks in a process that it forks off the
        task's, where nothing of Kafka's client works any more that the task has used. An error is only logged."""
        try:
            from airflow.providers.openlineage.conf import is_disabled
        except ImportError:
            return
        if is_disabled():
            return
        try:
            self._kept = self._lineage()
        except BottledWaterError as error:
            log.warning("OpenLineage is not told the tables and topics of the task: %s", error)

    def publishes(self, table: SourceTable) -> bool:
        """Whether the task publishes rows of a table of its pipeline, as far as it is known."""
        return True

    def _lineage(self) -> OperatorLineage:
        """
        :raises BottledWaterError: source or Kafka does not answer; the provider logs it, and the task goes on.
        """
        from airflow.providers.openlineage.extractors import OperatorLineage

        from airflow_bottledwater.jobs import status

        task: Any = self
        pipeline: Settings = task.pipeline_hook.pipeline()
        known = status.known(pipeline)
        inputs: list[Dataset] = []
        outputs: list[Dataset] = []
        for pinned in sorted(known.tables.values(), key=lambda each: each.table.qualified):
            if not self.publishes(pinned.table):
                continue
            names = _Names(pipeline, pinned)
            if self.verified is None:
                inputs.append(names.source())
                outputs.append(names.target((self.published or {}).get(pinned.topic)))
            else:
                found = next((each for each in self.verified.tables if each.topic == pinned.topic), None)
                inputs += [names.source(), names.compared(found)]
        return OperatorLineage(inputs=inputs, outputs=outputs)


class _Names:
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
        self._target: Any = {"namespace": f"kafka://{server_of(pipeline)}", "name": pinned.topic}

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
        if found is not None and not found.dropped:
            told = quality.Assertion(
                assertion="topic_equals_table",
                success=found.verified and found.equal,
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
