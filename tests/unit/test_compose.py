"""docker-compose.yaml: valid by the specification's schema, and consistent in itself and with the DAG. It is not
run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
AIRFLOW = {name: service for name, service in SERVICES.items() if name.startswith("airflow-")}


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "compose-spec" / "compose-spec.json").read_text())
    return loaded


def test_it_follows_the_compose_specification() -> None:
    validator = jsonschema.Draft7Validator(schema())
    assert [f"{'/'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(COMPOSE)] == []


def test_the_schema_would_notice_a_mistake() -> None:
    broken = {**COMPOSE, "services": {**SERVICES, "kafka": {**SERVICES["kafka"], "enviroment": {}}}}
    assert list(jsonschema.Draft7Validator(schema()).iter_errors(broken))


def test_what_services_depend_on_and_mount_exists() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).is_dir()
        assert {config["source"] for config in service.get("configs", [])} <= set(COMPOSE["configs"])


def test_who_is_waited_for_until_healthy_has_a_health_check() -> None:
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[name]


def test_all_of_airflow_is_one_image_with_one_environment() -> None:
    assert set(AIRFLOW) == {f"airflow-{n}" for n in ("init", "api-server", "scheduler", "triggerer", "dag-processor")}
    for key in ("image", "build", "environment", "volumes"):
        assert len({json.dumps(service[key], sort_keys=True) for service in AIRFLOW.values()}) == 1


def test_the_image_has_java_and_the_wheel_with_its_extras() -> None:
    dockerfile = AIRFLOW["airflow-scheduler"]["build"]["dockerfile_inline"]
    assert "temurin:17" in dockerfile
    assert re.search(r"FROM apache/airflow:3\.3\.", dockerfile)
    assert "COPY dist/*.whl" in dockerfile
    assert "[airflow,spark]" in dockerfile


def test_the_modules_that_the_image_runs_exist() -> None:
    modules = re.findall(r"-m (airflow_bottledwater[\w.]*)", TEXT)
    assert modules
    assert all((ROOT / module.replace(".", "/")).with_suffix(".py").exists() for module in modules)


def test_dollars_are_escaped_or_variables_with_a_default() -> None:
    code = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    unescaped = re.findall(r"\$[^$]{0,40}", code.replace("$$", ""))
    assert all(re.match(r"\$\{[A-Z_]+:-", found) for found in unescaped), unescaped


@pytest.mark.parametrize("name", ["postgres", "kafka", "schema_registry", "spark"])
def test_the_dags_default_connections_are_there_and_name_services(name: str) -> None:
    connection = json.loads(AIRFLOW["airflow-scheduler"]["environment"][f"AIRFLOW_CONN_{name.upper()}_DEFAULT"])
    assert connection["conn_type"] == name
    hosts = re.findall(
        r"(?:http://)?([a-z-]+):\d+", " ".join([connection.get("host", ""), str(connection.get("extra", ""))])
    )
    hosts += [connection["host"]] if name == "postgres" else []
    assert set(hosts) <= set(SERVICES)
    if name == "spark":
        assert connection["extra"]["deploy-mode"] == "client"
    else:
        assert hosts


def test_the_source_streams_and_its_connection_fits() -> None:
    source = SERVICES["source"]
    assert "wal_level=logical" in source["command"]
    connection = json.loads(AIRFLOW["airflow-scheduler"]["environment"]["AIRFLOW_CONN_POSTGRES_DEFAULT"])
    environment = source["environment"]
    assert (connection["login"], connection["password"], connection["schema"]) == (
        environment["POSTGRES_USER"], environment["POSTGRES_PASSWORD"], environment["POSTGRES_DB"],
    )  # fmt: skip


def test_the_folders_of_jobs_outlive_the_scheduler() -> None:
    assert "airflow-jobs:/opt/airflow/bottledwater" in AIRFLOW["airflow-scheduler"]["volumes"]


def test_ports_are_open_on_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
