"""Tasks that a job's driver runs in executors, each as a Spark job of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from airflow_bottledwater.spark import job
from airflow_bottledwater.spark.error_codec import Failure, received

if TYPE_CHECKING:
    from pyspark import SparkContext

T = TypeVar("T")
R = TypeVar("R")


def warm_workers(context: SparkContext, count: int, warm: Callable[[], None]) -> None:
    """Start this many workers, and have each import and compile what it will need, which takes a second or two. This is done before a
    snapshot is taken: its locks and its horizon are not held while workers start.

    :param warm: what a worker does.
    :raises BottledWaterError: one died.
    """
    try:
        context.parallelize(range(count), count).foreachPartition(lambda _: warm())
    except Exception as error:
        raise job.translate(error) from error


def run_each(context: SparkContext, work: Callable[[T], R | Failure], tasks: Sequence[T], name: str) -> list[R]:
    """Run each task as a Spark job of its own, so that the first failure of a task is noticed at once, and ends the others; returns the
    results in the tasks' order.

    :param work: what an executor does, see :func:`~airflow_bottledwater.spark.error_codec.returned`.
    :param name: what the tasks are called.
    :raises BottledWaterError: the error of the first task that failed.
    """
    ended: queue.Queue[tuple[int, R] | BaseException] = queue.Queue()

    def one(number: int, task: T) -> None:
        try:
            (result,) = context.parallelize([task], 1).map(work).collect()
            ended.put((number, received(result)))
        except BaseException as error:
            ended.put(error)

    for number, task in enumerate(tasks):
        # daemon threads: they need not be waited for when the job has ended
        threading.Thread(target=one, args=(number, task), name=f"{name} {number}", daemon=True).start()
    results: dict[int, R] = {}
    for _ in tasks:
        found = ended.get()
        if isinstance(found, BaseException):
            context.cancelAllJobs()
            raise job.translate(found) from found
        results[found[0]] = found[1]
    return [results[number] for number in range(len(tasks))]
