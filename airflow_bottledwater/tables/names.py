"""What is recorded so that nothing hidden is shown once it bears another name, also if it came, or was detached, behind
the record of its table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.options import known_as
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import StateRecord, Stopped, stopped_key, table_key


@dataclass(frozen=True, slots=True)
class NewNames:
    """Names that the state lacks, of tables that the options hide something of.

    :param columns: by the oid of a followed table, the numbers and names of columns that were added since.
    :param detached: the tables that were partitions, see :func:`~airflow_bottledwater.state.options.known_as`; by oid.
    """

    columns: Mapping[int, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    detached: Mapping[int, SourceTable] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.columns or self.detached)

    def records(
        self, known: PipelineState, left: Collection[int], pinned: Collection[int]
    ) -> dict[str, StateRecord | None]:
        """As records.

        :param left: the oids of the tables that go on as they are recorded; ``pinned`` are those that are recorded anew.
        """
        values: dict[str, StateRecord | None] = {
            stopped_key(oid): Stopped(table)
            for oid, table in self.detached.items()
            if oid not in {*known.tables, *pinned}
        }
        for oid in self.columns.keys() & left:
            before = known.tables[oid]
            # what is written again, as its transaction was lost, may be recorded already
            sent = tuple(dict.fromkeys((*before.table.sent, *self.columns[oid])))
            values[table_key(oid)] = replace(before, table=replace(before.table, sent=sent))
        return values


def new_names(pipeline: Settings, known: PipelineState, today: Iterable[SourceTable]) -> NewNames:
    """Compare the catalog with what the state has.

    :param today: tables that are followed, were followed, or are wanted, as they are today.
    """
    mapping, columns, detached = TableMapping.of(pipeline), {}, {}
    for table in today:
        before = known_as(known, table)
        if before is None or not (mapping.hides(before) or mapping.hides(table)):
            continue
        if table.oid in known.tables:
            numbers = {number for number, _ in before.sent}
            if before.sent and (new := tuple(each for each in table.sent if each[0] not in numbers)):
                columns[table.oid] = new
        elif table.oid not in known.stopped:
            detached[table.oid] = before
    return NewNames(columns, detached)
