"""The pipeline as users describe it in a DAG file, with the DAGs that are made of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, CronDataIntervalTimetable, DeltaDataIntervalTimetable, Param, task
from airflow.sdk.exceptions import AirflowFailException, AirflowRuntimeError

from airflow_bottledwater.errors import Refused, SettingError
from airflow_bottledwater.operators.approval import PipelineControlApprovalOperator
from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator
from airflow_bottledwater.operators.base import ConstantsMixin
from airflow_bottledwater.operators.control import ACTIONS, PipelineControlOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.operators.verify import VerifyTopicsOperator
from airflow_bottledwater.pipeline import file
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.task_group import BottledWaterTaskGroup

if TYPE_CHECKING:
    from airflow.sdk import Context

#: of the DAGs whose tasks may fail for a reason that passes
_RETRIES = {"retries": 3, "retry_delay": timedelta(minutes=1)}


def dag_of(dag_id: str, description: str, **dag: Any) -> DAG:
    """A DAG as all of this package are: no catch-up, one run at a time, templates that are rendered to what they are,
    tags; a task that is cleared, or tried again, runs the DAG as it is then. Those on a schedule begin paused: they
    need a pipeline that exists.

    :param dag: further arguments of :class:`airflow.sdk.DAG`, which may override these, but for how templates are
        rendered.
    """
    scheduled = dag.get("schedule") is not None
    return DAG(
        **{
            "dag_id": dag_id,
            "description": description,
            "schedule": None,
            "catchup": False,
            "max_active_runs": 1,
            # a bundle with versions, such as one of Git, would keep the DAG of the day on which the run began for as
            # long as a stream runs: no setting would ever take effect
            "disable_bundle_versioning": True,
            # what Airflow's list of DAGs can be filtered by
            "tags": ["cdc", "postgresql", "kafka"],
            **({"is_paused_upon_creation": True} if scheduled else {}),
            **dag,
            "render_template_as_native_obj": True,
        }
    )


def text_of(field: str) -> str:
    """The template for a form's field that is text, in a DAG as :func:`dag_of` makes it. Without the filter, what a
    template gives is evaluated if it can be: a text like ``4711``, ``2024_01`` or ``None`` would be none any more.

    :param field: its name.
    """
    return f"{{{{ (params.{field} or '') | pprint }}}}"


def _with_intervals(schedule: Any) -> Any:
    """A schedule whose runs have data intervals: what Airflow makes of a cron expression, or a timedelta, has empty
    ones (``[scheduler] create_cron_data_intervals``)."""
    if isinstance(schedule, str) and schedule not in ("@once", "@continuous"):
        return CronDataIntervalTimetable(schedule, timezone="UTC")
    return DeltaDataIntervalTimetable(schedule) if isinstance(schedule, timedelta) else schedule


def _zone_of(schedule: Any, at: str = "dag.timetable") -> str:
    """The time zone of a schedule's data intervals, as an expression of a template.

    :param at: the schedule, as such an expression.
    :raises Refused: a timetable does not say which one it has: the bounds would be those of other days than its own.
    """
    if hasattr(schedule, "timetable"):  # that of AssetOrTimeSchedule
        return _zone_of(schedule.timetable, f"{at}.timetable")
    for attribute in ("timetables", "_timetables"):  # those of MultipleCronTriggerTimetable, which have one zone
        if nested := getattr(schedule, attribute, None):
            return _zone_of(nested[0], f"{at}.{attribute}[0]")
    # Airflow's core timetables have the second
    for attribute in ("timezone", "_timezone"):
        if hasattr(schedule, attribute):
            return f"{at}.{attribute}"
    if hasattr(schedule, "next_dagrun_info") and not hasattr(schedule, "_delta"):
        raise Refused(
            f"The timetable {type(schedule).__name__} does not say in which time zone its data intervals are.",
            "Give it an attribute timezone: the name of a time zone, or one of pendulum.",
        )
    return "'UTC'"


def _of_interval(column: str, zone: str) -> str:
    """The template of a condition: the rows of a run's data interval. Its bounds are in a time zone, with their offset:
    PostgreSQL heeds that for a timestamptz, ignores it for a timestamp, and takes the day of a bound for a date. Of a
    run without a data interval, no rows: the operator says so.

    :param zone: as an expression of the template.
    """
    start, end = (f"{{{{ data_interval_{each}.in_timezone({zone}) | ts }}}}" for each in ("start", "end"))
    condition = f"{column} >= '{start}' AND {column} < '{end}'"
    return f"{{% if data_interval_start is defined %}}{condition}{{% else %}}false{{% endif %}}"


def _is_start(params: dict[str, Any] | None = None) -> bool:
    """Whether a pipeline's DAG is to be triggered."""
    return (params or {}).get("action") == "start"


def _control_fields() -> dict[str, Param]:
    """The form of the DAG that controls a pipeline."""
    return {
        "action": Param(
            "stop",
            type="string",
            enum=list(ACTIONS),
            title="Action",
            description=". ".join(f"{name}: {what}" for name, what in ACTIONS.items()) + ".",
        ),
        "tables": Param(
            [],
            type=["array", "null"],
            items={"type": "string"},
            title="Tables",
            description="Of snapshot, dismiss, pause_table, resume_table, accept_new_keys: [schema.]table, one a "
            "line, with * and ?.",
        ),
        "where": Param("", type=["string", "null"], title="Where", description="Of snapshot: only these rows, as SQL."),
        "sweep": Param(
            False,
            type="boolean",
            title="Sweep",
            description="Of snapshot: also remove keys that the tables do not have.",
        ),
        "snapshot_id": Param(
            "", type=["string", "null"], title="Live snapshot", description="Its id: of pause, resume and cancel."
        ),
        "reason": Param("", type=["string", "null"], title="Reason", description="Of pause_table: why."),
    }


class _StartOperator(ConstantsMixin, TriggerDagRunOperator):
    """Triggers a pipeline's DAG, whatever its name looks like; fails if that is paused, where its run would wait while
    this task counts as done."""

    def execute(self, context: Context) -> Any:
        """Trigger it.

        :raises AirflowFailException: it is paused.
        """
        ti: Any = context["ti"]
        try:
            paused = ti.get_dag(self.trigger_dag_id).is_paused
        except AirflowRuntimeError:
            paused = False  # there is no such DAG, say: to trigger it says so
        if paused:
            raise AirflowFailException(
                f"The DAG {self.trigger_dag_id!r} is paused, so that nothing would start. Unpause it, and clear this "
                "task."
            )
        return super().execute(context)


class _NotLoaded(DAG):
    """Stands for files that could not be loaded. Airflow validates each DAG of a module by itself
    (``DagBag._load_modules_from_file`` in airflow/dag_processing/dagbag.py): the error of this one is shown as an
    import error, and the others are taken.

    :param errors: what is wrong.
    """

    ID = "bottledwater_files_not_loaded"

    def __init__(self, errors: Sequence[SettingError]) -> None:
        super().__init__(self.ID, schedule=None)
        self._errors = errors

    def validate(self) -> None:
        """
        :raises Refused: always.
        """
        raise Refused(
            f"Not loaded: {'; '.join(str(each) for each in self._errors)}",
            "Mend these files. The pipelines of the other files are loaded.",
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Pipeline(Description):
    """A pipeline, described once: operators, sensors and the task group take it, and its DAGs are made of it.

    Each DAG takes the arguments of :class:`airflow.sdk.DAG`, too; ``dag_id`` is the pipeline's name, with what the DAG
    does behind it.
    """

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The pipeline that a YAML file describes.

        :raises SettingError: the file cannot be read, or a value is not allowed; the message names file and key.
        """
        return file.load(path, cls)

    @classmethod
    def dags_of_folder(cls, folder: Path | str) -> dict[str, DAG]:
        """The DAGs of the pipelines of all YAML files of a folder, by their ids; see :meth:`dags`.

        A file that is wrong keeps no other one from being loaded: what is wrong with it, Airflow shows as an import
        error of the DAG file. So does one of which a DAG would have the id of another pipeline's.
        """
        pipelines, errors = file.load_folder(folder, cls)
        made: dict[str, DAG] = {}
        for pipeline in pipelines:
            dags = {dag.dag_id: dag for dag in pipeline.dags()}
            if twice := sorted(made.keys() & dags.keys()):
                problem = (
                    f"makes {pipeline.name!r} a pipeline with a DAG {twice[0]!r}, which another file's pipeline has"
                )
                errors.append(SettingError("name", pipeline.name, "another name", problem))
            else:
                made |= dags
        return made | ({_NotLoaded.ID: _NotLoaded(errors)} if errors else {})

    def dag(
        self,
        *,
        bounded: bool | str = False,
        drop_when: str = "retired",
        approve: bool | str = False,
        snapshot: dict[str, Any] | None = None,
        stream: dict[str, Any] | None = None,
        **dag: Any,
    ) -> DAG:
        """The DAG that creates the slot, takes the snapshot and streams:
        :class:`~airflow_bottledwater.task_group.BottledWaterTaskGroup`.

        :param bounded: whether the stream ends once it has published everything that was committed when it started.
            (templated)
        :param drop_when: ``retired``, ``always`` or ``never``: whether the slot is dropped at the end. (templated)
        :param approve: whether a person is asked before it is dropped, by Airflow's ApprovalOperator. (templated)
        :param snapshot: further arguments of the snapshot operator.
        :param stream: further arguments of the stream operator.
        """
        with self._made("", "PostgreSQL to Kafka: snapshot, then every change, exactly once", dag, _RETRIES) as made:
            BottledWaterTaskGroup(
                "pipeline",
                prefix_group_id=False,
                pipeline=self,
                bounded=bounded,
                drop_when=drop_when,
                approve=approve,
                snapshot=snapshot,
                stream=stream,
            )
        return made

    def bounded_dag(self, schedule: Any = "*/5 * * * *", **dag: Any) -> DAG:
        """The DAG that publishes what was committed since its last run, instead of a stream that runs on. The slot and
        the snapshot are made by :meth:`dag`, with ``bounded=True``.

        :param schedule: when.
        """
        more, retries = {"schedule": schedule, **dag}, {**_RETRIES, "retries": 2}
        with self._made("bounded", "PostgreSQL to Kafka, what was committed since the last run", more, retries) as made:
            StreamToKafkaOperator(task_id="stream", pipeline=self, bounded=True)
        return made

    def backfill_dag(
        self,
        by: str,
        tables: list[str] | str | None = None,
        schedule: Any = None,
        rows_per_second: float | str = 0,
        **dag: Any,
    ) -> DAG:
        """The DAG that publishes the rows of its run's data interval again, by the stream. Airflow's backfills of it
        publish many days.

        :param by: the column that dates a row, in each of the tables: a timestamptz; or a timestamp or date, which is
            taken to be in the schedule's time zone. (templated)
        :param tables: whose rows; None: of all tables of the pipeline. (templated)
        :param schedule: when: a timetable with data intervals; a cron expression, in UTC, or a timedelta, of which such
            a timetable is made; None: every day at midnight, in UTC. A timetable of your own has its zone as an
            attribute ``timezone``.
        :param rows_per_second: how many rows are read in a second at most; 0: as many as there is time for. (templated)
        """
        schedule = _with_intervals(schedule or "@daily")
        where = _of_interval(by, _zone_of(schedule))
        more = {
            "schedule": schedule,
            # they queue at the slot anyway, and the triggerer holds them while they do
            "max_active_runs": 16,
            **dag,
        }
        what = "Publish the rows of one interval again, while the stream runs"
        with self._made("backfill", what, more, _RETRIES) as made:
            BackfillToKafkaOperator(
                task_id="backfill",
                pipeline=self,
                tables=self._all_tables() if tables is None else tables,
                where=where,
                rows_per_second=rows_per_second,
            )
        return made

    def _all_tables(self) -> list[str]:
        """Patterns of all tables of the pipeline."""
        named = [*self.source.tables, *(f"{each}.*" for each in self.source.schemas if not each.startswith("!"))]
        return named if any(not each.startswith("!") for each in named) else ["*.*", *named]

    def verify_dag(
        self,
        schedule: Any = "@daily",
        tables: list[str] | str | None = None,
        sample: float | str | None = None,
        **dag: Any,
    ) -> DAG:
        """The DAG that compares the topics with their tables, while the stream runs; its task fails if they differ.

        :param schedule: when.
        :param tables: which are compared; None: all of the pipeline. (templated)
        :param sample: the share of the rows, more than 0, up to 1; None: the pipeline's ``verify_sample``. (templated)
        """
        more = {"schedule": schedule, **dag}
        with self._made("verify", "Topics against tables, while the stream runs", more, _RETRIES) as made:
            VerifyTopicsOperator(task_id="verify", pipeline=self, verify_tables=tables, sample=sample)
        return made

    def control_dag(self, starts: str = "", conf: Any = None, *, approve: bool | str = False, **dag: Any) -> DAG:
        """The DAG whose runs stop, retire or start the pipeline, read or pause tables, or settle dead letters: the
        page's buttons trigger it, and whoever may trigger it may do all of that. It has no schedule, and is not paused.

        :param starts: the id of the DAG that ``start`` triggers; empty: the pipeline's name. (templated)
        :param conf: with what that DAG is triggered. (templated)
        :param approve: whether a person is asked before something is taken away, by Airflow's ApprovalOperator.
            (templated)
        """
        more = {
            "max_active_runs": 16,  # of several pipelines at a time, or of a stop while another action waits
            "is_paused_upon_creation": False,
            **dag,
            "params": {**dag.get("params", {}), **_control_fields()},
        }
        what = "Stop, retire or start a pipeline, read tables again, settle dead letters"
        with self._made("control", what, more, {**_RETRIES, "retry_delay": timedelta(seconds=30)}) as made:
            asking = functools.partial(PipelineControlApprovalOperator, approve=approve)
            control = (asking if approve else PipelineControlOperator)(
                task_id="control",
                pipeline=self,
                action="{{ params.action }}",
                tables="{{ params.tables }}",
                where=text_of("where"),
                sweep="{{ params.sweep }}",
                snapshot_id=text_of("snapshot_id"),
                reason=text_of("reason"),
            )
            start = _StartOperator(task_id="start", trigger_dag_id=starts or self.name, conf=conf or {})
            control >> task.short_circuit(_is_start)() >> start
        return made

    def dags(self, **dag: Any) -> list[DAG]:
        """All DAGs that the pipeline's section ``schedules`` asks for: the one that streams, or the two that publish in
        bounded runs, those that verify and that publish rows again, and the one that the page's buttons trigger.

        :param dag: arguments of all of them.
        """
        schedules = self.schedules
        made = [self.dag(bounded=bool(schedules.bounded), approve=schedules.approve, **dag)]
        if schedules.bounded:
            made.append(self.bounded_dag(schedules.bounded, **dag))
        if schedules.verify:
            made.append(self.verify_dag(schedules.verify, **dag))
        if schedules.backfill_by:
            made.append(self.backfill_dag(schedules.backfill_by, **dag))
        return [*made, self.control_dag(approve=schedules.approve, **dag)]

    def _made(self, what: str, description: str, dag: dict[str, Any], retries: dict[str, Any]) -> DAG:
        """A DAG of the pipeline.

        :param retries: the defaults of its tasks, beside those that the DAG is given.
        """
        dag_id = f"{self.name}_{what}" if what else self.name
        default_args = {**retries, **(dag.get("default_args") or {})}
        return dag_of(**{"dag_id": dag_id, "description": description, **dag, "default_args": default_args})
