"""The table of mutants fits the code: the clause of each rule is there, once, and so is the test that must notice."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutants.change import Change, Gone, always, drop, mutated, never, swap, text
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_bottledwater"


def test_each_mutant_fits() -> None:
    """All in one: to parse the package takes longer than to look for a clause, and each process would do so."""
    assert not (wrong := [problem for mutant in MUTANTS if (problem := misfit(mutant))]), "\n".join(wrong)


def misfit(mutant: Mutant) -> str:
    try:
        path, source = mutated(PACKAGE, mutant.place, mutant.change)
    except Gone as gone:
        return f"Nobody keeps the rule that {mutant.rule}: {gone}"
    compile(source, path, "exec")
    file, *names = mutant.caught_by.split("::")
    function = names[-1].partition("[")[0]
    there = f"def {function}(" in (ROOT / file).read_text()
    return "" if there else f"Nobody tests the rule that {mutant.rule}: {mutant.caught_by} does not exist any more."


CODE = """
class Claim:
    def check(self, claim, job):
        if (claim.id != job.id  # of another job
                and claim.epoch > 0):
            raise Superseded(claim, since=claim.at)
        self.tell(claim, loud=True)
        query = "SELECT 1 FROM a"
        return {"a": 1, "b": 2}

def tell(claim):
    return claim.id
"""


def changed(tmp_path: Path, change: Change, place: str = "Claim.check", code: str = CODE) -> str:
    (tmp_path / "claim.py").write_text(code)
    _, source = mutated(tmp_path, place, change)
    before = [line.strip() for line in ast.unparse(ast.parse(code)).splitlines()]
    return "\n".join(line.strip() for line in source.splitlines() if line.strip() not in before)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (never("claim.id != job.id and claim.epoch > 0"), "if False:"),
        (always("claim.id != job.id"), "if True and claim.epoch > 0:"),
        (drop("claim.epoch > 0"), "if claim.id != job.id:"),
        (drop("raise Superseded(...)"), "pass"),
        (drop("self.tell(...)"), ""),
        (swap("self.tell(..., loud=True)", "self.tell(...)"), "self.tell(claim)"),
        (swap("self.tell(claim, ...)", "self.tell(job, ...)"), "self.tell(job, loud=True)"),
        (swap("if claim.id != job.id and claim.epoch > 0:\n    ...", "..."), ""),
        (swap("{'b': 2}", "{'b': 3}"), "return {'a': 1, 'b': 3}"),
        (swap("{'b': 2}", "{}"), "return {'a': 1}"),
        (text("FROM a", "FROM b"), "query = 'SELECT 1 FROM b'"),
    ],
)
def test_a_clause_is_changed(tmp_path: Path, change: Change, line: str) -> None:
    assert changed(tmp_path, change) == line


@pytest.mark.parametrize(
    ("place", "code", "line"),
    [
        ("Claim.check", CODE.replace("job", "run").replace("claim", "found"), "if found.id == run.id and"),
        ("Claim.check", CODE.replace("job.id", "self._job.id"), "if claim.id == self._job.id and"),
        ("elsewhere.Claim.check", CODE, "if claim.id == job.id and"),
    ],
    ids=["other variables", "an attribute for a variable", "another file"],
)
def test_a_clause_is_found_after(tmp_path: Path, place: str, code: str, line: str) -> None:
    assert changed(tmp_path, swap("claim.id != job.id", "claim.id == job.id"), place, code).startswith(line)


@pytest.mark.parametrize(("place", "clause"), [("Claim.check", "claim.id == job.id"), ("tell", "claim.id != job.id")])
def test_a_clause_that_is_not_there_is_gone_although_another_function_has_it(
    tmp_path: Path, place: str, clause: str
) -> None:
    with pytest.raises(Gone, match=f"^{re.escape(place)}"):
        changed(tmp_path, never(clause), place=place)


def test_a_clause_that_stands_twice_is_none(tmp_path: Path) -> None:
    with pytest.raises(Gone, match="several places"):
        changed(tmp_path, drop("claim"))
