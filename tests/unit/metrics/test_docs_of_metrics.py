"""docs/metrics.md has all metrics, as the registry describes them."""

from __future__ import annotations

import re
from pathlib import Path

import airflow_bottledwater
from airflow_bottledwater.metrics.registry import METRICS, SECONDS
from airflow_bottledwater.metrics.sampler import OTHERS

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_the_page_has_all_metrics() -> None:
    table = PAGE.partition("## All metrics")[2]
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in table.splitlines() if "| `bottled" in line
    ]
    assert rows == [
        (f"`{m.full}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.sentence, m.like)
        for m in METRICS.values()
    ]


def test_the_page_names_the_counters_that_go_on_over_jobs() -> None:
    (named,) = re.findall(r"at `started`; but (.*?) go on over jobs", PAGE)
    assert set(re.findall(r"`(\w+)`", named)) == {m.name for m in METRICS.values() if m.lasting}


def test_the_page_has_what_is_sent_to_airflows_metrics() -> None:
    package = Path(airflow_bottledwater.__file__).parent
    sent = re.compile(r"(?:stats\.\w+|gauge)\(\s*(.*?), ?(?:tags|\w+, tags)", re.DOTALL)
    names = {
        re.sub(r"{\w+}", "<count>", name)
        for room in ("operators", "sensors", "triggers")
        for file in (package / room).glob("*.py")
        for call in sent.findall(file.read_text())
        for name in re.findall(r'"([^"]+)"', call)
    }
    table = PAGE.partition("**In Airflow's own metrics.**")[2].partition("## ")[0]
    assert names == {name for name in re.findall(r"`(bottledwater\.[^`]+)`", table) if name != "bottledwater.job.rows"}


def test_names_have_their_units_and_labels_are_bounded() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert not re.search(r"_(ms|mb|kb|minutes|hours|total)$", metric.name)
        bounded = {"table", "operation", "status", "holder", "state", "kind", "result", "limit", "step"}
        assert set(metric.labels) <= bounded
    assert list(SECONDS) == sorted(SECONDS)
    assert OTHERS in PAGE
