"""The spark-submit command of a job, for both the command line and Airflow."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

from airflow_bottledwater.errors import Refused

_JAVA = "spark.driver.extraJavaOptions"
#: properties for a job on one machine: no UI whose port could be in use, only the loopback address, and a small heap,
#: since the data is not in the JVM
LOCAL_CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    # when it is out of memory, the JVM has to end, so that the job is started again, or it would hang for ever. Without
    # its optimising compiler it starts sooner, and no data passes through it. A heap that begins small (the default is
    # a 64th of the host's memory), with a small part for new objects, stays small: it saves 120 MB
    _JAVA: "-XX:+ExitOnOutOfMemoryError -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xms24m -XX:NewSize=4m -XX:NewRatio=6",
    "spark.log.level": "ERROR",
    "spark.python.daemon.module": "airflow_bottledwater.spark.installed",
}


def refuse_unknown_user() -> None:
    """Check that this user has a name, without which no JVM of Spark starts: Hadoop's login fails (``invalid null
    input: name``), at each start again.

    :raises Refused: the user's id has no entry in the password database.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise Refused(
            f"The user id {os.getuid()} of this process has no entry in /etc/passwd, and Spark's JVM does not start "
            "without a user's name.",
            'Add one when the container starts (OpenShift gives containers ids of their own): echo "cdc:x:$(id '
            '-u):0::/tmp:/bin/sh" >> '
            "/etc/passwd, in an image in which group 0 may write this file; or run it with a user of the image.",
        ) from None


def job_file(name: str) -> Path:
    """The path of a job's entry point: in a wheel in the folder ``spark/jobs`` of the package, in a checkout in
    ``spark_jobs/``.

    :raises Refused: it is in neither.
    """
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "spark" / "jobs", here.parents[2] / "spark_jobs"):
        if (folder / f"{name}.py").exists():
            return folder / f"{name}.py"
    raise Refused(f"The job file {name}.py is not installed.", "Reinstall airflow-provider-bottledwater.")


def arguments(
    settings: Path | str, *, bounded: bool = False, job_id: str = "", more: Mapping[str, Any] | None = None
) -> list[str]:
    """The command-line arguments of the job itself; they contain no secrets.

    :param settings: the settings file.
    :param job_id: the id by which the job is watched; empty for a new one.
    :param more: settings without secrets that the file does not have.
    """
    return [
        "--pipeline", str(settings),
        *(["--settings", json.dumps(more)] if more else []),
        *(["--job", job_id] if job_id else []),
        *(["--bounded"] if bounded else []),
    ]  # fmt: skip


def is_local(master: str) -> bool:
    """Whether the executors are threads of the driver's JVM."""
    return master.startswith("local")


def conf_for(
    master: str,
    conf: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    tasks: int = 1,
    cluster: bool = False,
) -> dict[str, str]:
    """Spark's properties for a job; those of the user override the others.

    :param folder: the run directory of a job on one machine, in which Spark's own temporary files are, too: the JVM
        does not know TMPDIR.
    :param tasks: how many tasks the job has at the same time.
    :param cluster: whether the driver runs in the cluster, and is watched through Kafka, not by spark-submit: what this
        needs, no user overrides.
    :raises Refused: see :func:`refuse_speculation`; or a property has a secret, which would be in the arguments of
        spark-submit, see :func:`refuse_secrets`.
    """
    refuse_speculation(str((conf or {}).get(_SPECULATION, "")))
    refuse_secrets(conf or {})
    if is_local(master):
        ours = dict(LOCAL_CONF)
        if folder is not None:
            ours[_JAVA] += f" -Djava.io.tmpdir={shlex.quote(str(folder))}"
    elif cluster:
        ours = {}
    else:
        address = driver_address(master)
        # each driver on a host takes another port for its pages, and Spark gives up after sixteen. On YARN, Spark's
        # context fails now and then with them, by a ConcurrentModificationException: it sends a filter for the pages
        # while they are made
        ours = {"spark.ui.enabled": "false", **({"spark.driver.host": address} if address else {})}
        if master.startswith("spark://"):
            ours |= _cores({**_defaults(), **(conf or {})}, tasks)
    workers = {f"spark.executorEnv.{name}": value for name, value in WORKER_ENVIRONMENT.items()}
    return {**workers, **ours, **(conf or {}), **(_UNWATCHED if cluster else {})}


def _cores(given: Mapping[str, str], tasks: int) -> dict[str, str]:
    """How many cores of a standalone cluster a job takes: without a limit it takes all that are free, for as long as it
    runs, and the next job gets none.

    :param given: the properties that the user has set. Spark starts no executor at all where an executor has more cores
        than the job may have.
    """
    if _MAX_CORES in given:
        return {}
    with contextlib.suppress(ValueError, ZeroDivisionError):  # what Spark does not take, it says itself
        each_task = int(given.get("spark.task.cpus", "1"))
        each = int(given.get("spark.executor.cores", each_task))
        executors = -(-tasks // max(1, each // each_task))
        return {_MAX_CORES: str(executors * each)}
    return {}


def _defaults() -> dict[str, str]:
    """The properties of ``spark-defaults.conf``, which spark-submit reads where a job does not set them."""
    folder = os.environ.get("SPARK_CONF_DIR") or Path(os.environ.get("SPARK_HOME") or os.devnull) / "conf"
    try:
        lines = Path(folder, "spark-defaults.conf").read_text().splitlines()
    except OSError:
        return {}
    found = (_DEFAULT.match(line) for line in lines)
    return {each[1]: each[2].strip() for each in found if each is not None}


_MAX_CORES = "spark.cores.max"
#: a line of a file of properties, as Java reads them
_DEFAULT = re.compile(r"\s*(spark\.[^\s=:]+)\s*[\s=:]\s*(.*)")

#: what glibc's malloc of the workers is told
#: (https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html). librdkafka allocates several
#: small pieces of memory for each record, and frees those of thousands of records at once: with a thread's cache (of 7
#: pieces of each size by default, of 65535 at most) for all records of its queue (kafka/publisher.py), a record of the
#: stream takes less processor time. Only pieces of up to 256 bytes are cached, which are three of four: nothing returns
#: from this cache while the thread lives, and with larger pieces it could keep four times as much, of whatever was
#: freed since the start. Two arenas are for the thread that publishes and for librdkafka's; each of more would keep
#: what its threads have freed
_MALLOC = {"arena_max": 2, "tcache_count": 12_000, "tcache_max": 256}
WORKER_ENVIRONMENT = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())}
#: the JVM and the driver have many threads, too
_JVM_MALLOC = "glibc.malloc.arena_max=2"


#: spark-submit returns as soon as the cluster has accepted the job. One that has died is submitted again by Airflow,
#: with its back-off: YARN would also start one again that has failed for good, or beside the one of Airflow
_UNWATCHED = {
    "spark.yarn.submit.waitAppCompletion": "false",
    "spark.kubernetes.submission.waitAppCompletion": "false",
    "spark.yarn.maxAppAttempts": "1",
}


def driver_address(master: str) -> str | None:
    """The address under which a cluster's executors reach a driver on this host: that of the interface towards the
    master. Spark's own choice is the address of the host's name, which often is a loopback address.

    :returns: None if it is not known, or if ``SPARK_LOCAL_IP`` or ``SPARK_LOCAL_HOSTNAME`` set it.
    """
    if os.environ.get("SPARK_LOCAL_IP") or os.environ.get("SPARK_LOCAL_HOSTNAME"):
        return None
    # spark://a:7077,b:7077 with standby masters; k8s://https://host:443; without any, the address of the default route
    first = _resource_manager() if master.startswith("yarn") else master.removeprefix("k8s://").partition("://")[2]
    first = first or master.partition("://")[2]
    found = urlsplit(f"//{first.split(',')[0]}") if first else None
    host, port = (found.hostname, found.port) if found is not None and found.hostname else ("192.0.2.1", 9)
    try:
        for family, kind, _, _, target in socket.getaddrinfo(host, port or 443, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                address = str(probe.getsockname()[0])
                return f"[{address}]" if ":" in address else address
    except OSError:
        pass
    return None


def _resource_manager() -> str:
    """Where YARN's resource manager (or one of several) is, by the configuration that Spark's client reads; empty if
    that does not say."""
    for variable in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        file = Path(os.environ.get(variable) or os.devnull) / "yarn-site.xml"
        with contextlib.suppress(OSError, ElementTree.ParseError):
            # the file of whoever administers this machine
            for each in ElementTree.parse(file).iter("property"):  # noqa: S314
                name, value = (str(each.findtext(part) or "").strip() for part in ("name", "value"))
                # with several, their names follow: yarn.resourcemanager.hostname.rm1
                if name.startswith(_WHERE) and "$" not in value:
                    return value
    return ""


_WHERE = ("yarn.resourcemanager.hostname", "yarn.resourcemanager.address")
_SPECULATION = "spark.speculation"
#: names of properties with secrets: the default of ``spark.redaction.regex``
_SECRET = re.compile(r"secret|password|token|access[._]?key", re.IGNORECASE)
#: names of those that say where a secret is, or how it is used
_NO_SECRET = re.compile(
    r"^spark\.kubernetes\.(driver|executor)\.(secrets|secretKeyRef)\.|(file|path|mechanism)$", re.IGNORECASE
)
#: a property of Java in the options of a JVM
_JAVA_PROPERTY = re.compile(r"-D([^\s=]+)=\S")


def refuse_secrets(conf: Mapping[str, Any]) -> None:
    """Check that no property of Spark has a secret, which would be among the arguments of spark-submit.

    :raises Refused: one has, by its name.
    """
    for name, value in sorted(conf.items()):
        if str(value).lower() in ("", "none", "true", "false"):
            continue
        java = _JAVA_PROPERTY.findall(str(value)) if name.endswith("JavaOptions") else []
        if any(_SECRET.search(each) and not _NO_SECRET.search(each) for each in (name, *java)):
            raise Refused(
                f"Spark's property {name} has a secret, which every user of the host could see among the arguments "
                "of spark-submit.",
                "Put it into spark-defaults.conf (in the folder SPARK_CONF_DIR), readable for this user alone. On "
                "Kubernetes, pods can have it from a secret (spark.kubernetes.driver.secretKeyRef).",
            )


def refuse_speculation(value: str) -> None:
    """Check that speculative execution is off: two attempts of one task would fence each other.

    :param value: the value of spark.speculation; as in Spark, only ``true`` turns it on, in upper or lower case.
    :raises Refused: speculative execution is on.
    """
    if value.strip().lower() == "true":
        raise Refused(f"{_SPECULATION} is on.", "Turn it off: two attempts of one task would fence each other.")


#: prefixes of environment variables that a Spark job does not get: they hold Airflow's own secrets and connections
_AIRFLOW_ONLY = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW", "__AIRFLOW")


def environment(
    base: Mapping[str, str] | None = None, *, master: str = "local", cluster: bool = False
) -> dict[str, str]:
    """The environment of spark-submit on this host: this Python for driver and workers, with its scripts first on the
    PATH, and without Airflow's own variables.

    :param base: the environment to extend; None for that of this process.
    :param master: Spark's master; only if it is local, the driver is bound to the loopback address.
    :param cluster: whether the driver runs in the cluster. Spark hands it this environment
        (DriverCommandFeatureStep, resource-managers/kubernetes; Client, resource-managers/yarn), where this host's
        Python would take precedence over that of its image or archive.
    """
    env = {k: v for k, v in (os.environ if base is None else base).items() if not k.startswith(_AIRFLOW_ONLY)}
    if not cluster:
        env.setdefault("PYSPARK_PYTHON", sys.executable)
        env.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local(master):
        env.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        env.setdefault("GLIBC_TUNABLES", _JVM_MALLOC)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    return env


def cancel(master: str, application: str, environment: Mapping[str, str]) -> list[str] | None:
    """The command that ends an application in a cluster, by the means of its manager.

    :param application: what the manager calls it: YARN's application id, or namespace and pod of the driver, as in
        ``jobs:driver``.
    :returns: None if the manager has no such command, or if it is not installed.
    """
    path = environment.get("PATH")
    if master.startswith("k8s://"):
        binary = shutil.which("spark-submit", path=path)
        return [binary, "--master", master, "--kill", application] if binary else None
    if master.startswith("yarn"):
        # what `yarn application` runs; Spark has it too, and reads HADOOP_CONF_DIR
        binary = shutil.which("spark-class", path=path)
        program = "org.apache.hadoop.yarn.client.cli.ApplicationCLI"
        return [binary, program, "application", "-kill", application] if binary else None
    return None


def command(
    name: str,
    settings: Path,
    *,
    master: str,
    conf: Mapping[str, str] | None = None,
    tasks: int = 1,
    bounded: bool = False,
    binary: str = "spark-submit",
) -> list[str]:
    """The whole command line of a job in client mode.

    :param name: the job: ``snapshot``, ``stream``, ``pipeline`` or ``verify``.
    :param tasks: how many tasks it has at the same time.
    :raises Refused: there is no spark-submit on the PATH, this user has no name, or speculative execution is on.
    """
    refuse_unknown_user()
    found = shutil.which(binary, path=environment()["PATH"])
    if found is None:
        raise Refused(
            f"{binary} is not on the PATH.",
            "Install the spark extra (pip install airflow-provider-bottledwater[spark]).",
        )
    properties = [
        part
        for key, value in conf_for(master, conf, folder=settings.parent, tasks=tasks).items()
        for part in ("--conf", f"{key}={value}")
    ]
    files: Sequence[str] = () if is_local(master) else ("--files", str(settings))
    return [
        found, "--master", master, "--name", f"bottledwater-{name}", *properties, *files, str(job_file(name)),
        *arguments(settings, bounded=bounded),
    ]  # fmt: skip
