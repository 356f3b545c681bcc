"""The stream as a PySpark data source, for Structured Streaming's micro-batches.

The reader's ``latestOffset`` and ``partitions`` run in one process on the driver's host for the whole query, which holds the
replication connection and cuts batches. ``read`` runs in a Python worker: the batch is sent there in the single input partition, and is
encoded and published by the worker's publisher, which is kept between batches. The sink is ``noop``.

Spark's checkpoint is thrown away, since only the state topic counts.
"""

from __future__ import annotations

import base64
import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from airflow_bottledwater.errors import BottledWaterError, StaleBatch
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.spark.error_codec import pack

# Spark imports this module in five processes, of which only two do work: these import the rest when they begin
if TYPE_CHECKING:
    from airflow_bottledwater.backoff import Backoff
    from airflow_bottledwater.publish.batch import Batch
    from airflow_bottledwater.settings import Pipeline
    from airflow_bottledwater.spark.job import SettingsFile
    from airflow_bottledwater.state.snapshots import SnapshotRequests
    from airflow_bottledwater.stream.publisher import StreamPublisher
    from airflow_bottledwater.stream.source import ChangeSource
    from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

FORMAT = "bottledwater"
#: seconds that one call waits for a batch to begin; Spark polls without a pause
_POLL = 0.1
#: the same beside a live snapshot
_BESIDE = 0.02


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the reader and the worker need to know of the job.

    :param file: where the pipeline's settings are; it is not a secret itself.
    :param start: the claimed stream.
    :param bounded: whether the stream ends once everything is published that was committed at its start.
    """

    file: SettingsFile
    start: Start
    bounded: bool

    def to_option(self) -> str:
        """The assignment as the text of a data source option."""
        return base64.b64encode(pickle.dumps(self)).decode()

    @classmethod
    def from_option(cls, text: str) -> Assignment:
        """The inverse of :meth:`to_option`. The pickled text comes from the job itself: Spark passes the option through unchanged."""
        found = pickle.loads(base64.b64decode(text))
        assert isinstance(found, cls)
        return found


class BatchPartition(InputPartition):
    """The single partition of a micro-batch.

    :param batch: None if there is only something to do for a live snapshot.
    """

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch


class BottledWaterSource(DataSource):
    """``spark.readStream.format("bottledwater")``; its one option is an :class:`Assignment`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def schema(self) -> str:
        """The schema: one row for each batch, with the stream's position."""
        return "position string"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """The reader, which Spark pickles into its source process and into workers."""
        return Reader(Assignment.from_option(self.options["assignment"]))


def _offset(position: Position, beat: int = 0, statistics: dict[str, int] | None = None) -> dict[str, Any]:
    """An offset of the source.

    :param beat: counts on where there is nothing new, but a live snapshot to be worked on: Spark makes a batch only of a new offset.
    """
    return {"lsn": position.lsn, "ordinal": position.ordinal, "beat": beat, **(statistics or {})}


class Reader(DataSourceStreamReader):
    """Receives changes and cuts batches in a process on the driver's host, and publishes them in a worker."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._source: ChangeSource | None = None
        self._requests: SnapshotRequests | None = None
        self._batches: dict[Position, Batch] = {}

    def initialOffset(self) -> dict[str, Any]:
        """P at the start of the job."""
        return _offset(self._assignment.start.position)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Wait a moment for a batch, and return its end; without one, return ``start``.

        :param start: the end of the last completed batch. It is committed in Kafka, and so is confirmed to PostgreSQL here: Spark calls
            ``commit`` only when the next batch is made, which in an idle stream may be never.
        """
        try:
            reached = Position(start["lsn"], start["ordinal"])
            source = self._open()
            source.acknowledge(reached)
            self._batches.clear()
            assert self._requests is not None
            self._requests.poll()
            live = self._requests.active
            batch = source.next(_BESIDE if live else _POLL, flush_empty=self._assignment.bounded or live)
            if batch is not None:
                self._batches[batch.end] = batch
                return {
                    **_offset(batch.end, start["beat"], source.statistics),
                    "skipped_by_table": source.skipped_by_table,
                }
            return {**start, "beat": start["beat"] + 1} if live else start
        except BottledWaterError as error:
            raise pack(error) from error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The batch that :meth:`latestOffset` found, as one partition; no partition for the empty batch that Spark plans first."""
        # their statistics do not count: the first offset has none
        if all(start[each] == end[each] for each in ("lsn", "ordinal", "beat")):
            return []
        return [BatchPartition(self._batches.get(Position(end["lsn"], end["ordinal"])))]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        """Encode and publish a batch, in the worker; yields the position."""
        assert isinstance(partition, BatchPartition)
        try:
            yield (str(_publish(self._assignment, partition.batch)),)
        except BottledWaterError as error:
            raise pack(error) from error

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: see :meth:`latestOffset`."""

    def stop(self) -> None:
        """Close the replication connection. (Spark may end the process without this call; the server notices that.)"""
        if self._source is not None:
            self._source.close()
        if self._requests is not None:
            self._requests.close()

    def _open(self) -> ChangeSource:
        if self._source is None:
            from airflow_bottledwater.state.claim import check, read_state
            from airflow_bottledwater.state.snapshots import SnapshotRequests
            from airflow_bottledwater.stream.source import open_source

            start = self._assignment.start
            pipeline, backoff = _settings(self._assignment)
            check(read_state(pipeline, start.state_topic), start.job)
            self._source = open_source(pipeline, start, backoff, start.position)
            self._requests = SnapshotRequests(pipeline, start.cluster.pipeline(pipeline.slot))
        return self._source


def _settings(assignment: Assignment) -> tuple[Pipeline, Backoff]:
    from airflow_bottledwater.stream.engine import stream_backoff

    pipeline = assignment.file.load()
    return pipeline, stream_backoff(pipeline)


#: this worker's publisher, and the id of the job that it belongs to; workers are reused between batches
_publisher: tuple[str, StreamPublisher] | None = None


def _publish(assignment: Assignment, batch: Batch | None) -> Position:
    global _publisher
    from airflow_bottledwater.stream.publisher import StreamPublisher

    job = assignment.start.job.id
    kept = _publisher is not None and _publisher[0] == job
    if _publisher is None or not kept:
        if _publisher is not None:
            earlier, _publisher = _publisher[1], None
            earlier.close()
        pipeline, backoff = _settings(assignment)
        _publisher = job, StreamPublisher(pipeline, assignment.start, backoff)
        _publisher[1].reached()  # a live snapshot needs the state, also where there is no batch
    try:
        if batch is not None:
            _publisher[1].publish(batch)
        _publisher[1].live.work()
        return _publisher[1].position
    except BaseException as error:
        _publisher[1].close()
        _publisher = None
        if kept and isinstance(error, StaleBatch):
            # another worker has published since, so this publisher's position is out of date: a new one reads the state
            return _publish(assignment, batch)
        raise
