"""An archive of the classes that Spark loads at every start: the JVM maps it into memory instead of reading, checking and preparing each
class (class data sharing, JEP 350, https://openjdk.org/jeps/350). A job then starts a second sooner, and the JVMs of several jobs on
one host share most of it.

The JVM itself checks that an archive fits it and its class path, and does without one that does not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from airflow_bottledwater import cache
from airflow_bottledwater.errors import JobFailed

log = logging.getLogger(__name__)

#: what loads the classes: a job of one task
_JOB = """\
from pyspark import SparkContext

with SparkContext() as context:
    context.parallelize([1], 1).map(abs).collect()
"""
#: at another address than it was written for, which the JVM prefers as a measure against attacks on its own memory, it would have to
#: change every page, and could share none
_PLACED = "-XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"
#: about an archive that does not fit it, the JVM would write a warning to the job's standard output
_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off"
#: characters that neither Spark's nor the JVM's options can have in a path
_NOT_IN_OPTIONS = frozenset(':"\\')
#: how many of the last characters of a failed job's output are logged
_QUOTED = 500
#: seconds for the job that makes it
_LONGEST = 300.0


def options(environment: Mapping[str, str]) -> str:
    """The JVM's options by which it uses the archive of this Java and this Spark; empty if none was made (:func:`make`).

    :param environment: that of spark-submit.
    """
    place = _folder(environment)
    try:
        for archive in place.glob("*.jsa") if place is not None else ():
            # the JVM would die by a signal of one that is not complete, for example after the disk was full
            if archive.name == _name(archive):
                return f'"-XX:SharedArchiveFile={archive}" {_SILENT} {_PLACED}'
    except OSError:
        pass  # somebody is removing it
    return ""


def make(java_options: str, environment: Mapping[str, str]) -> None:
    """Make the archive of this Java and this Spark, if there is none, by an empty job, which takes about ten seconds. A failure is only
    logged: jobs start without it.

    :param java_options: those with which jobs run, see :data:`airflow_bottledwater.spark.submit.LOCAL_CONF`.
    :param environment: that of spark-submit.
    """
    place = _folder(environment)
    if place is None:
        log.info("Spark's classes are not kept: Java or Spark was not found, or there is no folder for them.")
    elif options(environment):
        log.info("Spark's classes are kept in %s already.", place)
    else:
        try:
            _make(java_options, environment, place)
        except (JobFailed, OSError, subprocess.SubprocessError) as error:
            log.warning("Spark's classes cannot be kept, jobs start without: %s", error)
        else:
            log.info("Spark's classes are kept in %s.", place)


def _make(java_options: str, environment: Mapping[str, str], place: Path) -> None:
    """Run the job, at whose end the JVM writes the archive.

    :raises JobFailed: the job has failed, or the JVM has written none.
    :raises OSError: the disk is full, for example.
    :raises subprocess.SubprocessError: the job takes too long.
    """
    with tempfile.TemporaryDirectory(dir=place) as made:
        job, archive = Path(made) / "job.py", Path(made) / "archive.jsa"
        job.write_text(_JOB)
        # a JVM that does not know an option of those with which jobs use the archive fails here already
        java = f'{java_options} "-XX:ArchiveClassesAtExit={archive}" {_SILENT.replace("=off", "=warning")} {_PLACED}'
        command = [
            "spark-submit", "--master", "local[1]", "--conf", "spark.ui.enabled=false",
            "--conf", f"spark.driver.extraJavaOptions={java}", str(job),
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env=dict(environment),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LONGEST,
        )
        if done.returncode or not archive.exists():
            said = done.stdout.decode(errors="replace")[-_QUOTED:].strip()
            raise JobFailed(f"an empty job ended with exit code {done.returncode} and without an archive: {said}")
        archive.rename(place / _name(archive))


def _name(archive: Path) -> str:
    """The archive's name has its size."""
    return f"spark-{archive.stat().st_size}.jsa"


def _folder(environment: Mapping[str, str]) -> Path | None:
    """Where the archive of this Java and this Spark is; None if one of them is missing, or there is no folder for it."""
    path = environment.get("PATH")
    java = environment.get("JAVA_HOME")
    # as bin/spark-class finds it
    program = os.path.join(java, "bin", "java") if java else shutil.which("java", path=path)
    spark = environment.get("SPARK_HOME") or _pyspark()
    if program is None or spark is None or shutil.which("spark-submit", path=path) is None:
        return None
    parts = [environment.get("SPARK_CONF_DIR", ""), environment.get("HADOOP_CONF_DIR", "")]
    try:
        for needed in (Path(program).resolve(), Path(spark).resolve() / "jars"):
            # whole seconds, as an image's layers keep them
            parts += [str(needed), str(int(needed.stat().st_mtime))]
    except OSError:
        return None
    # the class path begins with it
    parts.append(str((Path(spark) / "conf").exists()))
    place = cache.folder("spark", hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16])
    return None if place is None or _NOT_IN_OPTIONS.intersection(str(place)) else place


def _pyspark() -> str | None:
    """The folder of PySpark, where its spark-submit finds Spark if SPARK_HOME is not set."""
    found = importlib.util.find_spec("pyspark")
    return None if found is None or found.origin is None else os.path.dirname(found.origin)
