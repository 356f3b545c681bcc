"""Our errors across Spark: an exception of a Python worker reaches the driver as text inside another one."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from airflow_bottledwater import errors
from airflow_bottledwater.errors import BottledWaterError, RecordError

_MARK = re.compile(r"bottledwater-error:([A-Za-z0-9+/=]+)")


class CarriedError(RuntimeError):
    """Text of one of our errors with a token from which :func:`unpack` makes it again."""


def pack(error: BottledWaterError) -> CarriedError:
    """An exception for Spark to carry."""
    data = {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}
    if isinstance(error, RecordError):
        data |= {"position": error.position, "topic": error.topic}
    token = base64.b64encode(json.dumps(data).encode()).decode()
    return CarriedError(f"{error} [bottledwater-error:{token}]")


def unpack(text: str) -> BottledWaterError | None:
    """The error that a text carries, if it does."""
    found = _MARK.search(text)
    if found is None:
        return None
    data: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    kind = getattr(errors, data.pop("kind"), BottledWaterError)
    what, remedy = data.pop("what"), data.pop("remedy")
    if kind is RecordError:
        return RecordError(what, remedy, **data)
    if not (isinstance(kind, type) and issubclass(kind, BottledWaterError)) or kind in (
        errors.PreflightError,
        errors.SettingError,
    ):
        kind = BottledWaterError
    return kind(what, remedy)
