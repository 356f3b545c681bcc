"""What a driver gives its tasks, behind the name of the build that has packed it.

A worker may begin long after the driver, with another build of this package: its executor was lost, and meanwhile the
image or the environment was exchanged. Frozen dataclasses with slots are unpickled by the order of their fields: it
would take one field for another, without an error. So it compares the builds before it unpacks anything.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from airflow_bottledwater.errors import BottledWaterError, OtherBuild
from airflow_bottledwater.spark.error_codec import Failure, returned

_NAME = "airflow-provider-bottledwater"

#: the driver's build, and what it has pickled: types that every build unpickles in the same way
Parcel = tuple[str, bytes]

R = TypeVar("R")


def _build(folder: Path) -> str:
    """The version of this package, and a hash of its sources: there are several builds of one version."""
    found, sources = hashlib.sha256(), sorted(folder.rglob("*.py"))
    for path in sources:
        source = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(source)}\n".encode() + source)
    return f"{version(_NAME)} ({f'sources {found.hexdigest()[:12]}' if sources else 'no sources found'})"


#: that of this process: taken when it begins, since the files may be exchanged under it
_BUILD = _build(Path(__file__).parents[1])


def packed(work: Callable[[], R | Failure]) -> Parcel:
    """What a task is to do, with all that it needs for that."""
    from pyspark import cloudpickle

    return _BUILD, cloudpickle.dumps(work)


def carry_out(parcel: Parcel, refusal: type[BottledWaterError] = OtherBuild) -> R | Failure:
    """Do, in a task, what the driver has packed.

    :param refusal: the class of the error if this is another build. By default, the job is to be started again: the
        builds were the same when it began.
    """
    packed_by, work = parcel

    def refuse() -> R:
        raise refusal(
            f"The executor on host {socket.gethostname()} has {_NAME} {_BUILD}, and the driver has {packed_by}.",
            "Install the same build for both, in the image or in the archive of the environment; where it is exchanged "
            "while a job runs, start the job again.",
        )

    if packed_by != _BUILD:
        return returned(refuse, repeated=False)
    found: R | Failure = pickle.loads(work)()  # noqa: S301 - from the driver, as all that Spark unpickles
    return found
