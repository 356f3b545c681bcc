"""The provider metadata that Airflow reads at start. It imports nothing of the package, to stay cheap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_NAME = "Bottled Water"

#: the section of Airflow's configuration, all of it optional (docs/page.md)
_CONFIG: dict[str, Any] = {
    "bottledwater": {
        "description": "The page Bottled Water, links at tasks, and which Airflow it is.",
        "options": {
            "airflow_id": {
                "description": "The name of this Airflow among those with pipelines in one Kafka, the same for all of "
                "its components; empty: [api] base_url.",
                "version_added": None,
                "type": "string",
                "example": "production",
                "default": "",
            },
            "kafka_conn_ids": {
                "description": "Further connections to Kafkas, comma-separated: those of a secrets backend.",
                "version_added": None,
                "type": "string",
                "example": "kafka_orders,kafka_billing",
                "default": "",
            },
            "topic_url": {
                "description": "The address of a topic in a console, with {topic} for its name.",
                "version_added": None,
                "type": "string",
                "example": "https://console.example.com/topics/{topic}",
                "default": "",
            },
            "spark_url": {
                "description": "An application in Spark's history server, with {application} for its id.",
                "version_added": None,
                "type": "string",
                "example": "https://history.example.com/history/{application}",
                "default": "",
            },
        },
    }
}


def _modules(room: str) -> list[dict[str, Any]]:
    """All modules of a folder of the package, so that one that is added need not be named here."""
    names = sorted(path.stem for path in (Path(__file__).parent / room).glob("[!_]*.py"))
    return [{"integration-name": _NAME, "python-modules": [f"airflow_bottledwater.{room}.{name}" for name in names]}]


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
        **{room: _modules(room) for room in ("operators", "sensors", "triggers", "hooks")},
        "config": _CONFIG,
        "extra-links": [
            f"airflow_bottledwater.operators.links.{name}" for name in ("PipelineLink", "TopicLink", "SparkLink")
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
