"""How a job is stopped, where Kafka's answer decides what is done."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.jobs import fence as provision
from airflow_bottledwater.jobs import leftovers, requests, stop, submitted
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_topic import ControlTopic

PIPELINE = Settings.of(postgres="host=db")


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
