"""The links that Airflow shows at a task: its pipeline's page, its topic in a console, its application in Spark's.

Airflow asks for them in the worker, when the task ends and when it defers, and shows what they were then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink, conf

from airflow_bottledwater.errors import BottledWaterError

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

#: the route of the page (:data:`airflow_bottledwater.plugin.ROUTE`)
_PAGE = "/plugin/bottledwater"


class PipelineLink(BaseOperatorLink):
    """The page of the pipeline; that of all pipelines of its Kafka, if the source does not say now which it is."""

    name = "Pipeline"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address of the page."""
        from airflow_bottledwater.provision import live

        task: Any = operator
        asked = {"kafka": task.described().kafka.conn_id}
        try:
            asked["name"] = live.name_of(task.pipeline_hook.pipeline())
        except BottledWaterError as error:
            task.log.info("The link is to the page of all pipelines: %s", error)
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        return f"{base}{_PAGE}?{urlencode(asked)}"


class TopicLink(BaseOperatorLink):
    """The pipeline's topic in a console, whose address is a setting of Airflow: of one table, its topic; of several,
    what their names begin with, by which consoles search."""

    name = "Topic"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address in the console."""
        from airflow_bottledwater.encoding import names

        task: Any = operator
        settings = task.pipeline_hook.settings
        topic, tables = settings.get("topic_prefix", ""), settings.get("tables", ())
        if len(tables) == 1 and not set(tables[0]) & set("*?"):
            schema, _, table = tables[0].rpartition(".")
            topic = names.topic(schema or "public", table, topic)
        return _setting("topic_url").replace("{topic}", quote(topic, safe=""))


class SparkLink(BaseOperatorLink):
    """The application in Spark's history server, or in the pages of its cluster, whose address is a setting of Airflow.
    In deploy-mode client, Airflow does not know the application's id: then without it."""

    name = "Spark"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address of the application."""
        identity = getattr(operator, "_identity", None)
        application = identity["application"] if identity else ""
        return _setting("spark_url").replace("{application}", quote(application, safe=""))


def _setting(name: str) -> str:
    return str(conf.get("bottledwater", name, fallback=""))


def of_pipeline() -> tuple[BaseOperatorLink, ...]:
    """The links of all tasks that have a pipeline."""
    return (PipelineLink(), TopicLink()) if _setting("topic_url") else (PipelineLink(),)


def of_job() -> tuple[BaseOperatorLink, ...]:
    """The links of tasks that submit jobs."""
    return (*of_pipeline(), SparkLink()) if _setting("spark_url") else of_pipeline()
