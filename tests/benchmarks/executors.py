"""``executors``: a snapshot over 1, 2 and 4 executors of a standalone cluster, with a publisher that throws the rows
away after they are encoded. So what is measured is what can stand in its own way: reading under one exported snapshot,
encoding, one transaction of progress for each range, Spark.

The value is rows/s with the most executors; ``by_executors`` has for each number the rows/s of the job's own time, and
the CPU seconds for a million rows of all its Python workers. Where there are fewer cores than executors, the rows/s
cannot grow any more; then the CPU seconds show whether executors hinder one another.

Reference: draining the same COPY raw over as many connections, just before and after.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, copy_query
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot import driver
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.spark import snapshot
from airflow_bottledwater.spark.error_codec import Failure
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.spark.tasks import run_each, warm_workers
from airflow_bottledwater.state.records import StateRecord
from tests.benchmarks.common import Workload, drain, emit, scaled
from tests.support.clusters.standalone import StandaloneCluster, spark_environment

_ROWS = 3_000_000
_EXECUTORS = (1, 2, 4)
#: of each number; the one in the middle, by its ratio, counts
_REPEAT = 3


def _throw_away(
    session: PublishSession, batches: Iterable[Records], progress: Mapping[str, StateRecord | None]
) -> None:
    """In place of :meth:`PublishSession.transact`: encode everything, publish the progress alone."""
    for _ in batches:
        pass
    _transact(session, [], progress)


_transact = PublishSession.transact


def _run_lane(file: SettingsFile, task: LaneTask) -> dict[str, Any] | Failure:
    """A lane in an executor, whose rows are thrown away."""
    PublishSession.transact = _throw_away  # type: ignore[assignment,method-assign]
    before = time.process_time()
    done = snapshot._run_lane(file, task)
    if isinstance(done, Failure):
        return done
    return {"done": done, "cpu": time.process_time() - before, "executor": os.getppid()}


def _raw(source: Workload, rows: int, connections: int) -> float:
    table = source.table()
    ends = [table.pages * i // connections for i in range(connections)] + [LAST_BLOCK]
    parts = [copy_query(table, select_list(table), ends[i], ends[i + 1]) for i in range(connections)]
    started = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        assert sum(pool.map(lambda query: drain(source.dsn, query), parts)) == rows
    return rows / (time.perf_counter() - started)


def _take(stack: DataStack, cluster: StandaloneCluster, executors: int, rows: int) -> dict[str, Any]:
    from pyspark import SparkConf, SparkContext

    source = Workload(stack, lanes=executors)
    source.insert(rows)
    source.execute("VACUUM ANALYZE bench")
    source.create()
    settings = {
        "spark.cores.max": str(executors), "spark.executor.cores": "1", "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[2]), "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bottledwater-bench-") as folder:
        file = SettingsFile(str(source.pipeline.write(Path(folder))))
        context = SparkContext(conf=SparkConf().setMaster(cluster.url).setAppName("executors").setAll(settings.items()))
        try:
            warm_workers(context, source.pipeline, executors, snapshot.warm)

            def lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
                found.extend(run_each(context, source.pipeline, functools.partial(_run_lane, file), tasks, "lane"))
                return [each["done"] for each in found]

            before = _raw(source, rows, executors)
            outcome = driver.run(source.pipeline, lanes)
            reference = (before + _raw(source, rows, executors)) / 2
        finally:
            context.stop()
    assert outcome.rows == rows, outcome
    source.drop()
    speed = rows / outcome.seconds
    return {
        "rows_per_second": speed,
        "raw_copy": reference,
        "ratio": speed / reference,
        "cpu_seconds_per_million": sum(each["cpu"] for each in found) * 1e6 / rows,
        "executors_used": len({each["executor"] for each in found}),
        "rows_by_lane": [each["done"]["rows"] for each in found],
    }


def run(stack: DataStack) -> None:
    """See the module."""
    rows = scaled(_ROWS, 10_000)
    # executors run the driver's interpreter
    os.environ.update(spark_environment())
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    results = {}
    with tempfile.TemporaryDirectory(prefix="bottledwater-bench-") as folder:
        for executors in _EXECUTORS:
            with StandaloneCluster(Path(folder) / str(executors), cores=2, memory="2g") as cluster:
                runs = [_take(stack, cluster, executors, rows) for _ in range(_REPEAT)]
            results[executors] = sorted(runs, key=lambda each: each["ratio"])[_REPEAT // 2]
    most = results[_EXECUTORS[-1]]
    emit(
        "executors",
        most["rows_per_second"],
        "rows/s",
        {f"raw_copy_{_EXECUTORS[-1]}_connections": most["raw_copy"]},
        by_executors=results,
        cores=os.cpu_count(),
        rows=rows,
    )
