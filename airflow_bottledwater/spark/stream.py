"""The stream job: claims the slot and runs one of the engines; here ``micro-batch``: the query, watched by the state."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job

# Spark starts while the rest is imported, which takes a second
if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from airflow_bottledwater.state.control import Controller
    from airflow_bottledwater.state.coverage import CoverageWatch
    from airflow_bottledwater.state.store import Reader
    from airflow_bottledwater.stream.engine import Start

log = logging.getLogger(__name__)

#: a micro-batch's own time: the commit log on a RAM disk through Hadoop's plain local file system (70 → 20 ms), no
#: adaptive planning, no pause between polls (the source waits instead)
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
    # a batch's errors are met where it is published; a second attempt would only hide what was wrong, and initialise the id of a
    # slot that was taken over. A worker that is lost ends the job, which may be submitted again.
    "spark.task.maxFailures": "1",
    "spark.python.unix.domain.socket.enabled": "true",
}


def _begin(pipeline: Pipeline, stopped: threading.Event) -> Start:
    from airflow_bottledwater.postgres.connect import stoppable
    from airflow_bottledwater.stream import engine

    with stoppable(stopped):
        return engine.begin(pipeline)


def _work(pipeline: Pipeline, path: str, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    name = f"bottledwater stream {pipeline.slot}"
    with ThreadPoolExecutor(1, "claim") as pool:
        claimed = pool.submit(_begin, pipeline, stopped)
        if pipeline.engine == "continuous":
            with job.context(name) as context:
                start = claimed.result()
                from airflow_bottledwater.spark import continuous

                return continuous.stream(context, pipeline, path, start, bounded, stopped)
        # a fresh checkpoint at every start: the truth is the slot and the state topic
        memory = Path("/dev/shm")
        with (
            tempfile.TemporaryDirectory(
                prefix="bottledwater-", dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True
            ) as checkpoint,
            job.session(name, _TUNING) as spark,
        ):
            return _stream(spark, pipeline, path, claimed.result(), bounded, stopped, checkpoint)


def _stream(
    spark: SparkSession,
    pipeline: Pipeline,
    path: str,
    start: Start,
    bounded: bool,
    stopped: threading.Event,
    checkpoint: str,
) -> dict[str, Any]:
    from airflow_bottledwater.backoff import Backoff
    from airflow_bottledwater.spark.source import FORMAT, Assignment, BottledWaterSource
    from airflow_bottledwater.state.coverage import CoverageWatch
    from airflow_bottledwater.state.records import PipelineState
    from airflow_bottledwater.state.store import Reader
    from airflow_bottledwater.stream import engine
    from airflow_bottledwater.stream.source import ChangeSource

    with engine.reported(pipeline, start, stopped) as controller:
        backoff = Backoff(pipeline.outage_timeout)
        target = ChangeSource(pipeline, start.state, start.position, backoff).flush_target() if bounded else None
        fingerprint = engine.fingerprint(start.state, start.cluster)
        assignment = Assignment.of(path, start, bounded=bounded, fingerprint=fingerprint)
        spark.dataSource.register(BottledWaterSource)
        frame = spark.readStream.format(FORMAT).option("assignment", assignment.to_option()).load()
        query = frame.writeStream.format("noop").option("checkpointLocation", f"file://{checkpoint}").start()
        log.info("Streaming from %s.", start.position)
        facts = Reader(pipeline.kafka, start.state_topic)
        watch = CoverageWatch(pipeline, start.state)
        try:
            _follow(query, facts, start, target, controller, watch)
        except Exception as error:
            raise job.translate(error) from error
        finally:
            _stop(query)
            watch.close()
            facts.close()
        found = PipelineState(facts.values)
        engine.acknowledge(pipeline, found)
        return {"position": str(found.position or start.position), **controller.status.counters}
    return {}


def _follow(
    query: StreamingQuery,
    facts: Reader,
    start: Start,
    target: int | None,
    controller: Controller,
    watch: CoverageWatch,
) -> None:
    """Wait for the end (a stop, an error, or the target of a bounded run), and keep the status true meanwhile."""
    from airflow_bottledwater.state.records import PipelineState

    position = start.position
    told = 0.0
    while query.isActive and not controller.stopped.is_set() and (target is None or position.lsn < target):
        facts.poll(0.2)
        watch.check()
        found = PipelineState(facts.values)
        position = found.position or position
        controller.status.position = str(position)
        statistics = _statistics(query)
        controller.status.progress = {
            "skipped_by_table": statistics.pop("skipped_by_table", {}),
            "not_followed": watch.unfollowed,
        }
        controller.status.counters = {**found.counters, **statistics}
        if time.monotonic() - told > 10:
            told = time.monotonic()
            log.info("At %s: %s", position, controller.status.counters)
    if (error := query.exception()) is not None:
        raise error


def _statistics(query: StreamingQuery) -> dict[str, Any]:
    """What the reader counts travels in its offsets."""
    progress = query.lastProgress
    if progress is None or not progress.sources:
        return {}
    end = progress.sources[0].endOffset

    parsed = json.loads(end) if isinstance(end, str) else {}
    return {k: v for k, v in parsed.items() if k not in ("lsn", "ordinal")}


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception as error:
        log.warning("Stopping the query: %s", error)


def main() -> None:
    """Entry point of ``spark_jobs/stream.py``."""
    job.run("Publish every committed change, in order.", _work)
