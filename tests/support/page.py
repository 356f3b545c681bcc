"""What the built page was made of, so that a test without npm sees that it is not the one of these sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "airflow_bottledwater" / "plugin" / "www"
RECORD = FOLDER / "built" / "sources.sha256"


def sources() -> str:
    """The hash of all that the page is built from."""
    files = [FOLDER / name for name in ("package-lock.json", "tsconfig.json", "vite.config.ts")]
    found = hashlib.sha256()
    for path in [*files, *sorted((FOLDER / "src").iterdir())]:
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    RECORD.write_text(sources() + "\n")
