"""Ports of local servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import ports


def test_no_two_living_processes_are_given_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no server listens on it, as before its start and during a restart."""
    port = ports.free()
    monkeypatch.setattr(ports.random, "randrange", lambda *_: port)
    with pytest.raises(LocalServerError, match="no free port"):
        ports.free()
    pick = f"from airflow_bottledwater.local import ports; ports.random.randrange = lambda *_: {port}; ports.free()"
    other = subprocess.run([sys.executable, "-c", pick], capture_output=True, text=True, check=False)
    assert other.returncode and "no free port" in other.stderr
    ports._taken.pop().close()
    assert subprocess.run([sys.executable, "-c", pick], check=False).returncode == 0
    assert ports.free() == port


@pytest.mark.parametrize(
    ("outgoing", "chosen"),
    [
        ("32768\t60999\n", (20_000, 32_000)),
        ("25000 65535", (20_000, 25_000)),
        ("16000 65535", (11_000, 16_000)),
        ("1024 60999", (61_000, 65_536)),
        ("1024 65535", (20_000, 32_000)),
        ("", (20_000, 32_000)),
    ],
)
def test_a_port_is_not_one_of_those_of_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outgoing: str, chosen: tuple[int, int]
) -> None:
    file = tmp_path / "range"
    file.write_text(outgoing)
    monkeypatch.setattr(ports, "_OUTGOING", file)
    assert ports._range() == chosen
