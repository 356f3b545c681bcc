"""Passes errors of this package through Spark, where an exception of a Python worker reaches the driver only as text
inside another one.

A task that raises is started again by Spark (``spark.task.maxFailures``). That may help after an outage. After any
other error of this package it would only initialise the transactional id anew, and so fence the job that has rightfully
taken the slot over. Therefore such an error is returned as the task's *result*.
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
    """The text of an error of this package, with a token from which :func:`unpack` restores the error."""


def pack(error: BottledWaterError) -> PackedError:
    """An error as an exception whose text survives Spark."""
    data = {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}
    if isinstance(error, RecordError):
        data |= {"position": error.position, "topic": error.topic, "row": error.row}
    token = base64.b64encode(json.dumps(data).encode()).decode()
    return PackedError(f"{error} [bottledwater-error:{token}]")


def unpack(text: str) -> BottledWaterError | None:
    """The error whose token is in a text; None if there is none."""
    # the last token: if an error quotes another one, its own token comes after that of the other
    tokens = _MARK.findall(text)
    try:
        data: dict[str, Any] = json.loads(base64.b64decode(tokens[-1], validate=True))
        kind = getattr(errors, data.pop("kind"), BottledWaterError)
        what, remedy = data.pop("what"), data.pop("remedy")
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        return None  # there is no token, or it was cut
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

    :param text: the error's text, with its token.
    """

    text: str


def returned(work: Callable[[], T], *, repeated: bool = True) -> T | Failure:
    """To be used in a task: returns the result of the work, or its error if Spark must not start the task again.

    :param repeated: whether Spark starts the task again after a transient error.
    :raises PackedError: a transient error, after which Spark may start the task again.
    """
    try:
        return work()
    except BottledWaterError as error:
        carried = pack(error)
        # the driver begins anew, has another session hold another snapshot, and plans anew
        settled = errors.BeginsAnew | errors.HolderEnded | errors.TypeAltered
        if repeated and transient(error) and not isinstance(error, settled):
            raise carried from error
        return Failure(str(carried))


def received(result: T | Failure) -> T:
    """To be used in the driver: the result of a task that used :func:`returned`.

    :raises BottledWaterError: the task's own error.
    """
    if isinstance(result, Failure):
        raise unpack(result.text) or BottledWaterError(result.text)
    return result
