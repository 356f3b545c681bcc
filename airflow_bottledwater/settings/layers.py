"""Layers of settings, in which later ones override earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of settings: later layers override earlier ones, dictionaries are merged, and None is ignored."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **value}
            elif value is not None:
                merged[name] = value
    return merged
