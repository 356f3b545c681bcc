"""Messages, help texts, comments and docs say things in the words of the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_bottledwater"

#: phrases that a reader has to guess at, and what is said instead
_BANNED = {
    r"a person has to decide": "manual intervention is required",
    r"without a word": "silently, or without reporting a result",
    r"for their sake": "so that they can proceed",
    r"what can be reached of": "its processes, or its application in the cluster",
    r"way that is not foreseen": "an unexpected error",
    r"event that is not known": "an unexpected event",
    r"rows are owed": "its topic lacks rows",
}


def _files() -> list[str]:
    found = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "dags").glob("*.py"), ROOT / "README.md"]
    return sorted(str(path.relative_to(ROOT)) for path in found)


@pytest.mark.parametrize("phrase", _BANNED)
def test_no_phrase_is_a_riddle(phrase: str) -> None:
    found = []
    for file in _files():
        text = (ROOT / file).read_text()
        # a phrase may be broken over two lines
        for match in re.finditer(phrase.replace(" ", r"\s+(?:#:? )?"), text):
            found.append(f"{file}:{text.count(chr(10), 0, match.start()) + 1}")
    assert not found, f"say '{_BANNED[phrase]}' instead of '{phrase}': {', '.join(found)}"


def test_no_class_has_the_name_of_another() -> None:
    of: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            of.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in of.items() if len(files) > 1} == {}
