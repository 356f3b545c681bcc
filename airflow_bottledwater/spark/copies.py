"""The copies of the settings file that Spark makes for the executors of a cluster (``--files``): where they are, who
may read them, and their end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

#: seconds for the tasks that remove the copies
_REMOVAL = 5.0


def protected(original: Path) -> list[Path]:
    """The copies of a settings file on this host, which only this user may read from now on: Spark writes them with the
    rights that the umask leaves.

    :param original: the path of the file on the host that submitted the job; it may be on this host, too.
    """
    places = [place for place in (Path.cwd() / original.name, _sent(original.name)) if place and os.path.exists(place)]
    copies = [place for place in places if not _same(place, original)]
    for copy in copies:
        # one of another user, as YARN may have it, is in a folder that nobody else may enter
        with contextlib.suppress(OSError):
            copy.chmod(0o600)
    return copies


def _same(place: Path, original: Path) -> bool:
    try:
        return place.samefile(original)
    except OSError:
        return False  # it is not on this host, or in a folder that this user may not enter


def _sent(name: str) -> Path | None:
    try:
        from pyspark import SparkFiles

        return Path(SparkFiles.get(name))
    except Exception as error:
        # a driver has the file only while it has a context: before that, an assertion fails, and afterwards py4j raises
        # an error (known by its name only: this module does not import py4j)
        if isinstance(error, ImportError | AssertionError) or type(error).__name__.startswith("Py4J"):
            return None
        raise


def remove(context: SparkContext) -> None:
    """Remove the copies from the executors' work folders, which a standalone cluster keeps for days. YARN and
    Kubernetes remove theirs by themselves. An executor that is gone, or that does not answer soon, keeps its copy."""
    if not context.master.startswith("spark://"):
        return

    def work() -> None:
        with contextlib.suppress(Exception):
            # as many tasks as there are cores: each executor gets one
            cores = context.defaultParallelism
            context.parallelize(range(cores), cores).foreachPartition(_remove_here)

    thread = threading.Thread(target=work, name="remove copies", daemon=True)
    thread.start()
    thread.join(_REMOVAL)


def _remove_here(_: Iterable[int]) -> None:
    from pyspark import SparkFiles

    for copy in Path(SparkFiles.getRootDirectory()).glob("pipeline-*.json"):
        copy.unlink(missing_ok=True)
