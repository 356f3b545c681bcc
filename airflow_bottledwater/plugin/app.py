"""What the page asks: all answers are made of what pipelines report and of what Airflow knows. Nothing is changed here:
the page's buttons trigger DAGs, by Airflow's own API."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any
from urllib.parse import quote

from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.configuration import conf
from fastapi import FastAPI, HTTPException, Query
from fastapi.staticfiles import StaticFiles

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.plugin import actions, kafkas, overview, rights, unbegun
from airflow_bottledwater.plugin.detail import detail, settings_of
from airflow_bottledwater.plugin.letters import newest
from airflow_bottledwater.plugin.past import PERIODS, past
from airflow_bottledwater.plugin.rights import Rights
from airflow_bottledwater.plugin.watch import KafkaLook, KafkaWatch

#: of a connection that the setting or Airflow's database names
_MISSING = (
    "This connection, which the setting kafka_conn_ids or Airflow's database names, is not found, or is none to a "
    "Kafka: the pipelines of its Kafka are not shown. Define it, look whether the secrets backend answers, and whether "
    "the API server has the Fernet key that the connection was stored with; or remove it from the setting."
)
#: what was built of ``www/src``
BUILT = Path(__file__).parent / "www" / "built"


def make() -> FastAPI:
    """The app."""
    app = FastAPI(title="Bottled Water", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/api/pipelines", pipelines)
    app.add_api_route("/api/pipelines/{kafka}/{name:path}", pipeline)
    app.add_api_route("/api/history/{kafka}/{name:path}", history)
    app.add_api_route("/api/dead_letters/{kafka}/{name:path}", dead_letters)
    mimetypes.add_type("application/javascript", ".cjs")
    app.mount("/static", StaticFiles(directory=BUILT))
    return app


def pipelines(user: GetUserDep, dag_id: str = "") -> dict[str, Any]:
    """All pipelines that the user may see, those with something wrong first, and those of which no job could begin.

    :param dag_id: only those whose job a task of this DAG has submitted.
    """
    allowed = Rights(user)
    found: list[dict[str, Any]] = []
    away = {}
    looks = {conn_id: watch.look() for conn_id, watch in kafkas.watches().items()}
    for conn_id, seen in looks.items():
        shown = [each for each in overview.rows(conn_id, seen) if allowed.may_see(conn_id, _dag_of(each))]
        if seen.away and (shown or allowed.may_read(conn_id)):
            away[conn_id] = seen.away
        found += [each for each in shown if dag_id in ("", _dag_of(each))]
    missing = kafkas.missing()
    away |= {conn_id: _MISSING for conn_id in missing if allowed.may_read(conn_id)}
    never = unbegun.found(looks)
    unable = [each for each in never if each["dag_id"] in allowed.readable and dag_id in ("", each["dag_id"])]
    return {
        "pipelines": overview.worst_first(found),
        "unbegun": unable,
        "wrong": sum(bool(each["wrong"]) for each in found) + len(unable),
        "away": away,
        # also for whoever may not know which Kafka is away
        "complete": not missing and all(look.read and not look.away for look in looks.values()),
        "kafkas": len(looks),
    }


def pipeline(user: GetUserDep, kafka: str, name: str) -> dict[str, Any]:
    """One pipeline.

    :param kafka: the id of a connection to its Kafka.
    """
    kafka, watch, seen = _seen(allowed := Rights(user), kafka)
    shown = detail(watch, _allowed(allowed, kafka, name, seen), seen)
    described = rights.described(shown["task"], shown["slot"])
    connections = {}
    if described is not None:
        connections = {
            "postgres": described.source.conn_id,
            "kafka": described.kafka.conn_id,
            "registry": described.kafka.registry,
            "spark": described.spark.conn_id,
        }
    buttons, reason = actions.offered(shown, described, allowed)
    _name_buttons(shown, buttons)
    console = conf.get("bottledwater", "topic_url", fallback="")
    for table in shown["tables"]:
        if console and "topic" in table:
            table["topic_url"] = console.replace("{topic}", quote(table["topic"], safe=""))
    return {**shown, "connections": connections, "actions": buttons, "no_actions": reason, "away": seen.away}


def _name_buttons(shown: dict[str, Any], buttons: list[dict[str, Any]]) -> None:
    """What is to be done is said by the buttons that do it, where there are some."""
    shown["error"] = actions.by_buttons(shown["error"], buttons)
    shown["wrong"] = [actions.by_buttons(each, buttons) for each in shown["wrong"]]
    of_tables = (problem for table in shown["tables"] for problem in table.get("problems", ()))
    for problem in (*shown["problems"], *of_tables):
        problem |= {name: actions.by_buttons(problem[name], buttons) for name in ("reason", "remedy")}


def history(user: GetUserDep, kafka: str, name: str, period: int = Query(900)) -> dict[str, Any]:
    """The plots of one pipeline.

    :param period: seconds; one of :data:`PERIODS`.
    """
    kafka, watch, seen = _seen(allowed := Rights(user), kafka)
    _allowed(allowed, kafka, name, seen)
    if period not in PERIODS:
        raise HTTPException(422, f"There are plots of {', '.join(map(str, PERIODS))} seconds.")
    try:
        return past(watch.kafka, name, period).look()
    except BottledWaterError as error:
        raise HTTPException(503, str(error)) from None


def dead_letters(user: GetUserDep, kafka: str, name: str) -> dict[str, Any]:
    """The newest dead letters of one pipeline; ``keys`` says whether the user may see of which rows they are."""
    kafka, watch, seen = _seen(allowed := Rights(user), kafka)
    owner = overview.owner_of(seen.statuses[_allowed(allowed, kafka, name, seen)])
    keys = allowed.may_see_rows(kafka, None if owner is None else owner.dag_id)
    try:
        prefix = str(settings_of(watch, name, seen).get("topic_prefix", ""))
        return {**newest(watch.kafka, name, prefix, keys=keys), "keys": keys}
    except BottledWaterError as error:
        raise HTTPException(503, str(error)) from None


def _seen(allowed: Rights, kafka: str) -> tuple[str, KafkaWatch, KafkaLook]:
    """The Kafka of a connection: the id under which it is listed, its watch, and what that has seen."""
    listed = kafkas.listed_as(kafka)
    watch = kafkas.watches().get(listed)
    if watch is None:
        _check(allowed.may_read(kafka))
        raise HTTPException(404, f"There is no connection {kafka!r} of type Apache Kafka.")
    return listed, watch, watch.look()


def _allowed(allowed: Rights, kafka: str, name: str, seen: KafkaLook) -> str:
    """The name, if there is such a pipeline and the user may see it."""
    status = seen.statuses.get(name)
    owner = None if status is None else overview.owner_of(status)
    _check(allowed.may_see(kafka, None if owner is None else owner.dag_id))
    if status is None and seen.away:
        raise HTTPException(503, seen.away)
    if status is None:
        raise HTTPException(404, f"No pipeline {name!r} has ever reported.")
    return name


def _check(may: bool) -> None:
    """Whoever may not see something does not learn whether it is there, either."""
    if not may:
        raise HTTPException(403, "No pipeline of this name that you may see is known now.")


def _dag_of(row: dict[str, Any]) -> str | None:
    return row["task"]["dag_id"] if row["task"] is not None else None
