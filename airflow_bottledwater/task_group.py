"""The whole pipeline as a task group, for users' own DAGs."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from typing import Any

from airflow.sdk import BaseOperator, TaskGroup

from airflow_bottledwater.hooks.spark_target import WHERE
from airflow_bottledwater.operators.approval import DropReplicationSlotApprovalOperator
from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator, DropReplicationSlotOperator
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor

#: what Airflow shows of each task
_DOCS = {
    "preflight": "Checks the source, Kafka, the registry and where the jobs run, and changes nothing. If something is "
    "wrong, it fails and says all of it at once.",
    "create_slot": "Creates the replication slot, publications and topics, unless they exist. From then on PostgreSQL "
    "keeps its WAL until the stream has published it.",
    "snapshot": "Publishes all rows as they were at one moment. If it is interrupted, it goes on where it was; if it "
    "is complete, it does nothing.",
    "stream": "Publishes every committed change, in order, for as long as it runs (or, bounded, what is committed when "
    "it begins). It is running as it should while it is deferred. Mark it as failed to stop the job; run the DAG "
    "again to go on where it was.",
    "wait_caught_up": "Succeeds once the slot is less than `max_lag` behind: consumers have nearly everything. Skipped "
    "if the stream ends before.",
    "watch_errors": "Fails when the stream fails, does not report any more, or has too many open dead letters; "
    "succeeds when it ends in order. Put your callbacks here.",
    "drop_slot": "Drops slot and publications if the pipeline was stopped for good (`bottledwater stop --retire`); "
    "otherwise it leaves everything as it is.",
}


def _task(name: str) -> dict[str, Any]:
    """A task's id, and what Airflow shows of it."""
    return {"task_id": name, "doc_md": _DOCS[name]}


class BottledWaterTaskGroup(TaskGroup):
    """The tasks ``preflight → create_slot → snapshot → stream``, with ``wait_caught_up`` and ``watch_errors`` beside
    the stream, and ``drop_slot`` as the teardown of ``create_slot``. What is behind the group begins when the stream
    has ended in order, and does not wait for ``wait_caught_up``. What is behind an outer group around this one also
    depends on ``wait_caught_up``, and is skipped with it, unless its ``trigger_rule`` is ``none_failed``: put it behind
    this group instead.

    :param group_id: the group's id; task ids are prefixed with it unless ``prefix_group_id`` is False.
    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param bounded: whether the stream ends once it has published everything that was committed when it started.
        (templated)
    :param drop_when: ``retired``, ``always`` or ``never``: what the teardown does. (templated)
    :param approve: whether a person is asked before the teardown drops the slot, by Airflow's ApprovalOperator.
        (templated)
    :param max_lag: bytes at which ``wait_caught_up`` calls the stream caught up. (templated)
    :param snapshot: further arguments of the snapshot operator.
    :param stream: further arguments of the stream operator.
    """

    def __init__(
        self,
        group_id: str = "bottledwater",
        *,
        pipeline: PipelineArgument,
        bounded: bool | str = False,
        drop_when: str = "retired",
        approve: bool | str = False,
        max_lag: int | str = 16 << 20,
        snapshot: Mapping[str, Any] | None = None,
        stream: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_id=group_id, **kwargs)
        with self:
            self.snapshot = SnapshotToKafkaOperator(pipeline=pipeline, **{**_task("snapshot"), **(snapshot or {})})
            self.stream = StreamToKafkaOperator(
                pipeline=pipeline, bounded=bounded, **{**_task("stream"), **(stream or {})}
            )
            # as the operators have them: the DAG's default_args count, too
            where: dict[str, Any] = {
                "snapshot": {name: getattr(self.snapshot, name) for name in WHERE},
                "stream": {name: getattr(self.stream, name) for name in WHERE},
            }
            self.preflight = ReplicationPreflightOperator(**_task("preflight"), pipeline=pipeline, **where)
            self.create_slot = CreateReplicationSlotOperator(**_task("create_slot"), pipeline=pipeline, **where)
            # both wait for as long as the stream runs, so they are deferred instead of occupying a worker slot
            self.wait_caught_up = ReplicationSlotLagSensor(
                **_task("wait_caught_up"),
                pipeline=pipeline,
                max_lag=max_lag,
                poke_interval=10,
                deferrable=True,
                stream_task_id=self.stream.task_id,
            )
            self.watch_errors = StreamErrorSensor(**_task("watch_errors"), pipeline=pipeline, deferrable=True)
            asking = functools.partial(DropReplicationSlotApprovalOperator, approve=approve)
            dropping = asking if approve else DropReplicationSlotOperator
            self.drop_slot = dropping(**_task("drop_slot"), pipeline=pipeline, when=drop_when)
        watched = [self.stream, self.wait_caught_up, self.watch_errors]
        self.preflight >> self.create_slot >> self.snapshot >> watched
        watched >> self.drop_slot.as_teardown(setups=self.create_slot)

    def get_leaves(self) -> Generator[BaseOperator, None, None]:
        """What is behind the group follows the stream, and what watches it: ``wait_caught_up`` is skipped if the stream
        ends before, as a bounded one does on a busy source, and what follows it would be skipped, too. Airflow does not
        ask this of a group in another one."""
        yield from (task for task in super().get_leaves() if task is not self.wait_caught_up)
