"""What Airflow reads of the package, and what importing it costs."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.providers_manager import ProvidersManager
from airflow.sdk import DAG, BaseHook, BaseOperator, BaseSensorOperator
from airflow.triggers.base import BaseTrigger

import airflow_bottledwater
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.get_provider_info import get_provider_info
from airflow_bottledwater.local import demo_stack
from airflow_bottledwater.pipeline.settings import SETTINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DAGS = sorted((ROOT / "dags").glob("*.py"))
FORMS = [path.stem for path in DAGS if path.stem != "bottledwater_files"]
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
def test_every_module_with_something_of_its_kind_is_listed(room: str, kind: type) -> None:
    defining = {
        name
        for name in modules(room)
        for each in vars(importlib.import_module(name)).values()
        if isinstance(each, type) and issubclass(each, kind) and each.__module__ == name
    }
    assert defining
    assert defining <= {module for entry in INFO[room] for module in entry["python-modules"]}


@pytest.mark.parametrize("module", LISTED)
def test_every_listed_module_imports(module: str) -> None:
    importlib.import_module(module)


def test_the_classes_of_connection_types_are_there() -> None:
    for entry in INFO["connection-types"]:
        module, _, name = entry["hook-class-name"].rpartition(".")
        hook = getattr(importlib.import_module(module), name)
        assert (hook.conn_type, hook.hook_name) == (entry["connection-type"], entry["hook-name"])


def test_airflow_finds_the_provider() -> None:
    found = ProvidersManager().providers[INFO["package-name"]]
    assert found.data["description"].startswith("Change data capture")


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
    modules = "airflow_bottledwater.pipeline.settings, airflow_bottledwater.get_provider_info, sys"
    code = f"import {modules}; print('airflow' in sys.modules)"
    assert python(code, tmp_path).strip() == "False"


def test_the_dags_have_no_errors() -> None:
    bag = DagBag(ROOT / "dags")
    assert bag.import_errors == {}
    assert set(bag.dags) == {
        f"bottledwater{name}" for name in ("", "_backfill", "_bounded", "_control", "_health", "_verify")
    }
    # a stream's run goes on for as long as the stream does
    shown = bag.dags["bottledwater"]
    assert shown.max_active_runs == 1 and "a second run, also one for another pipeline, stays queued" in shown.doc_md


def form(name: str) -> dict[str, Any]:
    """The fields of a DAG's form."""
    params = runpy.run_path(str(ROOT / "dags" / f"{name}.py"))["dag"].params
    fields = {name: params.get_param(name) for name in params}
    return {
        name: {**each.schema, "description": each.description, "default": each.value} for name, each in fields.items()
    }


@pytest.mark.parametrize("name", FORMS)
def test_every_field_of_a_form_is_named_and_described(name: str) -> None:
    fields = form(name)
    assert all(field["title"] and field["description"].endswith(".") for field in fields.values())
    # so that what was filled in for the pipeline is found again, and the demo's pipeline needs nothing filled in
    if name == "bottledwater_health":
        # of all pipelines
        assert {"kafka_conn_id", "postgres_conn_ids", "pipelines"} <= set(fields)
        return
    assert {"postgres_conn_id", "kafka_conn_id"} <= set(fields)
    assert "schema_registry_conn_id" in fields
    assert fields["slot"]["default"] == demo_stack.SLOT


def test_what_a_pipeline_needs_is_open_when_the_form_comes_up() -> None:
    fields = form("bottledwater")
    # which has no section
    assert {"postgres_conn_id", "kafka_conn_id", "schema_registry_conn_id", "spark_conn_id", "slot", "tables"} <= {
        name for name, field in fields.items() if "section" not in field
    }
    sections = [*dict.fromkeys(field.get("section") for field in fields.values())]
    assert sections == [None, "Source", "Kafka", "Types", "Spark", "Behaviour"]
    # each setting has a field, with its own rule
    secret = {name for name, setting in SETTINGS.items() if setting.secret}
    assert SETTINGS.keys() - secret <= set(fields)
    assert (fields["partitions"]["minimum"], fields["new_tables"]["enum"]) == (1, ["add", "ignore", "stop"])
    for name, field in fields.items():
        assert jsonschema.Draft7Validator(field).is_valid(field["default"]), name


YAML = """
name: {name}
source: {{conn_id: pg, tables: [orders, "s.*"]}}
kafka: {{conn_id: kafka, format: json, topic_prefix: {name}}}
spark: {{conn_id: spark, conf: {{spark.executor.memory: 2g}}}}
schedules: {{bounded: "*/5 * * * *", verify: "@daily", backfill_by: created_at}}
on_error: log
"""

#: what Airflow takes of the files' DAGs, and its import errors
BAGGED = """
import json, sys
from pathlib import Path
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(Path(sys.argv[1]) / "bottledwater_files.py", bundle_path=Path(sys.argv[1]), bundle_name="x")
print(json.dumps([sorted(bag.dags), bag.import_errors]))
"""


def test_a_folder_of_files_makes_the_dags_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    monkeypatch.setenv("BOTTLEDWATER_PIPELINES", str(folder))
    for number in range(8):
        (folder / f"p{number}.yaml").write_text(YAML.format(name=f"p{number}"))
    file = str(ROOT / "dags" / "bottledwater_files.py")
    found = [name for name, each in runpy.run_path(file).items() if isinstance(each, DAG)]
    own = ["p7", "p7_backfill", "p7_bounded", "p7_control", "p7_verify"]
    assert sorted(name for name in found if name.startswith("p7")) == own
    assert len(found) == 40
    (folder / "p0.yaml").write_text("name: p0\nkafka: {formt: json}\n")
    bagged, errors = json.loads(python(BAGGED, tmp_path, str(ROOT / "dags")).splitlines()[-1])
    assert bagged == sorted(name for name in found if not re.fullmatch("p0(_.*)?", name))
    assert list(errors) == ["bottledwater_files.py"]
    assert "p0.yaml: setting 'kafka.formt' does not exist (did you mean 'format'" in errors["bottledwater_files.py"]


def test_a_pipeline_whose_dags_have_the_ids_of_another_ones_is_not_loaded(tmp_path: Path) -> None:
    for file, name in ("1.yaml", "shop_verify"), ("2.yaml", "shop"), ("3.yaml", "store"):
        (tmp_path / file).write_text(YAML.format(name=name))
    found = airflow_bottledwater.Pipeline.dags_of_folder(tmp_path)
    assert {"shop_verify", "shop_verify_verify", "store", "store_control"} <= found.keys() and "shop" not in found
    assert found["shop_verify"].has_task("stream")
    with pytest.raises(Refused, match="'shop' a pipeline with a DAG 'shop_verify', which another"):
        found["bottledwater_files_not_loaded"].validate()


def test_what_users_take_is_exported_by_the_package_and_imported_when_it_is_used(tmp_path: Path) -> None:
    for name in airflow_bottledwater.__all__:
        assert getattr(airflow_bottledwater, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = airflow_bottledwater.nothing
    code = "from airflow_bottledwater import Source; import sys; print('airflow' in sys.modules)"
    assert python(code, tmp_path).strip() == "False"


def test_the_dags_of_a_pipeline_have_its_name_and_take_arguments_of_a_dag() -> None:
    shop = airflow_bottledwater.Pipeline("shop", source=airflow_bottledwater.Source(tables=["orders"]))
    made = shop.dag(schedule="@once", tags=["mine"], stream={"timeout": 60})
    assert (made.dag_id, made.tags, made.get_task("stream").timeout) == ("shop", {"mine"}, 60)
    backfill = shop.backfill_dag(by="created_at", dag_id="again").get_task("backfill")
    assert (backfill.dag_id, backfill.tables) == ("again", ["orders"])
    assert "created_at >= '{{ data_interval_start" in backfill.where
    assert shop.verify_dag(sample=0.1).get_task("verify").own_settings() == {"verify_sample": 0.1}
    assert shop.bounded_dag().get_task("stream").bounded is True
    assert [each.dag_id for each in shop.dags()] == ["shop", "shop_control"]
    control = shop.control_dag()
    assert control.get_task("start").trigger_dag_id == "shop" and control.is_paused_upon_creation is False


def test_the_ready_control_dag_starts_a_pipeline_with_all_connections_of_its_form() -> None:
    dag = runpy.run_path(str(ROOT / "dags" / "bottledwater_control.py"))["dag"]
    own = {"slot": "shop", **{f"{each}_conn_id": f"shop_{each}" for each in ("postgres", "kafka", "schema_registry")}}
    start = dag.get_task("start")
    context = {"params": {**dag.params.dump(), **own, "conf": {"tables": ["a"]}}}
    assert start.render_template(start.conf, context) == {**own, "tables": ["a"]}
