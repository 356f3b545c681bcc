"""How a job is stopped, where Kafka's answer decides what is done."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.jobs import fence as provision
from airflow_bottledwater.jobs import leftovers, requests, stop, submitted
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import encode, status_key
from airflow_bottledwater.state.control_topic import ControlTopic
from tests.support.status import status_of

PIPELINE = Settings.of(postgres="host=db")


def test_a_stop_in_another_database_names_the_pipeline_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database was moved, and the server from which is gone: no stop reaches that pipeline."""
    monkeypatch.setattr("airflow_bottledwater.postgres.connect.session", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("airflow_bottledwater.postgres.server.identify", lambda _: Cluster("222", 1, "new", 170000))
    others = {status_key(each): encode(status_of(slot=each[-4:])) for each in ("111/old/shop", "111/old/else")}
    monkeypatch.setattr(control_topic, "read", lambda _: others)
    monkeypatch.setattr(control_topic, "write", lambda *_: None)
    with pytest.raises(StateError, match="'bottledwater drop-slot --forget-cluster 111/old/shop'") as raised:
        stop.stop_pipeline(PIPELINE.with_(slot="shop"), retire=False, timeout=1, say=print)
    assert "No job has ever reported for slot 'shop' of this database (222/new/shop)." in str(raised.value)
    assert "111/old/else" not in str(raised.value)


@pytest.mark.parametrize(("folder", "ended"), [("", False), ("/nowhere/else", True)])
def test_a_job_that_kafka_does_not_know_may_wait_in_its_cluster(
    monkeypatch: pytest.MonkeyPatch, folder: str, ended: bool
) -> None:
    """Kafka was away when it was announced. The request has to stay, and the application to be cancelled."""
    done: list[Any] = []
    monkeypatch.setattr(ControlTopic, "get", lambda topic, key: (None, 0.0))
    monkeypatch.setattr(requests, "stop_job", lambda kafka, job_id, replaced: done.append("asked"))
    monkeypatch.setattr(submitted, "report_end", lambda *_: done.append("reported"))
    monkeypatch.setattr(provision, "holds", lambda pipeline, claim: False)
    monkeypatch.setattr(provision, "fence", lambda pipeline, claim, why: "")
    monkeypatch.setattr(leftovers, "cancel", lambda *_: done.append("cancelled"))
    identity: Identity = {"id": "j", "host": "elsewhere", "folder": folder, "application": "app_1", "master": "yarn"}
    assert stop.stop(PIPELINE, identity, timeout=1) is ended
    assert done == (["asked"] if ended else ["asked", "cancelled", "reported"])
