"""``make test-mutants``: patch a copy of the package (there is one for each core), run the test that must notice, print
rule / mutant / caught by.

``MUTANT=word`` takes those whose rule or place has the word.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.change import mutated
from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
#: always the same folders, files with their times: compiled code of unchanged files stays cached
COPIES = [ROOT / ".local" / "mutants" / str(number) for number in range(os.cpu_count() or 1)]


def copied(folder: Path) -> Path:
    """A copy of the package and its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    # the tests, too: pytest puts the folder that they are in before all others where packages are looked for
    for each in ("airflow_bottledwater", "spark_jobs", "dags", "docs", "tests"):
        shutil.copytree(ROOT / each, folder / each, ignore=ignored)
    for each in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / each, folder)
    return folder


def caught(mutant: Mutant, copy: Path) -> bool:
    """Whether the test fails on the patched copy (a test that cannot run does not count)."""
    place, source = mutated(copy / "airflow_bottledwater", mutant.place, mutant.change)
    whole, original = place.read_text(), place.stat()
    place.write_text(source)
    try:
        done = subprocess.run(
            [Path(sys.executable).parent / "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.caught_by],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "BOTTLEDWATER_EXAMPLES_FACTOR": "4"},
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
    chosen = [each for each in MUTANTS if word in each.rule + each.place]
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def tried(mutant: Mutant) -> bool:
        copy = free.get()
        try:
            return caught(mutant, copy)
        finally:
            free.put(copy)

    for folder in COPIES[: len(chosen)]:
        free.put(copied(folder))
    table = Table("rule", "mutant", "caught by")
    alive = 0
    console = Console()
    with ThreadPoolExecutor(len(COPIES)) as pool:
        for mutant, dead in zip(chosen, pool.map(tried, chosen), strict=True):
            alive += not dead
            test = mutant.caught_by.rpartition("::")[2]
            console.print(f"{'caught' if dead else 'ALIVE '}  {mutant.rule}", highlight=False)
            change = f"{mutant.place}: {mutant.change.clause} → {mutant.change.by or 'nothing'}"
            table.add_row(mutant.rule, escape(change), test if dead else "NOTHING", end_section=True)
    console.print(table)
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
