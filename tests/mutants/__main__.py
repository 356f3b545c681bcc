"""``make test-mutants``: patch a copy of the package, run the test that must notice, print rule / mutant / caught by.

``MUTANT=word`` takes those whose rule or place has the word.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.change import mutated
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
#: always the same folder, files with their times: compiled code of unchanged files stays cached
COPY = ROOT / ".local" / "mutants"


def caught(mutant: Mutant) -> bool:
    """Whether the test fails on the patched copy (a test that cannot run does not count)."""
    place, source = mutated(COPY / "airflow_bottledwater", mutant.place, mutant.change)
    whole, original = place.read_text(), place.stat()
    place.write_text(source)
    try:
        done = subprocess.run(
            [Path(sys.executable).parent / "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.caught_by],
            cwd=COPY,
            env={**os.environ, "PYTHONPATH": str(COPY), "BOTTLEDWATER_EXAMPLES_FACTOR": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    finally:
        place.write_text(whole)
        os.utime(place, ns=(original.st_atime_ns, original.st_mtime_ns))
    if done.returncode not in (0, 1) or b"error in" in done.stdout:
        print(done.stdout.decode()[-3000:], file=sys.stderr)
    return done.returncode == 1 and b"error in" not in done.stdout


def main() -> int:
    """Exit code 1 if a mutant lives."""
    word = os.environ.get("MUTANT", "")
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    # the tests, too: pytest puts the folder that they are in before all others where packages are looked for
    for folder in ("airflow_bottledwater", "spark_jobs", "dags", "docs", "tests"):
        shutil.copytree(ROOT / folder, COPY / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", COPY)
    table = Table("rule", "mutant", "caught by")
    alive = 0
    console = Console()
    for mutant in MUTANTS:
        if word not in mutant.rule + mutant.place:
            continue
        dead = caught(mutant)
        alive += not dead
        test = mutant.caught_by.rpartition("::")[2]
        console.print(f"{'caught' if dead else 'ALIVE '}  {mutant.rule}", highlight=False)
        change = f"{mutant.place}: {mutant.change.clause} → {mutant.change.by or 'nothing'}"
        table.add_row(mutant.rule, escape(change), test if dead else "NOTHING", end_section=True)
    console.print(table)
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
