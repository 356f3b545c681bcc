"""docs/examples: valid by what can be checked without a service manager, a container platform or a cluster. None of
them is run."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from airflow_bottledwater import __version__, cli
from airflow_bottledwater.cli.options import _choose_format
from airflow_bottledwater.jobs.supervise import GRACE
from airflow_bottledwater.spark.job import EXIT_FAILED, EXIT_TRANSIENT
from tests.unit.test_compose import schema

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
DOCKERFILE = (EXAMPLES / "Dockerfile").read_text()
SERVICE = EXAMPLES / "bottledwater.service"
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose-command.yaml").read_text())
VALUES: dict[str, Any] = yaml.safe_load((EXAMPLES / "airflow-values.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "spark-on-kubernetes.yaml").read_text()))
KUBERNETES_VERSION = "1.37"
#: the longest that an ended command may take: its job's grace, and what follows it
ENDING = GRACE + 10


def parsed(arguments: list[str]) -> None:
    """Let the command read arguments, without doing anything.

    :raises click.ClickException: it does not accept them.
    """
    assert arguments[0].endswith("bottledwater")
    assert isinstance(cli.cli, click.Group)
    rest = arguments[1:]
    command: click.Command = cli.cli
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise click.UsageError(f"No such command {rest[0]!r}.")
        command = command.commands[rest.pop(0)]
    command.make_context("bottledwater", rest, resilient_parsing=False)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{_choose_format.__module__}.use_format", lambda name: None)


def test_each_example_is_checked() -> None:
    of_metrics = ["alert-rules.yaml", "grafana-dashboard.json"]  # tests/unit/metrics/test_alerts.py
    assert sorted(path.name for path in EXAMPLES.iterdir()) == sorted([
        "Dockerfile", "airflow-values.yaml", "bottledwater.service", "compose-command.yaml", "spark-on-kubernetes.yaml",
        *of_metrics,
    ])  # fmt: skip


# ------------------------------------------------------------------ systemd
def unit() -> configparser.RawConfigParser:
    found = configparser.RawConfigParser(strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(SERVICE)
    return found


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # everything but the program, which is not installed where this runs
    text = SERVICE.read_text().replace("/opt/bottledwater/bin/bottledwater", "/bin/true")
    copy = tmp_path / "bottledwater@shop.service"
    copy.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    copy.write_text(text.replace("KillMode=mixed", "KillMood=mixed"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert "KillMood" in done.stderr


def test_the_unit_is_started_again_by_exit_codes() -> None:
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"
    prevented = service["RestartPreventExitStatus"].split()
    assert str(EXIT_FAILED) in prevented and str(EXIT_TRANSIENT) not in prevented


def test_the_unit_lets_the_job_end_in_order() -> None:
    service = unit()["Service"]
    # the job's processes are ended by the command, not by systemd
    assert service["KillMode"] == "mixed"
    assert service.get("KillSignal", "SIGTERM") == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > ENDING


def test_the_unit_runs_a_command_that_is_accepted_and_has_no_secret_in_it() -> None:
    service = unit()["Service"]
    arguments = shlex.split(service["ExecStart"].replace("$BOTTLEDWATER_OPTIONS", "").replace("%d", "/run"))
    parsed(arguments)
    assert "--restart" in arguments
    assert "%d/pipeline.yaml" in service["ExecStart"]
    assert service["LoadCredential"].startswith("pipeline.yaml:")


def test_the_units_hardening_leaves_what_a_job_needs() -> None:
    service = unit()["Service"]
    assert service["NoNewPrivileges"] == service["PrivateTmp"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["User"] != "root"
    # the JVM and Numba
    assert {"MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork", "DynamicUser"} & set(service) == set()
    assert {"AF_INET", "AF_INET6", "AF_UNIX"} <= set(service["RestrictAddressFamilies"].split())
    # compiled code
    assert f"XDG_CACHE_HOME=/var/cache/{service['CacheDirectory']}" in SERVICE.read_text()


# ------------------------------------------------------------------ Dockerfile
def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments; continued lines are one."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for each in instructions():
        if each[0] == "FROM":
            name = each[1].split(" AS ")[1]
            found[name] = []
        found[name].append(each)
    return found


def test_a_dockerfile_has_only_instructions_that_there_are_and_names_each_stage() -> None:
    assert {name for name, _ in instructions()} <= {
        "ARG", "FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD", "ENTRYPOINT",
    }  # fmt: skip
    assert DOCKERFILE.startswith("# syntax=docker/dockerfile:1\n")
    assert set(stages()) == {"", "uv", "java", "package-built", "package-pypi", "package", "command", "airflow"}


def test_images_have_versions_and_are_chosen_by_arguments() -> None:
    defaults = dict(rest.split("=", 1) for name, rest in stages()[""] if name == "ARG")
    for name, rest in instructions():
        if name == "FROM":
            (argument,) = re.findall(r"\$\{(\w+)\}", rest) or [""]
            assert argument in defaults
    images = {name: image for name, image in defaults.items() if name.endswith("_IMAGE")}
    assert all(":" in image and not image.endswith(":latest") for image in images.values())
    assert images["SPARK_IMAGE"].startswith("apache/spark:4.2.0-")
    assert images["AIRFLOW_IMAGE"].startswith("apache/airflow:3.3.2-")
    assert {f"package-{source}" for source in ("built", "pypi")} <= set(stages())
    assert defaults["PACKAGE"] == "built"


@pytest.mark.parametrize("stage", ["command", "airflow"])
def test_an_image_runs_without_root_and_has_compiled_code(stage: str) -> None:
    found = stages()[stage]
    users = [rest for name, rest in found if name == "USER"]
    assert users[-1] in ("spark", "airflow")
    last_user = max(i for i, (name, _) in enumerate(found) if name == "USER")
    (warmed,) = [i for i, (name, rest) in enumerate(found) if name == "RUN" and "-m airflow_bottledwater.warm" in rest]
    # as the user who runs it later: compiled code of another one is not used
    assert warmed > last_user
    # and before, by one who may write into the package, what does without a folder that can be written
    made = [i for i, (name, rest) in enumerate(found) if name == "RUN" and "-m airflow_bottledwater.prebuild" in rest]
    assert len(made) == 1 and made[0] <= warmed and (stage == "airflow" or made[0] < last_user)
    installed = "[spark]" if stage == "command" else "[airflow,spark]"
    assert any(f"/packages/*.whl){installed}" in rest for name, rest in found if name == "RUN")
    assert not any(name == "ENTRYPOINT" for name, _ in found)


def test_what_is_copied_into_the_wheel_exists_and_is_all_that_it_is_built_from() -> None:
    copied = {part for name, rest in stages()["package-built"] if name == "COPY" for part in rest.split()[:-1]}
    assert all((ROOT / part).exists() for part in copied)
    project = (ROOT / "pyproject.toml").read_text()
    included = re.findall(r'^"([\w./]+)" = "airflow_bottledwater/', project, re.MULTILINE)
    assert {path.partition("/")[0] for path in included} | {
        "airflow_bottledwater",
        "pyproject.toml",
        "README.md",
    } <= copied


def test_the_version_is_this_one() -> None:
    assert f"ARG VERSION={__version__}" in DOCKERFILE
    assert VALUES["images"]["airflow"]["tag"] == __version__


# ------------------------------------------------------------------ Compose
def test_the_compose_file_follows_the_specification() -> None:
    validator = jsonschema.Draft7Validator(schema())
    assert [f"{'/'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(COMPOSE)] == []


def test_the_container_is_probed_and_ends_in_order() -> None:
    service = COMPOSE["services"]["shop"]
    parsed(service["command"])
    assert "--restart" in service["command"]
    kind, *probe = service["healthcheck"]["test"]
    assert kind == "CMD"
    parsed(probe)
    assert {"status", "--check"} <= set(probe)
    assert seconds(service["healthcheck"]["timeout"]) > 10
    assert seconds(service["stop_grace_period"]) > ENDING
    assert service["stop_signal"] == "SIGTERM"
    assert set(service["secrets"]) == set(COMPOSE["secrets"])
    assert all(source.partition(":")[0] in COMPOSE["volumes"] for source in service["volumes"])


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


# ------------------------------------------------------------------ Kubernetes
def test_airflows_chart_gets_executor_image_and_secrets_by_volume() -> None:
    assert VALUES["executor"] == "KubernetesExecutor"
    assert VALUES["airflowVersion"] == "3.3.2"
    for pods in (VALUES["workers"]["kubernetes"], VALUES["triggerer"]):
        (volume,), (mount,) = pods["extraVolumes"], pods["extraVolumeMounts"]
        assert volume["name"] == mount["name"]
        assert volume["secret"]["secretName"]
        assert mount["readOnly"] is True
        assert f'"{mount["mountPath"]}/connections.json"' in VALUES["config"]["workers"]["secrets_backend_kwargs"]
    assert VALUES["workers"]["kubernetes"]["terminationGracePeriodSeconds"] > ENDING


#: the parameters of the chart that are used here, by their place; its own schema is too large to be kept, and refuses
#: any other name
CHART = {
    "": {"airflowVersion", "executor", "images", "config", "workers", "triggerer"},
    "images": {"airflow"},
    "images.airflow": {"repository", "tag", "pullPolicy"},
    "workers": {"kubernetes"},
    "workers.kubernetes": {
        "serviceAccount", "terminationGracePeriodSeconds", "resources", "extraVolumes", "extraVolumeMounts",
    },
    "workers.kubernetes.serviceAccount": {"create", "name"},
    "triggerer": {"extraVolumes", "extraVolumeMounts"},
}  # fmt: skip


def test_the_charts_values_have_its_names_and_what_they_give_to_pods_follows_the_schema_of_kubernetes() -> None:
    for place, names in CHART.items():
        found: dict[str, Any] = VALUES
        for part in filter(None, place.split(".")):
            found = found[part]
        assert set(found) == names, place
    for pods in (VALUES["workers"]["kubernetes"], VALUES["triggerer"]):
        container = {"name": "base", "image": "x", "volumeMounts": pods["extraVolumeMounts"]}
        container |= {"resources": pods["resources"]} if "resources" in pods else {}
        spec = {"containers": [container], "volumes": pods["extraVolumes"]}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        container["volumeMounts"] = [{**mount, "readonly": True} for mount in pods["extraVolumeMounts"]]
        with pytest.raises(kubernetes_validate.ValidationError, match="readonly"):
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [each for each in KUBERNETES if each["kind"] == kind]
    return found


def test_a_driver_may_make_the_pods_of_its_executors() -> None:
    account, role, binding = (of_kind(kind) for kind in ("ServiceAccount", "Role", "RoleBinding"))
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    (rule,) = role["rules"]
    assert {"pods", "services", "configmaps"} <= set(rule["resources"])
    assert {"create", "get", "list", "watch", "delete", "deletecollection"} <= set(rule["verbs"])
    assert "*" not in [*rule["resources"], *rule["verbs"]]
    assert VALUES["workers"]["kubernetes"]["serviceAccount"]["name"] == account["metadata"]["name"]


def test_the_deployment_is_one_job_that_is_probed_and_has_its_settings() -> None:
    deployment, secret, service = (of_kind(kind) for kind in ("Deployment", "Secret", "Service"))
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == service["spec"]["selector"]
    pod = spec["template"]["spec"]
    assert pod["serviceAccountName"] == of_kind("ServiceAccount")["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] > ENDING
    (container,), (volume,) = pod["containers"], pod["volumes"]
    parsed(container["args"])
    parsed(container["readinessProbe"]["exec"]["command"])
    assert "livenessProbe" not in container
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    (name,) = secret["stringData"]
    assert f"--config={mount['mountPath']}/{name}" in container["args"]
    ports = {str(port["port"]) for port in service["spec"]["ports"]}
    assert {arg.rpartition("=")[2] for arg in container["args"] if ".port=" in arg} == ports
    assert f"--spark-conf=spark.driver.host={service['metadata']['name']}" in container["args"]
    # before the pod is ready, its name is not known to others, and never to itself; the pod is ready when the job works
    assert service["spec"]["publishNotReadyAddresses"]
    assert "--spark-conf=spark.driver.bindAddress=0.0.0.0" in container["args"]
    # the names that Spark needs come from the pod
    assert {each["name"] for each in container["env"]} == set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
