"""The alert rules and the dashboard: they name metrics that exist, each rule has its section in the runbook, fires on
what it is for, and is silent otherwise."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_bottledwater.metrics.points import STATES
from airflow_bottledwater.metrics.prometheus import PLACE
from airflow_bottledwater.metrics.registry import METRICS
from tests.support.prometheus import program

DOCS = Path(__file__).parents[3] / "docs"
RULES_FILE = DOCS / "examples" / "alert-rules.yaml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]}
DASHBOARD = json.loads((DOCS / "examples" / "grafana-dashboard.json").read_text())
EXPRESSIONS = {
    **{name: rule["expr"] for name, rule in RULES.items()},
    **{
        f"{panel['title']} {i}": target["expr"]
        for panel in DASHBOARD["panels"]
        for i, target in enumerate(panel.get("targets", []))
    },
}
#: what a series may be called in an expression
NAMES = {metric.full: metric for metric in METRICS.values() if metric.kind != "histogram"} | {
    f"{metric.full}_{part}": metric
    for metric in METRICS.values()
    if metric.kind == "histogram"
    for part in ("bucket", "sum", "count")
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_exist(name: str) -> None:
    expression = EXPRESSIONS[name]
    used = set(re.findall(r"\bbottledwater_\w+", expression))
    assert used and used <= NAMES.keys()
    for metric, matchers in re.findall(r"(bottledwater_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
        assert labels <= {*PLACE, *NAMES[metric].labels, "le"}, metric


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_a_section_of_the_runbook(name: str) -> None:
    page, _, anchor = RULES[name]["annotations"]["runbook_url"].rpartition("/")[2].partition("#")
    headings = re.findall(r"^## (\w+)$", (DOCS / page.replace(".html", ".md")).read_text(), re.MULTILINE)
    assert name in headings and anchor == name.lower()
    assert RULES[name]["labels"]["severity"] in ("critical", "warning")


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """A series of a pipeline, a value a minute."""
    where = {"system": "7", "database": "shop", "slot": "cdc", **labels}
    return {"series": name + "{" + ",".join(f'{k}="{v}"' for k, v in where.items()) + "}", "values": values}


def state(now: str, **more: str) -> list[dict[str, str]]:
    """A pipeline that is meant to run and whose job is in a state; reported a moment ago."""
    values = {"wanted": "1x60", "last_report_age_seconds": "2x60", **more}
    return [
        *(series("bottledwater_state", f"{int(each == now)}x60", state=each) for each in STATES),
        *(series(f"bottledwater_{name}", of) for name, of in values.items()),
    ]


def slower(seconds: float) -> list[dict[str, str]]:
    """Changes that need so long."""
    bounds = ["0.1", "1.0", "30.0", "60.0", "300.0", "+Inf"]
    return [
        series("bottledwater_delay_seconds_bucket", "0+60x60" if float(bound) >= seconds else "0x60", le=bound)
        for bound in bounds
    ]


STREAMS = state("streaming")
#: what each rule is for, and what is near it and well, by its name, behind which may be a word of the case
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "BottledWaterNoMetrics": (
        # one exporter of two
        [*STREAMS, {"series": 'up{job="bottledwater", instance="b"}', "values": "0x60"}],
        [*STREAMS, {"series": 'up{job="bottledwater", instance="a"}', "values": "1x60"}],
    ),
    # the text file of an exporter, of which nobody writes a new one
    "BottledWaterNoMetrics in a file": (
        [*STREAMS, series("bottledwater_read_timestamp_seconds", "0x60", instance="a")],
        [*STREAMS, series("bottledwater_read_timestamp_seconds", "0+60x60", instance="a")],
    ),
    "BottledWaterNobodyStreams": (
        state("snapshot", last_report_age_seconds="0+60x60"),
        # a bounded run each hour, and a pipeline that was stopped
        state("finished", last_report_age_seconds="0+60x60"),
    ),
    "BottledWaterFailed": (state("failed"), state("failed", wanted="0x60")),
    "BottledWaterWaits": (state("waiting"), STREAMS),
    "BottledWaterRestarts": (
        [series("bottledwater_claims_total", "1+1x60")],
        [series("bottledwater_claims_total", "7x60"), series("bottledwater_failed_starts", "2x60")],
    ),
    "BottledWaterBehind": (
        [series("bottledwater_lag_seconds", "0+60x60")],
        [series("bottledwater_lag_seconds", "500x60")],
    ),
    "BottledWaterNotMeasured": (STREAMS, [*STREAMS, series("bottledwater_lag_seconds", "0x60")]),
    "BottledWaterStopped": (
        state("stopped", wanted="0x60", last_report_age_seconds="85000+60x60"),
        [*state("stopped", wanted="0x60"), *state("failed", last_report_age_seconds="90000x60")[:-2]],
    ),
    "BottledWaterSlow": (slower(120), slower(0.5)),
    "BottledWaterSlotInDanger": (
        [series("bottledwater_slot_wal_status", "1x60", status="unreserved")],
        [series("bottledwater_slot_wal_status", "1x60", status="extended")],
    ),
    "BottledWaterWalLimitNear": (
        [series("bottledwater_slot_wal_kept_bytes", "7e9x60"), series("bottledwater_slot_wal_limit_bytes", "1e10x60")],
        [series("bottledwater_slot_wal_kept_bytes", "5e9x60"), series("bottledwater_slot_wal_limit_bytes", "1e10x60")],
    ),
    "BottledWaterWalKept": (
        [series("bottledwater_slot_wal_kept_bytes", "6e10x60")],
        [series("bottledwater_slot_wal_kept_bytes", "4e10x60")],
    ),
    "BottledWaterXminHeld": (
        [series("bottledwater_oldest_xmin_age_transactions", "6e7x60", holder="session")],
        [series("bottledwater_oldest_xmin_age_transactions", "4e7x60", holder="slot")],
    ),
    "BottledWaterDeadLetters": (
        [series("bottledwater_open_dead_letters", "1x60")],
        [series("bottledwater_open_dead_letters", "0x60")],
    ),
    "BottledWaterProblem": (
        [series("bottledwater_problems", "1x60", kind="not-followed")],
        [series("bottledwater_problems", "1x60", kind="waiting")],
    ),
    "BottledWaterTopicDiffers": (
        [series("bottledwater_verified_tables", "1x60", result="different")],
        [series("bottledwater_verified_tables", "0x60", result="different")],
    ),
}


def _filled(expression: str) -> str:
    """An expression of the dashboard as Grafana sends it."""
    for name, value in {"$__rate_interval": "5m", "$system": ".*", "$database": ".*", "$slot": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_each_rule_has_a_case() -> None:
    assert {name.partition(" ")[0] for name in CASES} == RULES.keys()


@pytest.mark.slow
def test_each_rule_fires_on_what_it_is_for_and_is_silent_otherwise(tmp_path: Path) -> None:
    tests: list[dict[str, Any]] = []
    one = [{"labels": "{}", "value": 1}]
    for name, (fires, silent) in CASES.items():
        for what, input_series, expected in ((f"{name} fires", fires, 1), (f"{name} is silent", silent, 0)):
            samples = one if expected else []
            firing = f'count(ALERTS{{alertname="{name.partition(" ")[0]}", alertstate="firing"}})'
            tests.append(
                {
                    "name": what,
                    "interval": "1m",
                    "input_series": input_series,
                    "promql_expr_test": [{"expr": firing, "eval_time": "45m", "exp_samples": samples}],
                }
            )
    # those of the dashboard are only parsed and evaluated
    parsed = [
        {"expr": f"(count({_filled(each)}) or vector(0)) >= bool 0", "eval_time": "45m", "exp_samples": one}
        for name, each in EXPRESSIONS.items()
        if name not in RULES
    ]
    tests.append({"name": "dashboard", "interval": "1m", "input_series": STREAMS, "promql_expr_test": parsed})
    file = tmp_path / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": tests}))
    tool = program("promtool")
    for arguments in (["check", "rules", str(RULES_FILE)], ["test", "rules", str(file)]):
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
