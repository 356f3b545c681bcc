"""Jars of programs that nobody here wrote, retrieved from Maven for the tests that run them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import artifacts


def retrieved(name: str, *modules: str, alone: Sequence[str] = ()) -> Path:
    """A folder of the cache with the jars of modules (``group:artifact:version``) and of all that they need; skips the
    test where they are not there and cannot be had.

    :param name: what the folder's name begins with.
    :param alone: modules that are taken without what they need.
    """

    def fill(folder: Path) -> None:
        dependencies = "".join(
            '<dependency org="{}" name="{}" rev="{}" conf="default" transitive="{}"/>'.format(
                *module.split(":"), str(module not in alone).lower()
            )
            for module in (*modules, *alone)
        )
        artifacts.retrieve(dependencies, folder, types=("jar", "bundle"))

    wanted = hashlib.sha256(repr((modules, tuple(alone))).encode()).hexdigest()[:8]
    try:
        return artifacts.once(artifacts.cache_folder() / f"{name}-{wanted}", fill)
    except LocalServerError as error:
        pytest.skip(
            f"the jars of {', '.join((*modules, *alone))} are not in the cache, and Maven does not give them: {error}"
        )
