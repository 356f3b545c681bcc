"""Tasks that a job's driver runs in executors, each as a Spark job of its own."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import job, parcels
from airflow_bottledwater.spark.error_codec import Failure, received
from airflow_bottledwater.spark.executors import Presence

if TYPE_CHECKING:
    from pyspark import SparkContext

#: seconds between two looks whether there are executors, while tasks are waited for
_INTERVAL = 0.5

T = TypeVar("T")
R = TypeVar("R")


def warm_workers(context: SparkContext, pipeline: Settings, count: int, warm: Callable[[], None]) -> None:
    """Start this many workers, and have each import and compile what it will need, which takes a second or two. This is
    done before a snapshot is taken: its locks and its horizon are not held while workers start.

    :param warm: what a worker does.
    :raises BottledWaterError: one died, or no executor is left.
    """
    _run_all(
        context,
        pipeline,
        [lambda: context.parallelize(range(count), count).foreachPartition(lambda _: warm())],
        "warm workers",
    )


def run_each(
    context: SparkContext, pipeline: Settings, work: Callable[[T], R | Failure], tasks: Sequence[T], name: str
) -> list[R]:
    """Run each task as a Spark job of its own, so that the first failure of a task is noticed at once, and ends the
    others; returns the results in the tasks' order.

    :param work: what an executor does, see :func:`~airflow_bottledwater.spark.error_codec.returned`.
    :param name: what the tasks are called.
    :raises BottledWaterError: the error of the first task that failed, or no executor is left.
    """

    def one(task: T) -> R:
        parcel = parcels.packed(functools.partial(work, task))
        (result,) = context.parallelize([parcel], 1).map(parcels.carry_out).collect()
        found: R = received(result)
        return found

    return _run_all(context, pipeline, [functools.partial(one, task) for task in tasks], name)


def _run_all(context: SparkContext, pipeline: Settings, works: Sequence[Callable[[], R]], name: str) -> list[R]:
    """Do each work in a thread of its own, in which it waits for Spark."""
    ended: queue.Queue[tuple[int, R] | BaseException] = queue.Queue()

    def one(number: int, work: Callable[[], R]) -> None:
        try:
            ended.put((number, work()))
        except BaseException as error:
            ended.put(error)

    for each in enumerate(works):
        # daemon threads: they need not be waited for when the job has ended
        threading.Thread(target=one, args=each, name=f"{name} {each[0]}", daemon=True).start()
    results: dict[int, R] = {}
    presence = Presence(context, pipeline)
    try:
        while len(results) < len(works):
            with contextlib.suppress(queue.Empty):
                found = ended.get(timeout=_INTERVAL)
                if isinstance(found, BaseException):
                    raise found
                results[found[0]] = found[1]
            presence.check()
    except BaseException as error:
        with contextlib.suppress(Exception):  # the context itself may have ended
            context.cancelAllJobs()
        raise job.translate(error) from error
    return [results[number] for number in range(len(works))]
