"""What Airflow reads of the package at start: no imports here."""

from __future__ import annotations

from typing import Any

_NAME = "Bottled Water"


def get_provider_info() -> dict[str, Any]:
    """Provider metadata (airflow/provider_info.schema.json)."""
    return {
        "package-name": "airflow-provider-bottledwater",
        "name": _NAME,
        "description": "Change data capture: PostgreSQL snapshots and change streams into Kafka, exactly once.",
        "integrations": [
            {
                "integration-name": _NAME,
                "external-doc-url": "https://pypi.org/project/airflow-provider-bottledwater/",
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "airflow_bottledwater.operators.preflight",
                    "airflow_bottledwater.operators.slot",
                    "airflow_bottledwater.operators.snapshot",
                    "airflow_bottledwater.operators.stream",
                ],
            }
        ],
        "sensors": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "airflow_bottledwater.sensors.slot_lag",
                    "airflow_bottledwater.sensors.stream_error",
                ],
            }
        ],
        "triggers": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "airflow_bottledwater.triggers.stream",
                    "airflow_bottledwater.triggers.slot_lag",
                    "airflow_bottledwater.triggers.stream_error",
                ],
            }
        ],
        "hooks": [
            {
                "integration-name": _NAME,
                "python-modules": [
                    "airflow_bottledwater.hooks.pipeline",
                    "airflow_bottledwater.hooks.schema_registry",
                    "airflow_bottledwater.hooks.source",
                    "airflow_bottledwater.hooks.spark_job",
                ],
            }
        ],
        "connection-types": [
            {
                "connection-type": "schema_registry",
                "hook-class-name": "airflow_bottledwater.hooks.schema_registry.SchemaRegistryHook",
                "hook-name": "Schema Registry",
                "ui-field-behaviour": {
                    "hidden-fields": [],
                    "relabeling": {"host": "URL", "login": "User", "schema": "http or https"},
                    "placeholders": {
                        "host": "https://registry.example.com",
                        "extra": '{"ssl.ca.location": "/etc/ssl/registry.pem"}',
                    },
                },
            }
        ],
    }
