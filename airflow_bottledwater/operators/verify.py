"""The operator that proves that topics equal their tables, as a Spark job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import JobFailed, PipelineStopped
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.run_directory import Differences
from airflow_bottledwater.jobs.watch import Ended
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators.base import failing
from airflow_bottledwater.operators.spark import BottledWaterSparkOperator
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.verification import Verification

if TYPE_CHECKING:
    from airflow.sdk import Context

#: keys of a table that are in the task's error; the log has more of them
_KEYS = 3
#: where values of rows are if the task cannot see them: no other host is told of them
_ELSEWHERE = f"in the log of the job's driver, or in client mode in {Differences.FILE} of its run directory"


class VerifyTopicsOperator(BottledWaterSparkOperator):
    """Compare topics with their tables, at one moment, while the stream runs; fail if they differ.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param verify_tables: tables to verify, as ``[schema.]table`` patterns; empty means all of the pipeline. (templated)
    :param sample: share of the rows that is verified, more than 0, up to 1. (templated)
    :param fail_on_difference: whether the task fails if a topic differs, or cannot be proved equal (see
        ``allow_unverified``). Its result (XCom) has the counts in either case.
    :param name: the job's name in Spark; None: ``bottledwater-verify``. (templated)
    :param deferrable: whether the task is deferred while its job runs; None: in deploy-mode cluster only, since a job
        in client mode keeps the worker busy anyway.
    :param poll_interval: seconds between two checks of the job.
    :param start_timeout: seconds in which the job has to report for the first time; on a cluster, it may wait in a
        queue.

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name = "verify"
    ends_with_task = True
    ui_color = "#d8f0e0"
    template_fields: Sequence[str] = (*BottledWaterSparkOperator.template_fields, "verify_tables", "sample")

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        verify_tables: Sequence[str] | str | None = None,
        sample: float | str | None = None,
        fail_on_difference: bool = True,
        name: str | None = None,
        deferrable: bool | None = None,
        poll_interval: float = 5.0,
        start_timeout: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            pipeline=pipeline,
            name=name,
            deferrable=deferrable,
            poll_interval=poll_interval,
            start_timeout=start_timeout,
            **kwargs,
        )
        self.verify_tables = verify_tables
        self.sample = sample
        self.fail_on_difference = fail_on_difference
        self._ti: Any = None
        self._left: Differences | None = None

    def own_settings(self) -> dict[str, Any]:
        """What is verified."""
        own = {"verify_tables": self.verify_tables, "verify_sample": self.sample}
        return {name: value for name, value in own.items() if value}

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job to its end; returns the counts by table. If topics differ and the task fails, they are its result
        (XCom), too."""
        self._ti = context["ti"]
        with failing():
            self._pipeline = pipeline = self.pipeline_hook.pipeline()
            place = self._place()
            found = self._earlier(context, pipeline)
            if isinstance(found, Ended):
                return self._finish(found.outcome)
            identity = found or self._submit(context, pipeline, place)
        return self._follow(context, pipeline, place, identity)

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> dict[str, Any]:
        """Handle the trigger's event: the job has ended."""
        self._ti = context["ti"]
        return super().execute_complete(context, event)

    def _is_done(self, ended: Ended) -> bool:
        """Whether nothing is left to do after a job of an earlier try: what could only not be settled may be when it is
        verified again."""
        if not super()._is_done(ended):
            return False
        found = msgspec.convert(ended.outcome.result, Verification)
        return found.equal or found.lasts or not self.fail_on_difference

    def _clear_away(self, context: Context, pipeline: Settings, identity: Identity, ended: Ended) -> None:
        if (folder := identities.folder_here(identity)) is not None:
            self._left = run_directory.read(folder, Differences)
        super()._clear_away(context, pipeline, identity, ended)

    def _finish(self, outcome: Outcome) -> dict[str, Any]:
        """Turn what the job has found into the task's outcome; values of rows are in the task's log only, if the job
        was on this host.

        :raises JobFailed: the job failed for a transient reason, or it could not be settled whether keys differ.
        :raises AirflowFailException: the job failed for good, or topics differ.
        :raises AirflowSkipException: it was stopped with the pipeline, or could not end since the pipeline was stopped.
        """
        with failing():
            if outcome.stopped:
                raise PipelineStopped(
                    "The pipeline was asked to stop, so that the verification was stopped before its end.",
                    "Clear the task to verify again when the pipeline runs.",
                )
        found = msgspec.convert(super()._finish(outcome), Verification)
        self.verified = found = found.with_shown(self._left.shown) if self._left is not None else found
        self.keep_lineage()
        for table in found.tables:
            self.log.info("%s: %s, %s rows", table.table, table.verdict, f"{table.rows:,}")
            for difference in table.differences:
                self.log.warning("%s: %s", table.table, difference)
        if not found.equal and self.fail_on_difference:
            if self.do_xcom_push:
                # a task that fails returns nothing
                self._ti.xcom_push(key=BaseXCom.XCOM_RETURN_KEY, value=found.summary())
            message = f"{_first_keys(found)} {found.advice()}".strip()
            raise AirflowFailException(message) if found.lasts else JobFailed(message)
        if advice := found.advice():
            self.log.warning("%s", advice)
        return found.summary()


def _first_keys(found: Verification) -> str:
    """The first keys that differ, as a sentence: whoever is alerted sees where to look."""
    told = []
    for table in found.different:
        if not table.differences:
            continue
        keys = [
            ", ".join(f"{name} = {value}" for name, value in each.key.items()) for each in table.differences[:_KEYS]
        ]
        if sum(table.counts.values()) > len(keys):
            keys.append("…")
        told.append(f"{table.table} ({'; '.join(keys)})")
    if told:
        return f"The first keys that differ: {', '.join(told)}."
    return f"The keys that differ are {_ELSEWHERE}." if found.different else ""
