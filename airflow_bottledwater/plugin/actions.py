"""What can be done about a pipeline, each with what it will do and the DAG that does it: the page triggers that DAG by
Airflow's own API, which asks once more whether the user may."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_bottledwater.model.amounts import size
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.plugin import rights
from airflow_bottledwater.plugin.rights import Rights
from airflow_bottledwater.state.held import PAUSED, SET_ASIDE

#: the ready DAGs, for pipelines that have none of their own
_CONTROL, _VERIFY = "bottledwater_control", "bottledwater_verify"
#: a command in a sentence, with options of which the buttons have the same: the tables are asked for
_COMMAND = re.compile(
    r"(?:\b([Rr])un )?'?\bbottledwater (?>([a-z-]+))(?>(?: --tables [^\s:;,)']*[^\s:;,)'.]| --when always)?)(?! --)'?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """A button.

    :param says: what will happen, for people.
    :param dag_id: the DAG that is triggered, with this ``conf``.
    :param impossible: why it cannot be done now; empty if it can.
    :param danger: whether it takes something away.
    :param tables: whether it asks for tables.
    """

    id: str
    label: str
    says: str
    impossible: str = ""
    danger: bool = False
    tables: bool = False
    dag_id: str = ""
    conf: Mapping[str, Any] = field(default_factory=dict)


def offered(
    shown: Mapping[str, Any], described: Description | None, allowed: Rights
) -> tuple[list[dict[str, Any]], str]:
    """The buttons of a pipeline for a user, and why there are none, or why none can be pressed.

    :param shown: see :func:`airflow_bottledwater.plugin.detail.detail`.
    """
    if shown["task"] is None:
        return [], (
            "No task of this Airflow runs this pipeline: use the page of the Airflow that does, or the command "
            "bottledwater."
        )
    if described is None:
        return [], "Airflow has no record of this pipeline's task any more: run its DAG again, or use the command."
    conf = {
        "slot": described.name,
        "postgres_conn_id": described.source.conn_id,
        "kafka_conn_id": described.kafka.conn_id,
        "schema_registry_conn_id": described.kafka.registry,
    }
    found = []
    why = f"There is no DAG {described.name}_control and no {_CONTROL} (one of the ready DAGs): copy it to your DAGs."
    control, reason = _dag(described, "control", _CONTROL, why, allowed)
    if control:
        more = {"dag_id": shown["task"]["dag_id"], "conf": rights.conf_of(shown["task"]) if not reason else {}}
        for each in (*_of_job(shown), _start(shown, rights.starts(control)), *_of_rows(shown)):
            own = {"action": each.id.partition(":")[0], "snapshot_id": each.id.partition(":")[2]}
            found.append(_as_json(each, control, {**conf, **own, **(more if each.id == "start" else {})}, reason))
    verify, unable = _dag(described, "verify", _VERIFY, "", allowed)
    if verify:
        says = (
            "Compares every row of the tables with the topics, while the stream runs, by a Spark job that reads all "
            "tables and topics once. It changes nothing, but where a bounded run has finished, it publishes what was "
            "committed since, as the next run would. Its task fails if they differ."
        )
        spark = {"spark_conn_id": described.spark.conn_id}
        found.append(_as_json(Action("verify", "Verify", says), verify, {**conf, **spark}, unable))
    return found, reason


def by_buttons(text: str, buttons: Sequence[Mapping[str, Any]]) -> str:
    """A sentence that says what to do, with the names of buttons instead of the commands that do the same.

    :param buttons: those of the pipeline; of a command for which there is none, the name stays.
    """
    labels = {str(each["id"]).replace("_", "-"): each["label"] for each in buttons}

    def named(found: re.Match[str]) -> str:
        label = labels.get(found[2])
        if label is None:
            return found[0]
        press = {"R": "Press", "r": "press", None: "the button"}[found[1]]
        return f"{press} '{label}'"

    return _COMMAND.sub(named, text)


def _as_json(action: Action, dag_id: str, conf: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """A button as the page takes it; one that may not be pressed does not tell with what it would be."""
    return {
        **asdict(action),
        "impossible": reason or action.impossible,
        "dag_id": dag_id,
        "conf": {} if reason else conf,
    }


def _dag(described: Description, what: str, ready: str, why: str, allowed: Rights) -> tuple[str, str]:
    """The DAG that does something: the pipeline's own, or the ready one; and why it cannot be triggered.

    :param why: there is none, as a sentence.
    """
    own = f"{described.name}_{what}"
    found = rights.dags([own, ready])
    if own != ready and own in found and not rights.is_of(own, what, described):
        del found[own]  # that of another pipeline with a slot of this name
    dag_id = own if own in found else ready
    if dag_id not in found:
        return "", why
    if not allowed.may_trigger(dag_id):
        return dag_id, f"You may not trigger the DAG {dag_id}."
    return dag_id, _paused(dag_id) if found[dag_id] else ""


def _paused(dag_id: str) -> str:
    return f"The DAG {dag_id} is paused: unpause it first."


def _of_job(shown: Mapping[str, Any]) -> Iterator[Action]:
    kept = "" if shown["wal_kept"] is None else f" (now {size(shown['wal_kept'])})"
    if shown["wanted"]:
        yield Action(
            "stop",
            "Stop",
            f"The job ends in order, wherever it runs. The slot is kept, so that nothing is lost: PostgreSQL keeps its "
            f"WAL{kept} from then on until the pipeline is started again, which can fill its disk.",
            danger=True,
        )
    lost = (
        f"Changes that are not yet published ({_behind(shown)}) are lost to the topics, and a new pipeline begins with "
        "a new snapshot. Topics stay."
    )
    if not shown["retired"]:
        # the teardown has run already if the run of the DAG is over
        how = "If no run of its DAG goes on, nothing drops the slot then: use 'Drop the slot'." if _ended(shown) else ""
        yield Action(
            "retire",
            "Retire",
            f"The pipeline stops for good. Its DAG then drops the slot and the publications. {lost} {how}".strip(),
            danger=True,
        )
    yield Action(
        "drop_slot",
        "Drop the slot",
        "The slot, the publications and the saved state are removed for good, and PostgreSQL may remove the WAL that "
        f"it keeps for the slot{kept}. {lost}",
        impossible=""
        if _ended(shown)
        else "The job runs: retire the pipeline, which drops the slot, or stop it first.",
        danger=True,
    )


def _start(shown: Mapping[str, Any], fixed: str) -> Action:
    """The action that lets a pipeline run again.

    :param fixed: the DAG that is triggered in any case; empty: the one that has run the pipeline, in the same way.
    """
    dag_id = fixed or shown["task"]["dag_id"]
    impossible = "" if _ended(shown) else "It runs."
    if not impossible and rights.dags([dag_id]).get(dag_id):
        impossible = _paused(dag_id)
    if not impossible and rights.full(dag_id):
        impossible = (
            f"As many runs of the DAG {dag_id} go on, or wait, as it may have at a time. A run of this pipeline that "
            "goes on starts the job again by itself, unless the pipeline was asked to stop. Otherwise clear its task, "
            "or end these runs."
        )
    triggered = f"the DAG {dag_id} is triggered{'' if fixed else ' as it was last time'}"
    return Action(
        "start",
        "Start again",
        f"The pipeline is meant to run again, and {triggered}. It goes on where it was; if the slot is gone, it begins "
        "with a new snapshot.",
        impossible=impossible,
    )


def _of_rows(shown: Mapping[str, Any]) -> Iterator[Action]:
    yield Action(
        "snapshot",
        "Read tables again",
        "The stream's job reads all rows of these tables and publishes them again, a part at a time, in order with the "
        "changes. Consumers get each row once more; the stream goes on.",
        tables=True,
    )
    yield Action(
        "pause_table",
        "Pause tables",
        "Nothing more of these tables is published, until they go on; their topics stay as they are. The other tables "
        "go on.",
        danger=True,
        tables=True,
    )
    if held := [each["subject"] for each in shown["problems"] if each["kind"] in (PAUSED, SET_ASIDE)]:
        yield Action(
            "resume_table",
            "Go on with tables",
            f"{', '.join(held)}: paused, or set aside because of a record. The stream's job publishes their changes "
            "again and reads all of their rows, and the topics are brought to what the tables hold.",
            tables=True,
        )
    letters = f"{shown['dead_letters']:,} dead letters are"
    stopped = "" if _ended(shown) else "The stream runs: stop it first."
    if shown["dead_letters"]:
        yield Action(
            "redrive",
            "Re-drive",
            f"{letters} published, if their cause was mended and no newer record has overtaken them; the others stay, "
            "or are dropped if they are overtaken.",
            impossible=stopped,
        )
        yield Action(
            "dismiss",
            "Dismiss dead letters",
            f"{letters} given up: what they hold is not published, and nobody is told of them any more.",
            impossible=stopped,
            danger=True,
        )
    for live in shown["live"]:
        if live["open"]:
            what = f"reading {', '.join(live['tables']) or 'tables'} again"
            if sum(each["open"] and each["tables"] == live["tables"] for each in shown["live"]) > 1:
                what += f" ({live['id'][:6]})"
            if live["paused"]:
                yield Action(f"resume:{live['id']}", f"Go on with {what}", "The live snapshot goes on where it was.")
            else:
                says = "The live snapshot waits until it is told to go on. What it has published stays."
                yield Action(f"pause:{live['id']}", f"Pause {what}", says)
            yield Action(
                f"cancel:{live['id']}",
                f"Cancel {what}",
                "The live snapshot ends. What it has published stays; the rows that it has not read are not published.",
                danger=True,
            )


def _ended(shown: Mapping[str, Any]) -> bool:
    return shown["state"] in ("stopped", "finished", "failed", "silent")


def _behind(shown: Mapping[str, Any]) -> str:
    return "how many is not known" if shown["lag_bytes"] is None else f"{size(shown['lag_bytes'])} of WAL"
