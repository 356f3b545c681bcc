"""The spark-submit command of a job, for both the command line and Airflow."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_bottledwater.errors import Refused

#: properties for a job on one machine: no UI whose port could be in use, only the loopback address, and a small heap, since the data
#: is not in the JVM
LOCAL_CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    # when it is out of memory, the JVM has to end, so that the job is started again, or it would hang for ever. Without its optimising
    # compiler it starts sooner, and no data passes through it. A heap that begins small (the default is a 64th of the host's memory)
    # stays small: it saves a hundred megabytes
    "spark.driver.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xms48m",
    "spark.log.level": "ERROR",
}


def job_file(name: str) -> Path:
    """The path of a job's entry point: in a wheel in the folder ``jobs`` beside this module, in a checkout in ``spark_jobs/``.

    :raises Refused: it is in neither.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "jobs", here.parents[2] / "spark_jobs"):
        if (folder / f"{name}.py").exists():
            return folder / f"{name}.py"
    raise Refused(f"The job file {name}.py is not installed.", "Reinstall airflow-provider-bottledwater.")


def arguments(settings: Path | str, *, bounded: bool = False) -> list[str]:
    """The command-line arguments of the job itself; they contain no secrets."""
    return ["--pipeline", str(settings), *(["--bounded"] if bounded else [])]


def is_local(master: str) -> bool:
    """Whether the executors are threads of the driver's JVM."""
    return master.startswith("local")


def conf_for(master: str, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Spark's properties for a job; those of the user override the others.

    :raises Refused: see :func:`refuse_speculation`.
    """
    refuse_speculation(str((conf or {}).get(_SPECULATION, "")))
    return {**(LOCAL_CONF if is_local(master) else {}), **(conf or {})}


_SPECULATION = "spark.speculation"


def refuse_speculation(value: str) -> None:
    """Check that speculative execution is off: two attempts of one task would fence each other.

    :param value: the value of spark.speculation; as in Spark, only ``true`` turns it on, in upper or lower case.
    :raises Refused: speculative execution is on.
    """
    if value.strip().lower() == "true":
        raise Refused(f"{_SPECULATION} is on.", "Turn it off: two attempts of one task would fence each other.")


def environment(base: Mapping[str, str] | None = None, *, master: str = "local") -> dict[str, str]:
    """The environment of a client-mode job on this host: this Python for driver and workers, with its scripts first on the PATH.

    :param base: the environment to extend; None for that of this process.
    :param master: Spark's master; only if it is local, the driver is bound to the loopback address.
    """
    env = dict(base if base is not None else os.environ)
    env.setdefault("PYSPARK_PYTHON", sys.executable)
    env.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local(master):
        env.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    return env


def command(
    name: str,
    settings: Path,
    *,
    master: str,
    conf: Mapping[str, str] | None = None,
    bounded: bool = False,
    binary: str = "spark-submit",
) -> list[str]:
    """The whole command line of a job in client mode.

    :param name: the job: ``snapshot``, ``stream`` or ``pipeline``.
    :raises Refused: there is no spark-submit on the PATH, or speculative execution is on.
    """
    found = shutil.which(binary, path=environment()["PATH"])
    if found is None:
        raise Refused(
            f"{binary} is not on the PATH.",
            "Install the spark extra (pip install airflow-provider-bottledwater[spark]).",
        )
    properties = [part for key, value in conf_for(master, conf).items() for part in ("--conf", f"{key}={value}")]
    files: Sequence[str] = () if is_local(master) else ("--files", str(settings))
    return [
        found, "--master", master, "--name", f"bottledwater-{name}", *properties, *files, str(job_file(name)),
        *arguments(settings, bounded=bounded),
    ]  # fmt: skip
