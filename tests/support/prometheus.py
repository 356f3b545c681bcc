"""Prometheus and its tool: those that are installed, else those of Debian's package, unpacked into the cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from airflow_bottledwater.local.artifacts import cache_folder


def program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``; skips the test where neither is installed nor Debian's package can be
    had."""
    if found := shutil.which(name):
        return found
    folder = cache_folder() / "prometheus"
    path = folder / "usr" / "bin" / name
    if not path.exists() and not _unpack(folder):
        pytest.skip(f"{name} is not installed, and apt-get does not have Debian's package")
    return str(path)


def _unpack(folder: Path) -> bool:
    if not shutil.which("apt-get"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        ["apt-get", "download", "prometheus"],
        ["apt-get", "update"],
        ["apt-get", "download", "prometheus"],
    ):
        subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=False)
        if packages := list(folder.glob("prometheus_*.deb")):
            done = subprocess.run(["dpkg", "-x", packages[0].name, "."], cwd=folder, capture_output=True, check=False)
            packages[0].unlink()
            return done.returncode == 0
    return False
