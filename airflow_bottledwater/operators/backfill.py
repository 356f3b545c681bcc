"""The operator that publishes rows of tables again while the stream runs: for scheduled backfills, and for tables to be
repaired."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import NEVER_EXPIRE, BaseOperator  # type: ignore[attr-defined]  # its stub (__init__.pyi) lacks the first
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import BottledWaterError, JobFailed, Outage, Refused
from airflow_bottledwater.hooks import backfill
from airflow_bottledwater.hooks.backfill import BackfillWatch
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    failing,
    is_first_try,
    is_last_try,
    known_event,
    note_life,
    number,
)
from airflow_bottledwater.operators.lineage import LineageMixin
from airflow_bottledwater.operators.watching import BlockingWatch, here, wait_in_triggerer
from airflow_bottledwater.pipeline import patterns
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.rules import listed
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.backfill import BackfillTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.model.relation import SourceTable
    from airflow_bottledwater.state.control_records import SnapshotRequest

#: the key in the task's state for the live snapshot's name and id
_ASKED = "bottledwater_backfill"
#: a bound of the run's data interval in a template, as it is: not one of another interval that is made of it
_BOUND = r"{{\s*data_interval_%s(\.in_timezone\([^)]*\)|\.\w+)*\s*(\||}})"


class BackfillToKafkaOperator(LineageMixin, PipelineMixin, BaseOperator):
    """Publish rows of tables again, in the order of the stream, by whichever job publishes it: a continuous stream, or
    the next bounded run. A retry goes on with the same live snapshot; a cleared task begins a new one, which does no
    harm.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param tables: ``[schema.]table`` patterns of the tables that are read, a list or comma-separated. (templated)
    :param where: which of their rows: SQL over the tables' own columns, such as ``created_at >= '{{
        data_interval_start | ts }}' AND created_at < '{{ data_interval_end | ts }}'``; empty for all. What names the
        data interval needs a timetable that has them, such as ``CronDataIntervalTimetable("@daily", timezone="UTC")``:
        those of a plain cron expression are empty. (templated)
    :param sweep: also publish tombstones for keys that the tables do not have.
    :param by_key: read in the order of the keys instead of the table's blocks: the reading goes on where it was if the
        table is rewritten.
    :param rows_per_second: how many rows are read in a second at most; 0 for as many as there is time for. (templated)
    :param bytes_per_second: the same in bytes. (templated)
    :param deferrable: wait in the triggerer instead of a worker slot.
    :param poll_interval: seconds between two checks.
    :param timeout: seconds after which the live snapshot is cancelled and the task fails; None: it may take any time.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "tables", "where", "rows_per_second", "bytes_per_second")
    template_fields_renderers: ClassVar[dict[str, str]] = {**PIPELINE_RENDERERS, "where": "sql"}
    ui_color = "#fff3cd"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        tables: Sequence[str] | str,
        where: str = "",
        sweep: bool = False,
        by_key: bool = False,
        rows_per_second: float | str = 0.0,
        bytes_per_second: float | str = 0.0,
        deferrable: bool = True,
        poll_interval: float = 5.0,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(pipeline)
        self.tables = tables
        self.where = where
        #: whether the rows are those of the run's data interval, as the template says
        self._of_interval = all(re.search(_BOUND % each, str(where)) for each in ("start", "end"))
        self.sweep = sweep
        self.by_key = by_key
        self.rows_per_second = rows_per_second
        self.bytes_per_second = bytes_per_second
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.timeout = timeout
        self._has_assets(tables)
        self._asked: dict[str, str] | None = None
        #: whether Airflow has ended the task, which does not end its process by itself
        self._killed = False

    def execute(self, context: Context) -> dict[str, Any]:
        """Ask for the live snapshot and wait for its end; returns how many rows were published (``rows``), and how many
        were superseded: left out, since the stream has published newer versions of them (``superseded``).

        :raises AirflowFailException: the live snapshot failed, was cancelled, or took too long; or its rows would be
            those of an empty data interval.
        """
        with failing():
            self._check_interval(context)
            pipeline = self.pipeline_hook.pipeline()
            self._asked = asked = self._ask(context, pipeline)
        deadline = time.time() + self.timeout if self.timeout else None
        if self.deferrable:
            hook = self.pipeline_hook.arguments()
            wait_in_triggerer(
                self, BackfillTrigger(**asked, poll_interval=self.poll_interval, deadline=deadline, hook=hook)
            )
        report = self._wait(asked, deadline)
        with failing():
            if report is None:
                return self._give_up(context, pipeline)
            return self._conclude(context, pipeline, report)

    def _check_interval(self, context: Context) -> None:
        """:raises Refused: no row is in the run's data interval, or it has none, and the condition is about it."""
        start, end = context.get("data_interval_start"), context.get("data_interval_end")
        if self._of_interval and start is None:
            raise Refused(
                "This run has no data interval, since it was triggered without a logical date.",
                "Trigger the DAG with a logical date, or use Airflow's backfill.",
            )
        if self._of_interval and start == end:
            raise Refused(
                f"The data interval of this run is empty (from {start} to {end}), so that no row is in it.",
                "Give the DAG a timetable with data intervals, such as "
                'CronDataIntervalTimetable("@daily", timezone="UTC"): those of a plain cron expression are empty.',
            )

    def _wait(self, asked: dict[str, str], deadline: float | None) -> dict[str, Any] | None:
        """Wait in this process for the last report; None at the deadline.

        :raises Outage: Airflow has ended the task.
        """

        with BlockingWatch(lambda: self._watch(self.pipeline_hook, asked), "The live snapshot") as watching:
            while deadline is None or time.time() < deadline:
                report: dict[str, Any] | None = watching.fetch()
                if self._killed:
                    raise Outage("The task was ended.", "A retry asks for the rows again, or follows what goes on.")
                if report is not None:
                    return report
                time.sleep(min(1.0, self.poll_interval))
        return None

    def _watch(self, hook: PipelineHook, asked: dict[str, str]) -> BackfillWatch:
        return BackfillWatch(hook.pipeline(), **asked, write=lambda line: self.log.info("%s", line))

    def _look(self, trigger: BackfillTrigger) -> dict[str, Any] | None:
        """The event that a live snapshot's trigger would send, by one look here."""
        asked = {"name": trigger.name, "request_id": trigger.request_id}
        with contextlib.closing(self._watch(PipelineHook(**trigger.hook), asked)) as watching:
            found = watching.fetch()
        return None if found is None else {"status": "ended", "report": found}

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """Handle the trigger's event.

        :raises AirflowFailException: the live snapshot failed, was cancelled, or took too long.
        :raises JobFailed: the event is not known.
        """
        event = known_event(event, "ended", "timeout")
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            if event["status"] == "timeout":
                return self._give_up(context, pipeline)
            return self._conclude(context, pipeline, event["report"])

    def _ask(self, context: Context, pipeline: Settings) -> dict[str, str]:
        """Ask for the live snapshot, unless an earlier try of this task has."""
        from airflow_bottledwater.jobs import snapshots
        from airflow_bottledwater.provision import live

        store: Any = context["task_state_store"]
        asked: dict[str, str] | None = store.get(_ASKED)
        if asked is not None and is_first_try(context, self.retries):
            backfill.cancel(pipeline, **asked)
            asked = None
        known = snapshots.reports(pipeline, asked["name"]).get(asked["request_id"]) if asked else None
        if asked is not None and known is not None:
            asked_for, report = known
            if not (asked_for and asked_for.cancelled) and not (report and report.state == "cancelled"):
                self.log.info("The live snapshot of an earlier try is followed.")
                return asked
            # it was cancelled with that try, which no user has ended
            snapshots.forget(pipeline, **asked)
            asked = None
        request = self._request(pipeline)
        if asked is None:
            # its id is stored first: if the task dies in between, a retry asks for the same one
            asked = {"name": live.check(pipeline, request), "request_id": uuid.uuid4().hex[:12]}
            store.set(_ASKED, asked, retention=NEVER_EXPIRE)
            note_life(context)
        snapshots.ask(pipeline, asked["name"], asked["request_id"], request)
        self.log.info(
            "The rows of %s%s are to be published again, as live snapshot %s. %s",
            ", ".join(request.tables),
            f" where {request.where}" if request.where else "",
            asked["request_id"],
            live.publishes(pipeline, asked["name"]),
        )
        return asked

    def _request(self, pipeline: Settings) -> SnapshotRequest:
        from airflow_bottledwater.live.wanted import check_named
        from airflow_bottledwater.state.control_records import SnapshotRequest

        request = SnapshotRequest(
            tuple(listed(self.tables)),
            str(self.where or ""),
            self.sweep,
            self.by_key,
            rows_per_second=number("rows_per_second", self.rows_per_second) or 0.0,
            bytes_per_second=number("bytes_per_second", self.bytes_per_second) or 0.0,
        )
        check_named(request)
        return request

    def publishes(self, table: SourceTable) -> bool:
        """Whether the tables that are read again are described so that it is one of them."""
        return any(patterns.describes(each, table.schema, table.name) for each in listed(self.tables))

    def _conclude(self, context: Context, pipeline: Settings, report: dict[str, Any]) -> dict[str, Any]:
        from airflow_bottledwater.jobs import snapshots

        if report["state"] == "finished":
            # before its report is removed, so that a retry still finds what is to be told
            AssetEvents(context, self.outlets, pipeline).backfill(report)
        store: Any = context["task_state_store"]
        if (asked := store.get(_ASKED)) is not None:
            snapshots.forget(pipeline, asked["name"], asked["request_id"])
            store.delete(_ASKED)
        if report["state"] == "cancelled":
            why = f": {report['error']}" if report["error"] else ""
            raise JobFailed(
                f"The live snapshot was cancelled before its end{why}.", "Clear the task to ask for it again."
            )
        if report["state"] != "finished":
            raise AirflowFailException(f"The live snapshot failed: {report['error']}")
        found = {
            "tables": report["tables"],
            "rows": report["rows"],
            "superseded": report["superseded"],
            "tombstones": report["tombstones"],
            "dead_letters": report["dead_letters"],
            "boundary": report["boundary"],
        }
        self.log.info(
            "%s rows of %s are published again; %s are superseded by newer versions that the stream has published.",
            f"{found['rows']:,}",
            ", ".join(found["tables"]),
            f"{found['superseded']:,}",
        )
        if self.sweep:
            self.log.info(
                "%s tombstones are published, for keys that the tables do not have.", f"{found['tombstones']:,}"
            )
        if found["dead_letters"]:
            self.log.warning("%s rows could not be published, and are dead letters.", f"{found['dead_letters']:,}")
        self.keep_lineage()
        return found

    def _give_up(self, context: Context, pipeline: Settings) -> dict[str, Any]:
        store: Any = context["task_state_store"]
        if (asked := store.get(_ASKED)) is not None:
            backfill.cancel(pipeline, **asked)
            store.delete(_ASKED)
        raise JobFailed(
            f"The live snapshot did not end within {self.timeout:.0f} s, and is cancelled; what it has published "
            "stays.",
            "See whether the stream runs ('bottledwater status'), or raise timeout.",
        )

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """If the trigger itself failed, the live snapshot may go on. A retry follows it; if there are no retries left,
        it is cancelled."""
        if next_method == "__fail__":
            store: Any = context["task_state_store"]
            if is_last_try(context["ti"]):
                self._cancel(store.get(_ASKED))
        next_kwargs = here(self, next_kwargs, self._look)
        return super().resume_execution(next_method, next_kwargs, context)

    def on_kill(self) -> None:
        """Cancel the live snapshot."""
        self._killed = True
        self._cancel(self._asked)

    def _cancel(self, asked: dict[str, str] | None) -> None:
        """Cancel the live snapshot that was asked for; an error is only logged, since the task ends in any case."""
        if asked is None:
            return
        try:
            backfill.cancel(self.pipeline_hook.pipeline(), **asked)
        except BottledWaterError as error:
            self.log.warning("The live snapshot could not be cancelled: %s", error)
