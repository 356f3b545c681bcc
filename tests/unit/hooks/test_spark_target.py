"""Where a job may run, and what is said where it may not."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.hooks import spark_target
from airflow_bottledwater.hooks.spark_target import SparkTarget

CLIENT = SparkTarget("spark_default", False, "spark://m:7077")
YARN = SparkTarget("spark_default", True, "yarn")
KUBERNETES = SparkTarget("spark_default", True, "k8s://https://k:443")


@pytest.mark.parametrize(
    ("place", "executor", "detached", "settings_file", "refused"),
    [
        (CLIENT, "LocalExecutor", True, None, ""),
        (CLIENT, "CeleryExecutor", True, None, ""),
        (CLIENT, "airflow.providers.edge3.executors.EdgeExecutor", True, None, ""),
        (CLIENT, "KubernetesExecutor", True, None, "deferrable=False"),
        (CLIENT, "airflow.providers.amazon.aws.executors.ecs.AwsEcsExecutor", True, None, "deferrable=False"),
        # its workers are pods or the scheduler's own, as the task says: nobody can know
        (CLIENT, "LocalKubernetesExecutor", True, None, "deferrable=False"),
        (CLIENT, "KubernetesExecutor", False, None, ""),
        (YARN, "KubernetesExecutor", True, None, ""),
        (KUBERNETES, "LocalExecutor", True, None, "settings_file"),
        (KUBERNETES, "KubernetesExecutor", True, "/etc/bottledwater/pipeline.json", ""),
        # the first of several is the default
        (CLIENT, "KubernetesExecutor,LocalExecutor", True, None, "deferrable=False"),
        (CLIENT, "LocalExecutor,KubernetesExecutor", True, None, ""),
    ],
)
def test_what_goes_together(
    monkeypatch: pytest.MonkeyPatch,
    place: SparkTarget,
    executor: str,
    detached: bool,
    settings_file: str | None,
    refused: str,
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    if not refused:
        spark_target.check(place, detached=detached, settings_file=settings_file)
        return
    with pytest.raises(Refused, match=refused):
        spark_target.check(place, detached=detached, settings_file=settings_file)
    if detached and not place.cluster:
        spark_target.check(place, detached=detached, executor="LocalExecutor", settings_file=settings_file)


@pytest.mark.parametrize("configured", ["LocalExecutor", "CeleryExecutor", "LocalExecutor,KubernetesExecutor"])
def test_a_pod_of_kubernetes_executor_is_one_whatever_its_template_configures(
    monkeypatch: pytest.MonkeyPatch, connect: Any, configured: str
) -> None:
    """Airflow's pod templates, also those of its chart, set LocalExecutor inside of the pods."""
    connect("s", conn_type="spark", host="local[2]")
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", configured)
    assert spark_target.problems("s", {"stream": {}}, None) == []
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    with pytest.raises(Refused, match="a worker of KubernetesExecutor ends with its task"):
        spark_target.check(CLIENT, detached=True)
    spark_target.check(CLIENT, detached=True, executor="CeleryExecutor")
    (problem,) = spark_target.problems("s", {"snapshot": {}, "stream": {}}, None)
    assert "of KubernetesExecutor" in problem
    # as it advises
    assert spark_target.problems("s", {"stream": {"deferrable": False}}, None) == []
    # only the task that asks has KubernetesExecutor, by its own argument: the stream has the default
    assert spark_target.problems("s", {"stream": {}}, "KubernetesExecutor") == []


@pytest.mark.parametrize(
    ("host", "port", "mode", "place"),
    [
        ("local[2]", None, None, SparkTarget("s", False, "local[2]")),
        ("spark://m", 7077, "client", SparkTarget("s", False, "spark://m:7077")),
        ("yarn", None, "cluster", SparkTarget("s", True, "yarn")),
        ("k8s://https://k", 443, "cluster", SparkTarget("s", True, "k8s://https://k:443", "cdc")),
        ("spark://m", 7077, "cluster", None),
        ("local[2]", None, "cluster", None),
    ],
)
def test_a_connection_says_where(
    connect: Any, host: str, port: int | None, mode: str | None, place: SparkTarget | None
) -> None:
    extra = {"namespace": "cdc"} if host.startswith("k8s") else {}
    connect("s", conn_type="spark", host=host, port=port, extra={**extra, **({"deploy-mode": mode} if mode else {})})
    if place is None:
        with pytest.raises(Refused, match="deploy-mode to client"):
            spark_target.find("s")
        assert not spark_target.find("s", mode="client").cluster
    else:
        assert spark_target.find("s") == place


@pytest.mark.parametrize("extra", [{}, {"namespace": "of-the-connection"}])
def test_on_kubernetes_the_tasks_properties_come_first(connect: Any, extra: dict[str, str]) -> None:
    """As in the Spark provider, and in Spark: what is submitted elsewhere could not be cancelled."""
    connect("s", conn_type="spark", host="k8s://https://k", port=443, extra={**extra, "deploy-mode": "cluster"})
    properties = {"spark.kubernetes.namespace": "cdc", "spark.kubernetes.driver.pod.name": "mine"}
    assert spark_target.find("s", properties=properties) == SparkTarget("s", True, "k8s://https://k:443", "cdc", "mine")
    assert spark_target.find("s").namespace == extra.get("namespace")


@pytest.mark.parametrize(
    ("uri", "master"),
    [
        ("k8s://https%3A%2F%2Fk:443", "k8s://https://k:443"),
        ("k8s://k:443", "k8s://k:443"),
        ("spark://m:7077", "spark://m:7077"),
        ("spark://local%5B2%5D", "local[2]"),
        ("spark://yarn", "yarn"),
    ],
)
def test_a_connection_given_as_a_uri_has_the_master_that_the_spark_provider_takes(
    monkeypatch: pytest.MonkeyPatch, uri: str, master: str
) -> None:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    monkeypatch.setenv("AIRFLOW_CONN_OF_A_URI", uri)
    assert spark_target.find("of_a_uri", mode="client").master == master
    assert SparkSubmitHook._resolve_connection(_hook("of_a_uri"))["master"] == master


def _hook(conn_id: str) -> Any:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    made = SparkSubmitHook.__new__(SparkSubmitHook)
    made.spark_binary, made._conn_id, made._principal, made._keytab = None, conn_id, None, None
    made._yarn_queue, made._deploy_mode, made._conf = None, None, {}
    return made
