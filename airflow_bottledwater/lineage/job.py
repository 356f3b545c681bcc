"""What a job tells OpenLineage while it runs: that it has started, now and then and at its end its tables, their topics
and how many rows it has published.

A run and its states: https://openlineage.io/docs/spec/run-cycle. The client finds where events go by its own variables
(https://openlineage.io/docs/client/python/configuration).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import StopRequested
from airflow_bottledwater.lineage.datasets import TableDatasets
from airflow_bottledwater.pipeline.settings import Settings

if TYPE_CHECKING:
    from airflow_bottledwater.state.pinned import PinnedTable

log = logging.getLogger(__name__)

#: names of the variables that say where events go
_CONFIGURED = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG", "OPENLINEAGE__TRANSPORT")
#: the task of Airflow that a job belongs to: namespace, name of the job and id of the run, with slashes between them
#: (https://openlineage.io/docs/client/python/configuration#environment-variables-for-parent-run-information)
PARENT = "OPENLINEAGE_PARENT_ID"
#: seconds between two events that say that the job runs, and for which its end waits for the last event
_EVERY, _ENDS_WITHIN = 600.0, 5.0
_PRODUCER = "https://airflow-provider-bottledwater.readthedocs.io"

#: what a job says of the tables that it publishes, whenever these are others
Tell = Callable[[Collection["PinnedTable"]], None]


def is_told() -> bool:
    """Whether there is OpenLineage's client, and somewhere to send events to."""
    disabled = os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true"
    configured = any(name.startswith(_CONFIGURED) for name in os.environ)
    return configured and not disabled and _has_client()


def _has_client() -> bool:
    # other packages, such as its SQL parser, are below the same name
    return importlib.util.find_spec("openlineage") is not None and (
        importlib.util.find_spec("openlineage.client") is not None
    )


def telling(pipeline: Settings, kind: str, rows: Callable[[], Mapping[str, int]]) -> AbstractContextManager[Tell]:
    """Tell OpenLineage of a job while a block runs, if it is to be told; the block says what its tables are. An error
    is only logged.

    :param kind: of the job: ``snapshot`` or ``stream``.
    :param rows: how many rows were published, by table.
    """
    return _JobRun(pipeline, kind, rows) if is_told() else nullcontext(lambda _tables: None)


class _JobRun:
    """One run of a job, told by a thread: the job never waits for it but at its end.

    Parameters as of :func:`telling`.
    """

    def __init__(self, pipeline: Settings, kind: str, rows: Callable[[], Mapping[str, int]]) -> None:
        from openlineage.client.uuid import generate_new_uuid

        self._pipeline, self._kind, self._rows = pipeline, kind, rows
        self._run_id = str(generate_new_uuid())
        self._tables: list[PinnedTable] = []
        self._due, self._last = threading.Event(), ""
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="lineage", daemon=True)

    def __enter__(self) -> Tell:
        self._thread.start()
        return self._told

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        ended = error is None or isinstance(error, StopRequested)
        self._error = "" if ended else str(error) or type(error).__name__
        self._last = "FAIL" if self._error else "COMPLETE"
        self._due.set()
        self._thread.join(_ENDS_WITHIN)

    def _told(self, tables: Collection[PinnedTable]) -> None:
        self._tables = sorted(tables, key=lambda each: each.table.qualified)
        self._due.set()

    def _run(self) -> None:
        from openlineage.client import OpenLineageClient

        client: OpenLineageClient | None = None
        state, told = "START", False
        while state:
            last = self._last
            try:
                client = client or OpenLineageClient()
                client.emit(self._event(last or state))
            except Exception as error:
                # whatever the client or its transport raises harms nobody else
                log.log(logging.DEBUG if told else logging.WARNING, "OpenLineage is not told of the job: %s", error)
                told = True
            state = "" if last else "RUNNING"
            if state:
                self._due.wait(_EVERY)
                self._due.clear()
        if client is not None:
            client.close(_ENDS_WITHIN)

    def _event(self, state: str) -> Any:
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
        from openlineage.client.facet_v2 import error_message_run, job_type_job

        inputs: list[Any] = []
        outputs: list[Any] = []
        rows = self._rows()
        for pinned in self._tables:
            found = TableDatasets(self._pipeline, pinned)
            inputs.append(found.source())
            outputs.append(found.target(rows.get(pinned.table.qualified, 0) if rows else None))
        kind = job_type_job.JobTypeJobFacet(
            processingType="STREAMING" if self._kind == "stream" else "BATCH",
            integration="BOTTLEDWATER",
            jobType="JOB",
        )
        facets: dict[str, Any] = _parent()
        if state == "FAIL":
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(self._error, "python")
        return RunEvent(
            eventTime=datetime.now(UTC).isoformat(),
            producer=f"{_PRODUCER}/{version('airflow-provider-bottledwater')}",
            run=Run(self._run_id, facets),
            job=Job(
                os.environ.get("OPENLINEAGE_NAMESPACE", "default"),
                f"{self._pipeline.slot}.{self._kind}",
                {"jobType": kind},
            ),
            eventType=RunState[state],
            inputs=inputs,
            outputs=outputs,
        )


def _parent() -> dict[str, Any]:
    """The facet of the task that has submitted the job, if that is known."""
    from openlineage.client.facet_v2 import parent_run

    namespace, _, rest = os.environ.get(PARENT, "").rpartition("/")[0].partition("/")
    run_id = os.environ.get(PARENT, "").rpartition("/")[2]
    if not rest:
        return {}
    run, job = parent_run.Run(run_id), parent_run.Job(namespace, rest)
    return {"parent": parent_run.ParentRunFacet(run=run, job=job)}
