"""A stream's task that stays with its job, in a process of its own, as a pod of the KubernetesExecutor: ``python -m
tests.support.clusters.staying ARGUMENTS``, the operator's as JSON. SIGTERM ends it as Airflow would, with
``on_kill``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from tests.support.clusters.tasks import Store
from tests.support.lives import made_at, run_of

logging.basicConfig(level=logging.INFO)
operator = StreamToKafkaOperator(task_id="stream", deferrable=False, poll_interval=0.5, **json.loads(sys.argv[1]))
store = Store()
# what Airflow has kept of an earlier try
store.values.update(json.loads(os.environ.get("KEPT", "{}")))
ti = SimpleNamespace(
    id=made_at(time.time()),
    try_number=2 if store.values else 1,
    max_tries=1,
    dag_id="d",
    run_id="r",
    task_id="stream",
    map_index=-1,
)
context: Any = {"task_state_store": store, "ti": ti, "dag_run": run_of(at=time.time())}


def end(*_: Any) -> None:
    operator.on_kill()
    os._exit(1)


signal.signal(signal.SIGTERM, end)
operator.retries = 1
print(json.dumps(operator.execute(context)), flush=True)
