"""The whole pipeline as a task group, for users' own DAGs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import TaskGroup

from airflow_bottledwater.hooks.places import WHERE
from airflow_bottledwater.operators.base import PipelineArgument
from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator, DropReplicationSlotOperator
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor


class BottledWaterTaskGroup(TaskGroup):
    """The tasks ``preflight → create_slot → snapshot → stream``, with ``wait_caught_up`` and ``watch_errors`` beside
    the stream, and ``drop_slot`` as the teardown of ``create_slot``.

    :param group_id: the group's id; task ids are prefixed with it unless ``prefix_group_id`` is False.
    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param bounded: whether the stream ends once it has published everything that was committed when it started.
        (templated)
    :param drop_when: ``retired``, ``always`` or ``never``: what the teardown does. (templated)
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
        max_lag: int | str = 16 << 20,
        snapshot: Mapping[str, Any] | None = None,
        stream: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_id=group_id, **kwargs)
        with self:
            self.snapshot = SnapshotToKafkaOperator(task_id="snapshot", pipeline=pipeline, **(snapshot or {}))
            self.stream = StreamToKafkaOperator(task_id="stream", pipeline=pipeline, bounded=bounded, **(stream or {}))
            # as the operators have them: the DAG's default_args count, too
            where: dict[str, Any] = {
                "snapshot": {name: getattr(self.snapshot, name) for name in WHERE},
                "stream": {name: getattr(self.stream, name) for name in WHERE},
            }
            self.preflight = ReplicationPreflightOperator(task_id="preflight", pipeline=pipeline, **where)
            self.create_slot = CreateReplicationSlotOperator(task_id="create_slot", pipeline=pipeline, **where)
            # both wait for as long as the stream runs, so they are deferred instead of occupying a worker slot
            self.wait_caught_up = ReplicationSlotLagSensor(
                task_id="wait_caught_up",
                pipeline=pipeline,
                max_lag=max_lag,
                poke_interval=10,
                deferrable=True,
                stream_task_id=self.stream.task_id,
            )
            self.watch_errors = StreamErrorSensor(task_id="watch_errors", pipeline=pipeline, deferrable=True)
            self.drop_slot = DropReplicationSlotOperator(task_id="drop_slot", pipeline=pipeline, when=drop_when)
        watched = [self.stream, self.wait_caught_up, self.watch_errors]
        self.preflight >> self.create_slot >> self.snapshot >> watched
        watched >> self.drop_slot.as_teardown(setups=self.create_slot)
