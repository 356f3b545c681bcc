"""The snapshot job: the driver holds the snapshot and decides, each lane is one Spark task."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job
from airflow_bottledwater.spark.carry import pack

if TYPE_CHECKING:
    from airflow_bottledwater.flow.lane import LaneTask


def _run_lane(path: str, task: LaneTask) -> dict[str, int]:
    """In an executor."""
    from airflow_bottledwater.flow import lane

    try:
        return lane.run(job.load(path), task)
    except BottledWaterError as error:
        raise pack(error) from error


def _warm(_: Iterable[int]) -> None:
    """In an executor's worker, before there is work: imports and compiled code take it a second or two."""
    from airflow_bottledwater.flow import lane  # noqa: F401
    from airflow_bottledwater.flow.warm import warm_up

    warm_up()


def _work(pipeline: Pipeline, path: str, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    # Spark and its workers start while the rest is imported here, which takes a second
    threading.Thread(target=importlib.import_module, args=("airflow_bottledwater.flow.snapshot",), daemon=True).start()
    with job.context(f"bottledwater snapshot {pipeline.slot}") as context:
        # before the snapshot is taken: its locks and its horizon are not held while workers start
        try:
            context.parallelize(range(pipeline.lanes), pipeline.lanes).foreachPartition(_warm)
        except Exception as error:
            raise job.translate(error) from error

        def run_lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
            try:
                rdd = context.parallelize(list(tasks), len(tasks))
                return list(rdd.map(lambda task: _run_lane(path, task)).collect())
            except Exception as error:
                raise job.translate(error) from error

        from airflow_bottledwater.flow import snapshot

        return asdict(snapshot.run(pipeline, run_lanes, stopped=stopped))


def main() -> None:
    """Entry point of ``spark_jobs/snapshot.py``."""
    job.run("Publish a consistent snapshot of the pipeline's tables.", _work)
