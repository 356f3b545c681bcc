"""The table of mutants fits the code: each of its lines is there, once, and so is the test that must notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_mutant_fits(mutant: Mutant) -> None:
    assert (ROOT / "airflow_bottledwater" / mutant.file).read_text().count(mutant.old) == 1
    path, *names = mutant.caught_by.split("::")
    function = names[-1].partition("[")[0]
    assert f"def {function}(" in (ROOT / path).read_text()
