"""What the messages of errors have in common: numbered problems, links that lead somewhere."""

from __future__ import annotations

import pickle
import re
import tomllib
from pathlib import Path

import pytest

from airflow_bottledwater.errors import DOCS, PreflightError
from airflow_bottledwater.kafka.clients import altering
from tests.unit.test_docs import anchors

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\{(?:errors\.)?DOCS\}([a-z-]+)\.html(?:#([a-z0-9-]+))?")
LINKS = sorted(
    {found for file in (ROOT / "airflow_bottledwater").rglob("*.py") for found in LINK.findall(file.read_text())}
)


def test_one_problem_of_preflight_is_said_as_it_is() -> None:
    assert str(PreflightError(["wal_level is replica."])) == "wal_level is replica."


def test_several_problems_of_preflight_are_numbered() -> None:
    error = pickle.loads(pickle.dumps(PreflightError(["This.", "That."])))
    assert str(error) == "2 problems were found:\n1. This.\n2. That."
    assert error.problems == ["This.", "That."]


def test_messages_link_to_the_documentation_that_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Documentation"] == DOCS
    assert DOCS.endswith("/")
    assert LINKS


def test_commands_of_kafkas_tools_are_made_by_one_function() -> None:
    """So that all of them run as they are."""
    assert altering({"bootstrap.servers": "SASL_SSL://b1:9096, b2:9096"}, "t", "a=1") == (
        "kafka-configs.sh --bootstrap-server b1:9096 --alter --entity-type topics --entity-name t --add-config a=1"
    )
    files = (ROOT / "airflow_bottledwater").rglob("*.py")
    assert [file.name for file in files if "kafka-configs.sh" in file.read_text()] == ["clients.py"]


@pytest.mark.parametrize(("page", "anchor"), LINKS)
def test_a_link_in_a_message_leads_to_a_section(page: str, anchor: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert not anchor or anchor in anchors(text)
