"""What Airflow reads of the package, and what importing it costs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from airflow_bottledwater.get_provider_info import get_provider_info

ROOT = Path(__file__).parents[2]
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


def test_every_module_with_an_operator_a_sensor_or_a_trigger_is_listed() -> None:
    present = {
        f"airflow_bottledwater.{room}.{path.stem}"
        for room in ("operators", "sensors", "triggers")
        for path in (ROOT / "airflow_bottledwater" / room).glob("*.py")
        if path.stem not in ("__init__", "base")
    }
    assert present <= set(LISTED)


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


@pytest.mark.parametrize(
    "what",
    [
        "import airflow_bottledwater.task_group, airflow_bottledwater.triggers.stream, airflow_bottledwater.triggers.stream_error",
        f"import runpy; runpy.run_path({str(ROOT / 'dags' / 'bottledwater.py')!r})",
    ],
    ids=["task group", "DAG"],
)
def test_operators_do_without_the_packages_of_the_data_plane(tmp_path: Path, what: str) -> None:
    heavy = "[m for m in ('pyspark', 'numba', 'llvmlite', 'numpy') if m in sys.modules]"
    assert python(f"{what}\nimport sys; print({heavy})", tmp_path).splitlines()[-1] == "[]"


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
    assert python(code, tmp_path, str(ROOT / "dags")).splitlines()[-1] == "bottledwater"
