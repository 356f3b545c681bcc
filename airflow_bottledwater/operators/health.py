"""The operator that watches all pipelines from outside of their own DAG runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.hooks.connections import connection
from airflow_bottledwater.operators.base import ConstantsMixin, failing, number
from airflow_bottledwater.pipeline.rules import listed

if TYPE_CHECKING:
    from airflow.sdk import Context


class PipelineHealthOperator(ConstantsMixin, BaseOperator):
    """Fail if a pipeline that is meant to run does not, repeats, lags, reports a problem, or was not verified for too
    long.

    It knows the pipelines by what they report in Kafka, so it does not depend on their DAG runs. A pipeline is meant to
    run unless it was asked to stop, or retired (the command ``stop``,
    :class:`~airflow_bottledwater.operators.control.PipelineControlOperator`); a task that was marked or cleared does
    not change that. A job whose task has ended while no triggerer ran is asked to stop; one whose task Airflow does not
    know any more is named in the log.

    :param kafka_conn_id: connection of type Apache Kafka: whose pipelines. (templated)
    :param pipelines: patterns of slots, a list or comma-separated; empty means all pipelines of this Kafka. A pattern
        that none has is an error. Where slots of several servers have one name, any of them is enough for it: give the
        whole name then (system identifier, database and slot, with slashes between them). (templated)
    :param postgres_conn_ids: connections of type Postgres, a list or comma-separated, of the sources whose slots are
        looked at, too: that they exist and are not lost, and their lag. (templated)
    :param max_lag: bytes of WAL that a stream may be behind, as it has measured, or one of these slots; None: any
        number. (templated)
    :param max_delay: how old the oldest change may be that a stream has not published, in seconds; None: any age.
        (templated)
    :param max_dead_letters: dead letters of a pipeline that may be open; None: any number. (templated)
    :param max_silence: seconds in which a job has to follow one that has ended, or has to begin to work. (templated)
    :param max_pause: seconds between two bounded runs; None: any number. (templated)
    :param max_unverified: seconds since the last verification of all rows of all tables; None: any number.
        (templated)
    """

    template_fields: Sequence[str] = (
        "kafka_conn_id",
        "pipelines",
        "postgres_conn_ids",
        "max_lag",
        "max_delay",
        "max_dead_letters",
        "max_silence",
        "max_pause",
        "max_unverified",
    )
    ui_color = "#e2e3e5"

    def __init__(
        self,
        *,
        kafka_conn_id: str = "kafka_default",
        pipelines: Sequence[str] | str | None = None,
        postgres_conn_ids: Sequence[str] | str | None = None,
        max_lag: int | str | None = None,
        max_delay: float | str | None = None,
        max_dead_letters: int | str | None = 0,
        max_silence: float | str = 600.0,
        max_pause: float | str | None = 3600.0,
        max_unverified: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kafka_conn_id = kafka_conn_id
        self.pipelines = pipelines
        self.postgres_conn_ids = postgres_conn_ids
        self.max_lag = max_lag
        self.max_delay = max_delay
        self.max_dead_letters = max_dead_letters
        self.max_silence = max_silence
        self.max_pause = max_pause
        self.max_unverified = max_unverified

    def execute(self, context: Context) -> dict[str, Any]:
        """Look once; returns the state of each pipeline's job, and what was told.

        :raises AirflowFailException: something is wrong; the message has all of it, the task's result (XCom), too.
        :raises Outage: Kafka does not answer, so that nothing is known.
        """
        from airflow_bottledwater.hooks import health
        from airflow_bottledwater.hooks.pipeline import properties
        from airflow_bottledwater.jobs.pipelines import HealthLimits

        with failing():
            letters, lag = number("max_dead_letters", self.max_dead_letters), number("max_lag", self.max_lag)
            limits = HealthLimits(
                silence=number("max_silence", self.max_silence) or 0.0,
                pause=number("max_pause", self.max_pause),
                lag=None if lag is None else int(lag),
                delay=number("max_delay", self.max_delay),
                dead_letters=None if letters is None else int(letters),
                unverified=number("max_unverified", self.max_unverified),
            )
            found = health.look(
                properties(connection(self.kafka_conn_id)),
                pipelines=listed(self.pipelines),
                postgres_conn_ids=listed(self.postgres_conn_ids),
                limits=limits,
            )
        for name, state in found.states.items():
            self.log.info("%s: %s%s", name, state, ", not as it is meant" if name in found.wrong else "")
        for line in found.told:
            self.log.warning("%s", line)
        if not found.wrong:
            return found.as_result()
        if self.do_xcom_push:
            # a task that fails returns nothing
            context["ti"].xcom_push(key="return_value", value=found.as_result())
        lines = [f"{name}: {' '.join(sentence.split())}" for name, wrong in found.wrong.items() for sentence in wrong]
        raise AirflowFailException("\n".join(["Not as it is meant:", *lines]))
