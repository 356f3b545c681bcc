"""Reads in a task the changes that have led to its run, each exactly once."""

from __future__ import annotations

import time
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
#: the key of when it has read so far, by DAG's id: in seconds since 1970
READ_AT = "bottledwater_read_at"
#: the key in the asset's store of the last run of each DAG that reads what no event tells any more, and of how far the
#: DAG had read before it
_BEHIND = "bottledwater_behind"
#: the key in the asset's store of the last event by which each DAG was told that tables are missing: its time, in
#: seconds since 1970
_MISSING = "bottledwater_missing"
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
        event came twice or too late, or Airflow has deleted earlier ones; and a run that is cleared has the same range
        again.

        :param context: the task's; the asset has to be among its ``inlets``.
        :return: an empty range, if the run was not triggered by the asset.
        :raises AirflowFailException: the asset is not among the task's inlets; or the events are of several pipelines,
            in which tables of one name have several topics; or the trigger has found that there is no table of a name
            that it was given.
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
        known = list(inlet.before(events[-1].timestamp.isoformat()).ascending(False).limit(_EARLIER + len(events)))
        reading = _Reading(context, asset)
        found, ranges = ChangeRange(), [_range(event) or ChangeRange() for event in events]
        missing = {f"{pattern} (pipeline {told.pipeline})" for told in ranges for pattern in told.missing}
        if missing and reading.hears_of(events[-1].timestamp.timestamp()):
            raise AirflowFailException(
                f"No table matches what the asset {asset.name!r} is to tell of: {', '.join(sorted(missing))}. It may "
                "have been renamed, or be an outbox. Correct the trigger's tables (a schema other than public has to "
                "be named; 'bottledwater status' shows the tables), unless it is still to come. This is told once: "
                "then clear this task, and it reads the changes of its run."
            )
        for event, told in zip(events, ranges, strict=True):
            earlier = [before for each in known if each.timestamp < event.timestamp and (before := _range(each))]
            part = reading.from_where_it_was(told, [*earlier, found])
            try:
                found = found if part.empty else found.joined(part)
            except ValueError as error:
                raise AirflowFailException(
                    f"The run has events of several pipelines, and their changes are no one range: {error}. Give each "
                    "pipeline an asset of its own, schedule the DAG by both (schedule=a | b), and call of_run for each."
                ) from None
        reading.keep()
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


class _Reading:
    """How far a DAG has read, as the asset's store has it: by it, the trigger knows whether the DAG has to run again,
    and a run whether events before its own were deleted (``airflow db clean``), so that it has to read more."""

    def __init__(self, context: Mapping[str, Any], asset: Asset) -> None:
        self._dag, self._run = context["dag"].dag_id, context["run_id"]
        try:
            self._store = context["asset_state_store"][asset]
        except KeyError:
            self._store = None  # an inlet by its URI: Airflow has no store for it
        self._read: dict[str, list[int]] = self._of(READ, {})
        run, before = self._of(_BEHIND, (None, {}))
        self._behind = run == self._run
        #: before this run, also if it was cleared
        self._before = before if self._behind else self._read
        self._now = dict(self._read)

    def _of(self, key: str, default: Any) -> Any:
        return default if self._store is None else (self._store.get(key) or {}).get(self._dag, default)

    def hears_of(self, at: float) -> bool:
        """Whether the DAG is told for the first time of events by which tables are missing; from now on, it has been.

        :param at: the last event's time, in seconds since 1970.
        """
        if self._store is None or at <= self._of(_MISSING, 0.0):
            return False
        self._set(_MISSING, at)
        return True

    def from_where_it_was(self, told: ChangeRange, earlier: Sequence[ChangeRange]) -> ChangeRange:
        """The part of a range that no earlier one tells, and what lies between where the DAG was and that part."""
        for topic in told.tables.values():
            self._now[topic.id] = max(self._now.get(topic.id, []), list(topic.end))
        alone, whole = told.without(earlier), told.reaching(self._before).without(earlier)
        self._behind |= alone != whole
        return whole

    def keep(self) -> None:
        """Keep that all of this is read."""
        if self._store is not None and self._now != self._read:
            if self._behind:  # before it is marked as read, so that whatever ends this task takes nothing away
                self._set(_BEHIND, [self._run, self._before])
            self._set(READ_AT, time.time())
            self._set(READ, self._now)

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, {**(self._store.get(key) or {}), self._dag: value})


def _range(event: Any) -> ChangeRange | None:
    """The range that an event of an asset tells; None if it is another kind of event."""
    try:
        return ChangeRange.of_event((event.extra or {})["payload"])
    except (KeyError, ValueError):
        return None
