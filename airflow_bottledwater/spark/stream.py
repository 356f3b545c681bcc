"""The stream job: claims the slot and runs one of the engines. ``micro-batch`` is here: a streaming query, watched by its state."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import Outage, TablesChanged
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import executors, job
from airflow_bottledwater.spark.job import SettingsFile

# Spark starts while the rest is imported, which takes a second
if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from airflow_bottledwater.state.pipeline_state import PipelineState
    from airflow_bottledwater.state.snapshots import SnapshotRequests
    from airflow_bottledwater.state.store import Reader
    from airflow_bottledwater.stream.engine import StreamReport
    from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

#: properties that shorten Spark's own time for a micro-batch: the commit log on a RAM disk through Hadoop's plain local file system
#: (20 ms instead of 70), no adaptive planning, no pause between polls (the source waits instead)
_TUNING = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.pollingDelay": "1ms",
    "spark.sql.streaming.numRecentProgressUpdates": "10",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.locality.wait": "0",
    # errors are handled where a batch is published; a second attempt of a task would only hide what was wrong, and could initialise the
    # transactional id of a slot that was taken over. A worker that dies ends the job, which may be submitted again.
    "spark.task.maxFailures": "1",
    "spark.python.unix.domain.socket.enabled": "true",
}


def begin(pipeline: Pipeline, stopped: threading.Event) -> Start:
    """Claim the slot for the stream, see :func:`airflow_bottledwater.stream.start.begin`.

    :raises StopRequested: the event was set meanwhile.
    """
    from airflow_bottledwater.postgres.connect import stoppable
    from airflow_bottledwater.stream.start import begin

    with stoppable(stopped):
        return begin(pipeline)


def run(pipeline: Pipeline, file: SettingsFile, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    """Stream, in a Spark application of its own; returns position and counters.

    :param file: the settings, for executors.
    :param bounded: whether to end once everything is published that was committed at the start, instead of running until stopped.
    """
    name = f"bottledwater stream {pipeline.slot}"
    with ThreadPoolExecutor(1, "claim") as pool:
        claimed = pool.submit(begin, pipeline, stopped)
        if pipeline.engine == "continuous":
            with job.context(name) as context:
                executors.check(context, pipeline, file)
                return follow(context, pipeline, file, claimed.result(), bounded, stopped)
        # a new checkpoint at every start, since only the slot and the state topic count
        memory = Path("/dev/shm")
        with (
            tempfile.TemporaryDirectory(
                prefix="bottledwater-", dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True
            ) as checkpoint,
            job.session(name, _TUNING) as spark,
        ):
            executors.check(spark.sparkContext, pipeline, file)
            start = claimed.result()
            while True:
                try:
                    with tempfile.TemporaryDirectory(dir=checkpoint) as fresh:
                        return _stream(spark, pipeline, file, start, bounded, stopped, fresh)
                except TablesChanged as changed:
                    log.info("%s", changed)
                    start = begin(pipeline, stopped)


def follow(
    context: SparkContext, pipeline: Pipeline, file: SettingsFile, start: Start, bounded: bool, stopped: threading.Event
) -> dict[str, Any]:
    """Stream with the engine ``continuous``, and begin anew where tables are to be taken in; returns position and counters."""
    from airflow_bottledwater.spark import continuous

    while True:
        try:
            return continuous.stream(context, pipeline, file, start, bounded, stopped)
        except TablesChanged as changed:
            log.info("%s", changed)
            start = begin(pipeline, stopped)


def _stream(
    spark: SparkSession,
    pipeline: Pipeline,
    file: SettingsFile,
    start: Start,
    bounded: bool,
    stopped: threading.Event,
    checkpoint: str,
) -> dict[str, Any]:
    from airflow_bottledwater.spark.source import FORMAT, Assignment, BottledWaterSource
    from airflow_bottledwater.state.coverage import CoverageWatch
    from airflow_bottledwater.state.pipeline_state import PipelineState
    from airflow_bottledwater.state.snapshots import SnapshotRequests
    from airflow_bottledwater.state.store import Reader
    from airflow_bottledwater.stream import engine

    with (
        engine.reported(pipeline, start, stopped) as controller,
        contextlib.closing(CoverageWatch(pipeline, start.state, start.not_taken)) as watch,
        contextlib.closing(Reader(pipeline.kafka, start.state_topic)) as records,
        contextlib.closing(SnapshotRequests(pipeline, start.cluster.pipeline(pipeline.slot))) as requests,
    ):
        target = engine.flush_target(pipeline) if bounded else None
        assignment = Assignment(file, start, bounded)
        spark.dataSource.register(BottledWaterSource)
        frame = spark.readStream.format(FORMAT).option("assignment", assignment.to_option()).load()
        query = frame.writeStream.format("noop").option("checkpointLocation", f"file://{checkpoint}").start()
        log.info("Streaming from %s.", start.position)
        report = engine.StreamReport(controller, watch, start.position)
        presence = executors.Presence(spark.sparkContext, pipeline)
        try:
            while (
                query.isActive
                and not controller.stopped.is_set()
                and (target is None or report.position.lsn < target or _asked(requests))
            ):
                records.poll(0.2)
                presence.check()
                watch.check(report.position)
                _report(report, PipelineState(records.values), query)
            if not controller.stopped.is_set():
                watch.check(report.position)
            if (error := query.exception()) is not None:
                raise error
        except Exception as error:
            raise job.translate(error) from error
        finally:
            _stop(query)
        found = _read_on(pipeline, start, records)
        _report(report, found, query)
        engine.acknowledge(pipeline, found)
        return {"position": str(found.position or start.position), **controller.status.counters}
    return {}


def _read_on(pipeline: Pipeline, start: Start, records: Reader) -> PipelineState:
    """The state with what the query published while it was being stopped. In an outage, the state as it was read last."""
    from airflow_bottledwater.kafka.topics import Topics
    from airflow_bottledwater.state.pipeline_state import PipelineState

    try:
        end = Topics(pipeline.kafka).ends(start.state_topic, 1, committed=True)[0]
        return PipelineState(records.read_to(end, timeout=10))
    except Outage as error:
        log.info("The last position could not be read (%s); the next run confirms it to PostgreSQL.", error)
        return PipelineState(records.values)


def _asked(requests: SnapshotRequests) -> bool:
    """Whether a live snapshot is asked for, which a bounded run does, too."""
    requests.read()
    return requests.active


def _report(report: StreamReport, found: PipelineState, query: StreamingQuery) -> None:
    """Report P and the counters from the state, and the statistics of the reader from its offsets."""
    statistics = _statistics(query)
    skipped_by_table = statistics.pop("skipped_by_table", {})
    report.update(found.position or report.position, {**found.counters, **statistics}, skipped_by_table)


def _statistics(query: StreamingQuery) -> dict[str, Any]:
    """The reader's statistics, which are sent to the driver in its offsets."""
    progress = query.lastProgress
    if progress is None or not progress.sources:
        return {}
    end = progress.sources[0].endOffset

    parsed = json.loads(end) if isinstance(end, str) else {}
    return {k: v for k, v in parsed.items() if k not in ("lsn", "ordinal", "beat")}


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception as error:
        log.warning("Stopping the query: %s", error)


def main() -> None:
    """Entry point of ``spark_jobs/stream.py``."""
    job.run("stream", "Publish every committed change, in order.", run)
