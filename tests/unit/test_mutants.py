"""The table of mutants fits the code: the clause of each rule is there, once, and so is the test that must notice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.change import Change, Gone, always, drop, mutated, never, swap, text
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_bottledwater"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_mutant_fits(mutant: Mutant) -> None:
    try:
        path, source = mutated(PACKAGE, mutant.place, mutant.change)
    except Gone as gone:
        pytest.fail(f"Nobody keeps the rule that {mutant.rule}: {gone}", pytrace=False)
    compile(source, path, "exec")
    file, *names = mutant.caught_by.split("::")
    function = names[-1].partition("[")[0]
    assert f"def {function}(" in (ROOT / file).read_text()


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
        ("Claim.verify", CODE, "if claim.id == job.id and"),
    ],
    ids=["other variables", "an attribute for a variable", "another file", "another function"],
)
def test_a_clause_is_found_after(tmp_path: Path, place: str, code: str, line: str) -> None:
    assert changed(tmp_path, swap("claim.id != job.id", "claim.id == job.id"), place, code).startswith(line)


@pytest.mark.parametrize("clause", ["claim.id == job.id", "claim.name != job.name", "claim.epoch"])
def test_a_clause_that_is_not_there_or_too_common_is_gone(tmp_path: Path, clause: str) -> None:
    with pytest.raises(Gone, match=r"^Claim\.verify"):
        changed(tmp_path, never(clause), place="Claim.verify")


def test_a_clause_that_stands_twice_is_none(tmp_path: Path) -> None:
    with pytest.raises(Gone, match="several places"):
        changed(tmp_path, drop("claim"))
