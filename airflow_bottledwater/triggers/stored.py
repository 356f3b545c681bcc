"""How Airflow stores a trigger between its processes: its class, and its arguments as plain values."""

from __future__ import annotations

import inspect
from typing import Any

from airflow.triggers.base import BaseTrigger


class StoredTrigger(BaseTrigger):
    """A trigger whose arguments are attributes of the same names."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The trigger's class path and arguments."""
        names = list(inspect.signature(type(self)).parameters)
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}
