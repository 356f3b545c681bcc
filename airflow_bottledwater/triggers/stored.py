"""How Airflow stores a trigger between its processes: its class, and its arguments as plain values."""

from __future__ import annotations

import inspect
from typing import Any

from airflow.sdk.module_loading import import_string
from airflow.triggers.base import BaseTrigger


class StoredTrigger(BaseTrigger):
    """A trigger whose arguments are attributes of the same names."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The trigger's class path and arguments."""
        names = list(inspect.signature(type(self)).parameters)
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}


def stored_again(path: str, arguments: dict[str, Any]) -> Any:
    """A trigger like one that was stored.

    :param path: of its class, as :meth:`StoredTrigger.serialize` gives it, with the arguments.
    """
    return import_string(path)(**arguments)
