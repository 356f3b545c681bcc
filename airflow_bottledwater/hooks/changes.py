"""Reads in a task the changes that have led to its run, each exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.hooks.connections import connection
from airflow_bottledwater.hooks.pipeline import PipelineHook, properties
from airflow_bottledwater.model.changes import ChangeRange
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.pipeline.argument import PipelineArgument, described

if TYPE_CHECKING:
    from airflow.sdk import Asset

#: the key in the asset's store of how far each DAG has read: offsets by partition, by topic's id, by DAG's id
READ = "bottledwater_read"
#: earlier events of the asset that are looked at: more than are announced twice or too late
_EARLIER = 100


@dataclass(frozen=True, slots=True)
class Change:
    """A record of a table's topic.

    :param table: ``schema.table``.
    :param key: the record's key, as it is in Kafka; None of a table without a key.
    :param value: the record's value, as it is in Kafka; None of a delete.
    :param operation: ``c``, ``u``, ``d`` (also of a key that a sweep removed); ``r`` of a row of a snapshot.
    :param position: of the change; empty of a row of a snapshot, and of what a sweep removed, see
        docs/message-format.md.
    :param snapshot: of a row that was read again, and of what its sweep removed, the id of its live snapshot and the
        LSN that it is of.
    :param timestamp: milliseconds since 1970.
    """

    table: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    operation: str
    position: str
    snapshot: str
    timestamp: int


class ChangesHook(BaseHook):
    """Reads the changes of which an asset with a
    :class:`~airflow_bottledwater.triggers.table_changed.TableChangedTrigger` has told.

    :param kafka_conn_id: the connection of type Apache Kafka.
    """

    conn_name_attr = "kafka_conn_id"
    default_conn_name = "kafka_default"

    def __init__(self, kafka_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kafka_conn_id = kafka_conn_id

    @staticmethod
    def of_run(context: Mapping[str, Any], asset: Asset) -> ChangeRange:
        """The changes that this DAG run is to read: those of the events that have triggered it, without what earlier
        events of the asset have told already. So each change is in the range of exactly one run of a DAG, also if an
        event came twice or too late; and a run that is cleared has the same range again.

        :param context: the task's; the asset has to be among its ``inlets``.
        :return: an empty range, if the run was not triggered by the asset.
        :raises AirflowFailException: the asset is not among the task's inlets.
        """
        events = sorted(context["triggering_asset_events"].get(asset, ()), key=lambda event: event.timestamp)
        if not events:
            return ChangeRange()
        try:
            inlet = context["inlet_events"][asset]
        except KeyError:
            raise AirflowFailException(
                f"The asset {asset.name!r} is not among the task's inlets, so that the task does not see its earlier "
                "events. Give the task inlets=[...] with this asset."
            ) from None
        _keep_read(context, asset, [told for event in events if (told := _range(event))])
        known = list(inlet.before(events[-1].timestamp.isoformat()).ascending(False).limit(_EARLIER + len(events)))
        found = ChangeRange()
        for event in events:
            earlier = [told for each in known if each.timestamp < event.timestamp and (told := _range(each))]
            part = (_range(event) or ChangeRange()).without([*earlier, found])
            found = found if part.empty else found.joined(part)
        return found

    def records(self, changes: ChangeRange, tables: Sequence[str] = ()) -> Iterator[Change]:
        """The committed records of a range, each once; in order per key, and per partition in the order of the source's
        commits.

        :param tables: ``schema.table``; none for all.
        :raises StateError: records were deleted before they were read.
        :raises Outage: Kafka does not answer.
        """
        from airflow_bottledwater.kafka.offsets import RangeReader, headers_of
        from airflow_bottledwater.kafka.topics import Topics

        kafka = properties(connection(self.kafka_conn_id, kind="Kafka"))
        chosen = {table: each for table, each in changes.tables.items() if not tables or table in tables}
        present = Topics(kafka).describe([each.topic for each in chosen.values() if each.records])
        with RangeReader(kafka) as reader:
            for table, each in chosen.items():
                if each.records:
                    reader.check(each.topic, each.id, present)
                for message in reader.read(each.topic, dict(enumerate(each.start)), dict(enumerate(each.end))):
                    headers = headers_of(message)
                    value = message.value()
                    yield Change(
                        table,
                        each.topic,
                        message.partition() or 0,
                        message.offset() or 0,
                        message.key(),
                        value,
                        # without a header, it is a row of a snapshot, or the tombstone of a key that a sweep removed
                        headers.get("op", "d" if value is None else "r"),
                        headers.get("pos", ""),
                        headers.get("snapshot", ""),
                        message.timestamp()[1],
                    )

    @staticmethod
    def between(pipeline: PipelineArgument, tables: Sequence[str], start: str, end: str) -> ChangeRange:
        """The range of the changes between two positions of the source, for whoever has no event: all changes of
        transactions whose final LSN is at least ``start`` and below ``end``. Their places are searched in the topics.

        :param pipeline: as the operators take it; only its name and its connections are used.
        :param tables: ``[schema.]table``, with ``*`` and ``?``.
        :param start: an LSN, such as ``0/16B3748``.
        :param end: an LSN that the pipeline has passed.
        :raises StateError: the pipeline has no such table, or has not come so far.
        :raises Outage: the source or Kafka does not answer.
        """
        from airflow_bottledwater.jobs import changes
        from airflow_bottledwater.provision import live

        of = described(pipeline)
        found = PipelineHook.of_state(of.source.conn_id, of.kafka.conn_id, of.name).pipeline()
        return changes.between(found, live.name_of(found), tables, parse_lsn(start), parse_lsn(end))


def _keep_read(context: Mapping[str, Any], asset: Asset, told: Sequence[ChangeRange]) -> None:
    """Keep in the asset's store how far this DAG has read, by which the trigger knows whether it has to run again."""
    try:
        store = context["asset_state_store"][asset]
    except KeyError:
        return  # an inlet by its URI: Airflow has no store for it
    read, dag = store.get(READ) or {}, context["dag"].dag_id
    offsets = dict(read.get(dag, {}))
    for topic in (topic for each in told for topic in each.tables.values()):
        offsets[topic.id] = max(offsets.get(topic.id, []), list(topic.end))
    if offsets != read.get(dag):
        store.set(READ, {**read, dag: offsets})


def _range(event: Any) -> ChangeRange | None:
    """The range that an event of an asset tells; None if it is another kind of event."""
    try:
        return ChangeRange.of_event((event.extra or {})["payload"])
    except (KeyError, ValueError):
        return None
