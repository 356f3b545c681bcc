"""Our errors across Spark: an exception of a Python worker reaches the driver as text inside another one.

A task that raises is started again by Spark (``spark.task.maxFailures``). That may mend an outage. After any other error of ours it
would only initialise the transactional id anew, and so fence whoever has rightfully taken the slot over: such an error is the
task's *result*.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from airflow_bottledwater import errors
from airflow_bottledwater.errors import BottledWaterError, RecordError
from airflow_bottledwater.policy import transient

_MARK = re.compile(r"bottledwater-error:([A-Za-z0-9+/=]+)")


T = TypeVar("T")


class PackedError(RuntimeError):
    """Text of one of our errors with a token from which :func:`unpack` makes it again."""


def pack(error: BottledWaterError) -> PackedError:
    """An exception for Spark to carry."""
    data = {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}
    if isinstance(error, RecordError):
        data |= {"position": error.position, "topic": error.topic}
    token = base64.b64encode(json.dumps(data).encode()).decode()
    return PackedError(f"{error} [bottledwater-error:{token}]")


def unpack(text: str) -> BottledWaterError | None:
    """The error that a text carries, if it does."""
    # the last: an error that quotes another one has its own token behind it
    tokens = _MARK.findall(text)
    try:
        data: dict[str, Any] = json.loads(base64.b64decode(tokens[-1], validate=True))
        kind = getattr(errors, data.pop("kind"), BottledWaterError)
        what, remedy = data.pop("what"), data.pop("remedy")
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        return None  # none at all, or one that was cut
    if kind is RecordError:
        return RecordError(what, remedy, **data)
    if kind is errors.Interrupted:
        kind = errors.Outage
    if not (isinstance(kind, type) and issubclass(kind, BottledWaterError)) or kind in (
        errors.PreflightError,
        errors.SettingError,
    ):
        kind = BottledWaterError
    return kind(what, remedy)


@dataclass(frozen=True, slots=True)
class Failure:
    """The result of a task that failed for good.

    :param text: with the token of the error.
    """

    text: str


def returned(work: Callable[[], T]) -> T | Failure:
    """In a task: what the work gives, or its error if Spark is not to start the task again.

    :raises PackedError: it may.
    """
    try:
        return work()
    except BottledWaterError as error:
        carried = pack(error)
        if transient(error):
            raise carried from error
        return Failure(str(carried))


def received(result: T | Failure) -> T:
    """In the driver: the result.

    :raises BottledWaterError: the task's own error.
    """
    if isinstance(result, Failure):
        raise unpack(result.text) or BottledWaterError(result.text)
    return result
