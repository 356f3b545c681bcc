"""Where a job may run: which deploy modes, masters and executors go together. The table is in docs/operations.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow.sdk import conf

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.hooks import connections

#: executors whose workers are hosts that live on when a task has ended: a job may be left there as a detached process
_KEEP_PROCESSES = ("LocalExecutor", "CeleryExecutor", "EdgeExecutor")


#: the arguments of an operator that say where its job runs, beside what the pipeline says of Spark
WHERE = ("executor", "deferrable")


@dataclass(frozen=True, slots=True)
class SparkTarget:
    """Where a job is going to run.

    :param conn_id: the Spark connection.
    :param cluster: whether its driver runs in the cluster; otherwise on the worker's host.
    :param master: Spark's master.
    :param namespace: Kubernetes' namespace; None for the default.
    :param pod: the name of the driver's pod on Kubernetes, if the user gives it one.
    """

    conn_id: str
    cluster: bool
    master: str
    namespace: str | None = None
    pod: str | None = None

    @property
    def kubernetes(self) -> bool:
        """Whether the driver is a pod of its own."""
        return self.cluster and self.master.startswith("k8s://")


def master_of(connection: Any) -> str:
    """Spark's master by a connection, as ``SparkSubmitHook._resolve_connection`` of the Spark provider makes it: in a
    connection that was given as a URI (``k8s://…``, ``spark://…``), the scheme is the connection's type, and belongs to
    the master."""
    host = str(connection.host or "")
    if connection.conn_type == "spark" and host and ("://" in host or not connection.port):
        master = host
    else:
        master = f"{connection.conn_type}://{host}"
    return f"{master}:{connection.port}" if connection.port else master


def connection_of(conn_id: str) -> Any:
    """Look up a Spark connection.

    :raises Outage: it is not found (the provider would then submit to YARN without an error).
    """
    return connections.connection(conn_id, kind="Spark")


def find(conn_id: str, *, mode: str | None = None, properties: Mapping[Any, Any] | None = None) -> SparkTarget:
    """Where jobs run that are submitted with a Spark connection.

    :param conn_id: connection of type Spark.
    :param mode: the deploy mode; None for the connection's, which is ``client`` unless it says otherwise.
    :param properties: the task's properties of Spark (``conf``), which come before what the connection says.
    :raises Refused: Spark cannot run Python in this way.
    :raises Outage: the connection is not found.
    """
    connection = connection_of(conn_id)
    extra = connection.extra_dejson
    properties = properties or {}
    place = SparkTarget(
        conn_id,
        str(mode or extra.get("deploy-mode") or "client") == "cluster",
        master_of(connection),
        properties.get("spark.kubernetes.namespace") or extra.get("namespace") or None,
        properties.get("spark.kubernetes.driver.pod.name") or None,
    )
    if place.cluster and not place.master.startswith(("yarn", "k8s://")):
        raise Refused(
            f"Spark has no deploy-mode cluster for Python with the master {place.master!r} (connection {conn_id!r}).",
            "Set the connection's deploy-mode to client: the driver then runs on Airflow's worker, the executors in "
            "the cluster. Deploy-mode cluster needs YARN or Kubernetes.",
        )
    return place


def _default_executor(*, here: bool) -> str:
    """The executor of a task that names none.

    :param here: whether that executor runs this process, too. What a worker is, is asked of its environment before its
        configuration: Airflow's own pod templates set ``[core] executor`` to LocalExecutor inside of the pods that
        KubernetesExecutor makes.
    """
    if here and os.environ.get("AIRFLOW_IS_K8S_EXECUTOR_POD"):  # PodGenerator.construct_pod always sets it
        return "KubernetesExecutor"
    return str(conf.get("core", "executor", fallback="LocalExecutor")).split(",")[0]


def check(
    place: SparkTarget,
    *,
    detached: bool,
    executor: str | None = None,
    here: bool = True,
    settings_file: str | None = None,
) -> None:
    """Check that a job can run in a place, before anything is changed.

    :param detached: whether the job outlives the task's process on the worker.
    :param executor: the task's own executor; None for the default.
    :param here: whether this process is a worker of the same executor.
    :param settings_file: where the driver's pod has the connections, on Kubernetes.
    :raises Refused: it cannot.
    """
    executor = executor or _default_executor(here=here)
    if place.kubernetes and not settings_file:
        raise Refused(
            f"On Kubernetes (connection {place.conn_id!r}), the job's pods need a file with the connections.",
            "Make a secret with it, mount it in driver and executors, and give its path as settings_file: see "
            "docs/operations.md, Kubernetes.",
        )
    if detached and not place.cluster and not executor.endswith(_KEEP_PROCESSES):
        raise Refused(
            f"In deploy-mode client the job is a process on Airflow's worker, and a worker of {executor} ends with its "
            "task.",
            "Set deferrable=False on the task, as in Pipeline.dag(stream={'deferrable': False}): it then stays, and is "
            "the job's supervisor. A pipeline of a YAML file needs a DAG file of its own for that, with "
            "Pipeline.load('the file').dag(stream={'deferrable': False}). Or use a Spark connection "
            "with deploy-mode cluster, or give the task another executor (executor='LocalExecutor' or "
            "'CeleryExecutor', if configured).",
        )


def problems(conn_id: str, tasks: Mapping[str, Mapping[str, Any]], executor: str | None) -> list[str]:
    """Why the jobs of tasks could not run, before anything is changed.

    :param conn_id: connection of type Spark.
    :param tasks: ``snapshot`` and ``stream``, each with those arguments of its operator (:data:`WHERE`) that are given.
    :param executor: that of the task that asks, if it has its own.
    :raises Outage: the connection is not found.
    """
    found = []
    for name, task in tasks.items():
        try:
            check(
                find(conn_id, mode=task.get("deploy_mode")),
                detached=bool(task.get("deferrable", name == "stream")),
                executor=task.get("executor"),
                here=task.get("executor") == executor,
                settings_file=task.get("settings_file"),
            )
        except Refused as error:
            found.append(str(error))
    return list(dict.fromkeys(found))
