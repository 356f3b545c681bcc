"""``parse``: seconds of the processor that a DAG processor takes for the file that makes the DAGs of 50 pipelines from
a folder of YAML files, in a process of its own, with everything that it imports besides Airflow.

Reference: a file with one empty DAG.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import emit, scaled

_PIPELINES, _TIMES = 50, 5
_FILE = Path(__file__).parents[2] / "dags" / "bottledwater_files.py"
_YAML = """
name: {name}
source: {{conn_id: pg, tables: [orders, "s.*"]}}
kafka: {{conn_id: kafka, format: json, topic_prefix: {name}}}
schedules: {{bounded: "*/5 * * * *", verify: "@daily", backfill_by: created_at}}
"""
_PARSE = """
import json, runpy, sys, time
import airflow.sdk
start = time.process_time()
found = runpy.run_path(sys.argv[1])
dags = [each for each in found.values() if type(each).__name__ == "DAG"]
print(json.dumps([time.process_time() - start, len(dags)]))
"""


def _parse(file: Path, home: Path, pipelines: Path) -> tuple[float, int]:
    env = {**os.environ, "AIRFLOW_HOME": str(home), "BOTTLEDWATER_PIPELINES": str(pipelines)}
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, str(file)], env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, dags = json.loads(done.stdout.splitlines()[-1])
    return float(seconds), int(dags)


def run(stack: DataStack) -> None:
    """See the module; the servers are not used."""
    with tempfile.TemporaryDirectory(prefix="bottledwater-bench-") as folder:
        home, pipelines, empty = Path(folder), Path(folder) / "pipelines", Path(folder) / "empty.py"
        pipelines.mkdir()
        empty.write_text("from airflow.sdk import DAG\ndag = DAG('empty', schedule=None)\n")
        count = scaled(_PIPELINES)
        for number in range(count):
            (pipelines / f"p{number}.yaml").write_text(_YAML.format(name=f"p{number}"))
        _parse(empty, home, pipelines)  # Airflow writes its configuration
        found = [(_parse(_FILE, home, pipelines), _parse(empty, home, pipelines)) for _ in range(_TIMES)]
    ours, reference = (statistics.median(each[n][0] for each in found) for n in (0, 1))
    emit(
        "parse", ours, "s", {"empty_s": reference}, pipelines=count, dags=found[0][0][1], over_empty_s=ours - reference
    )
