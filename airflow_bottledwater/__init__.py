"""Change data capture for Apache Airflow: a consistent snapshot of a PostgreSQL database, then every committed change,
in Kafka."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_bottledwater.dag import Pipeline
    from airflow_bottledwater.hooks.changes import ChangesHook
    from airflow_bottledwater.operators.approval import (
        DropReplicationSlotApprovalOperator,
        PipelineControlApprovalOperator,
    )
    from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator
    from airflow_bottledwater.operators.control import PipelineControlOperator
    from airflow_bottledwater.operators.health import PipelineHealthOperator
    from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
    from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator, DropReplicationSlotOperator
    from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
    from airflow_bottledwater.operators.stream import StreamToKafkaOperator
    from airflow_bottledwater.operators.verify import VerifyTopicsOperator
    from airflow_bottledwater.pipeline.description import Kafka, Schedules, Source, Spark, Types
    from airflow_bottledwater.pipeline.table import Table
    from airflow_bottledwater.sensors.dead_letters import DeadLettersSensor
    from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
    from airflow_bottledwater.sensors.stream_error import StreamErrorSensor
    from airflow_bottledwater.sensors.stream_position import StreamPositionSensor
    from airflow_bottledwater.task_group import BottledWaterTaskGroup
    from airflow_bottledwater.triggers.alarms import DeadLettersAlarmTrigger, SlotLagAlarmTrigger
    from airflow_bottledwater.triggers.table_changed import TableChangedTrigger

__version__ = "0.1.0"

#: the users' classes and their modules, which are imported when they are used: the package's parts need neither Airflow
#: nor each other
_EXPORTS = {
    "BackfillToKafkaOperator": "operators.backfill",
    "BottledWaterTaskGroup": "task_group",
    "ChangesHook": "hooks.changes",
    "CreateReplicationSlotOperator": "operators.slot",
    "DeadLettersAlarmTrigger": "triggers.alarms",
    "DeadLettersSensor": "sensors.dead_letters",
    "DropReplicationSlotApprovalOperator": "operators.approval",
    "DropReplicationSlotOperator": "operators.slot",
    "Kafka": "pipeline.description",
    "Pipeline": "dag",
    "PipelineControlApprovalOperator": "operators.approval",
    "PipelineControlOperator": "operators.control",
    "PipelineHealthOperator": "operators.health",
    "ReplicationPreflightOperator": "operators.preflight",
    "ReplicationSlotLagSensor": "sensors.slot_lag",
    "Schedules": "pipeline.description",
    "SlotLagAlarmTrigger": "triggers.alarms",
    "SnapshotToKafkaOperator": "operators.snapshot",
    "Source": "pipeline.description",
    "Spark": "pipeline.description",
    "StreamErrorSensor": "sensors.stream_error",
    "StreamPositionSensor": "sensors.stream_position",
    "StreamToKafkaOperator": "operators.stream",
    "Table": "pipeline.table",
    "TableChangedTrigger": "triggers.table_changed",
    "Types": "pipeline.description",
    "VerifyTopicsOperator": "operators.verify",
}

__all__ = [
    "BackfillToKafkaOperator",
    "BottledWaterTaskGroup",
    "ChangesHook",
    "CreateReplicationSlotOperator",
    "DeadLettersAlarmTrigger",
    "DeadLettersSensor",
    "DropReplicationSlotApprovalOperator",
    "DropReplicationSlotOperator",
    "Kafka",
    "Pipeline",
    "PipelineControlApprovalOperator",
    "PipelineControlOperator",
    "PipelineHealthOperator",
    "ReplicationPreflightOperator",
    "ReplicationSlotLagSensor",
    "Schedules",
    "SlotLagAlarmTrigger",
    "SnapshotToKafkaOperator",
    "Source",
    "Spark",
    "StreamErrorSensor",
    "StreamPositionSensor",
    "StreamToKafkaOperator",
    "Table",
    "TableChangedTrigger",
    "Types",
    "VerifyTopicsOperator",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
