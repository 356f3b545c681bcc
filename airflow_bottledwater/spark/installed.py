"""PySpark as it is installed. Spark puts an archive of the same modules before it (``PythonUtils.sparkPythonPath``,
core/src/main/scala/org/apache/spark/api/python/PythonUtils.scala), and Python compiles what it imports from an archive
at each start: more than a second of processor time and 13 MB in each process.

As a module of ``spark.python.daemon.module`` it begins the daemon that starts Python's workers."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def prefer() -> None:
    """Import PySpark from where it is installed, if Spark itself runs from there; call it before the first import."""
    archives = [path for path in sys.path if path.endswith(("pyspark.zip", "-src.zip"))]
    rest = [path for path in sys.path if path not in archives]
    found, home = PathFinder.find_spec("pyspark", rest), os.environ.get("SPARK_HOME")
    ours = found is not None and found.origin and home and Path(found.origin).parent.resolve() == Path(home).resolve()
    if ours and PathFinder.find_spec("py4j", rest) is not None:
        sys.path[:] = rest


if __name__ == "__main__":
    prefer()
    from pyspark.daemon import manager

    manager()
