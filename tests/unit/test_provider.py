"""What Airflow reads of the package, and what importing it costs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from airflow.sdk import BaseHook, BaseOperator, BaseSensorOperator
from airflow.triggers.base import BaseTrigger

from airflow_bottledwater.get_provider_info import get_provider_info
from airflow_bottledwater.local import demo_stack

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DAGS = sorted((ROOT / "dags").glob("*.py"))
INFO = get_provider_info()
ROOMS = ("operators", "sensors", "triggers", "hooks")
LISTED = [module for room in ROOMS for entry in INFO[room] for module in entry["python-modules"]]


def python(code: str, tmp_path: Path, *arguments: str) -> str:
    """What a fresh Python prints, with an Airflow of its own."""
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_provider_info_is_valid() -> None:
    schema = json.loads(resources.files("airflow").joinpath("provider_info.schema.json").read_text())
    jsonschema.validate(INFO, schema)


def modules(room: str) -> list[str]:
    """Of a room of the package."""
    folder = ROOT / "airflow_bottledwater" / room
    return [
        f"airflow_bottledwater.{room}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"
    ]


@pytest.mark.parametrize(
    ("room", "kind"),
    [
        ("operators", BaseOperator),
        ("sensors", BaseSensorOperator),
        ("triggers", BaseTrigger),
        ("hooks", BaseHook),
    ],
)
def test_every_module_with_something_of_its_kind_is_listed_and_no_other(room: str, kind: type) -> None:
    defining = {
        name
        for name in modules(room)
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, type) and issubclass(each, kind) and each.__module__ == name
    }
    assert defining == {module for entry in INFO[room] for module in entry["python-modules"]}


@pytest.mark.parametrize("module", LISTED)
def test_every_listed_module_imports(module: str) -> None:
    importlib.import_module(module)


def test_the_classes_of_connection_types_are_there() -> None:
    for entry in INFO["connection-types"]:
        module, _, name = entry["hook-class-name"].rpartition(".")
        hook = getattr(importlib.import_module(module), name)
        assert (hook.conn_type, hook.hook_name) == (entry["connection-type"], entry["hook-name"])


def test_airflow_finds_the_provider(tmp_path: Path) -> None:
    code = "from airflow.__main__ import main; import sys; sys.argv[1:] = ['providers', 'list', '-o', 'json']; main()"
    listed = json.loads(python(code, tmp_path))
    (found,) = (p for p in listed if p["package_name"] == INFO["package-name"])
    assert found["description"].startswith("Change data capture")


HEAVY = ("pyspark", "numba", "llvmlite", "numpy", "pandas", "confluent_kafka", "fastavro", "psycopg")


def test_operators_do_without_the_packages_of_the_data_plane(tmp_path: Path) -> None:
    """A DAG processor and a triggerer have neither need nor time for them."""
    names = ["airflow_bottledwater.task_group", *(name for room in ROOMS for name in modules(room))]
    code = f"""
import importlib, json, runpy, sys
loaded = {{}}
for name in {names!r} + {[str(path) for path in DAGS]!r}:
    runpy.run_path(name) if name.endswith(".py") else importlib.import_module(name)
    loaded[name] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
print(json.dumps(loaded))
"""
    loaded = json.loads(python(code, tmp_path).splitlines()[-1])
    assert loaded == {name: [] for name in loaded} and len(loaded) > 12


def test_the_packages_root_and_its_settings_do_without_airflow(tmp_path: Path) -> None:
    code = "import airflow_bottledwater.settings, airflow_bottledwater.get_provider_info, sys; print('airflow' in sys.modules)"
    assert python(code, tmp_path).strip() == "False"


def test_the_dags_have_no_errors(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom airflow.dag_processing.dagbag import DagBag\n"
        "bag = DagBag(sys.argv[1])\n"
        "assert bag.import_errors == {}, bag.import_errors\n"
        "print(','.join(sorted(bag.dags)))"
    )
    assert python(code, tmp_path, str(ROOT / "dags")).splitlines()[-1] == ",".join(
        f"bottledwater{name}" for name in ("", "_backfill", "_bounded", "_health", "_verify")
    )


def form(folder: Path, name: str) -> dict[str, Any]:
    """The fields of a DAG's form."""
    code = (
        "import json, runpy, sys\nparams = runpy.run_path(sys.argv[1])['dag'].params\n"
        "fields = {n: params.get_param(n) for n in params}\n"
        "print(json.dumps({n: {**p.schema, 'description': p.description, 'default': p.value} for n, p in fields.items()}))"
    )
    return dict(json.loads(python(code, folder, str(ROOT / "dags" / f"{name}.py")).splitlines()[-1]))


@pytest.mark.parametrize("name", [path.stem for path in DAGS])
def test_every_field_of_a_form_is_named_and_described(tmp_path: Path, name: str) -> None:
    fields = form(tmp_path, name)
    assert all(field["title"] and field["description"].endswith(".") for field in fields.values())
    # so that what was filled in for the pipeline is found again, and the demo's pipeline needs nothing filled in
    if name == "bottledwater_health":
        # of all pipelines
        assert {"kafka_conn_id", "postgres_conn_ids", "pipelines"} <= set(fields)
        return
    assert {"postgres_conn_id", "kafka_conn_id", "schema_registry_conn_id", "output_format"} <= set(fields)
    assert fields["slot"]["default"] == demo_stack.SLOT


def test_what_a_pipeline_needs_is_open_when_the_form_comes_up(tmp_path: Path) -> None:
    fields = form(tmp_path, "bottledwater")
    # which has no section
    assert {"postgres_conn_id", "kafka_conn_id", "schema_registry_conn_id", "spark_conn_id", "slot", "tables"} <= {
        name for name, field in fields.items() if "section" not in field
    }
    assert [*dict.fromkeys(field.get("section") for field in fields.values())] == [None, "Behaviour", "Advanced"]
