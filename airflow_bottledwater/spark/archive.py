"""An archive of the classes that Spark loads at every start: the JVM maps it into memory instead of reading, checking and preparing each
class (class data sharing, JEP 350, https://openjdk.org/jeps/350). A job then starts a second sooner, and the JVMs of several jobs on
one host share most of it.

The JVM itself checks that an archive fits it and its class path, and does without one that does not.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from airflow_bottledwater import cache

log = logging.getLogger(__name__)

#: what loads the classes: a job of one task
_JOB = """\
from pyspark import SparkContext

with SparkContext() as context:
    context.parallelize([1], 1).map(abs).collect()
"""
#: without the last two, the JVM would map the archive at another address than it was written for, as a measure against attacks on its
#: own memory, and so would have to change, and could not share, every page; and without the logs' being off it would write a warning
#: about an archive that does not fit to the job's standard output
_USED = '"-XX:SharedArchiveFile={}" -Xlog:cds=off -Xlog:cds+dynamic=off -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0'
#: seconds for the job that makes it
_LONGEST = 300.0


def options(environment: Mapping[str, str]) -> str:
    """The JVM's options by which it uses the archive of this Java and this Spark; empty if none was made (:func:`make`).

    :param environment: that of spark-submit.
    """
    place = _folder(environment)
    for archive in place.glob("*.jsa") if place is not None else ():
        # the JVM would die by a signal of one that is not complete, for example after the disk was full
        if archive.name == _name(archive):
            return _USED.format(archive)
    return ""


def make(java_options: str, environment: Mapping[str, str]) -> None:
    """Make the archive of this Java and this Spark, if there is none, by an empty job, which takes about ten seconds. A failure is only
    logged: jobs start without it.

    :param java_options: those with which jobs run, see :data:`airflow_bottledwater.spark.submit.LOCAL_CONF`.
    :param environment: that of spark-submit.
    """
    place = _folder(environment)
    if place is None or options(environment):
        return
    with tempfile.TemporaryDirectory(dir=place) as made:
        job, archive = Path(made) / "job.py", Path(made) / "archive.jsa"
        job.write_text(_JOB)
        java = f'{java_options} "-XX:ArchiveClassesAtExit={archive}"'
        command = [
            "spark-submit", "--master", "local[1]", "--conf", "spark.ui.enabled=false",
            "--conf", f"spark.driver.extraJavaOptions={java}", str(job),
        ]  # fmt: skip
        try:
            subprocess.run(command, env=dict(environment), check=True, capture_output=True, timeout=_LONGEST)
            archive.rename(place / _name(archive))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("Spark's classes cannot be kept in %s, jobs start without: %s", place, error)
        else:
            log.info("Spark's classes are kept in %s.", place)


def _name(archive: Path) -> str:
    """The archive's name has its size."""
    return f"spark-{archive.stat().st_size}.jsa"


def _folder(environment: Mapping[str, str]) -> Path | None:
    """Where the archive of this Java and this Spark is; None if one of them is missing, or there is no folder for it."""
    path = environment.get("PATH")
    home = environment.get("JAVA_HOME")
    # as bin/spark-class finds it
    java = os.path.join(home, "bin", "java") if home else shutil.which("java", path=path)
    spark = shutil.which("spark-submit", path=path)
    if java is None or spark is None:
        return None
    try:
        version = importlib.metadata.version("pyspark")
        parts = [version, environment.get("SPARK_HOME", ""), environment.get("SPARK_CONF_DIR", "")]
        for program in (Path(java).resolve(), Path(spark).resolve()):
            found = program.stat()
            parts += [str(program), str(found.st_mtime_ns), str(found.st_size)]
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    return cache.folder("spark", hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16])
