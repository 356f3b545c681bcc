"""The links at tasks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.operators import links
from airflow_bottledwater.operators.links import PipelineLink, SparkLink, TopicLink
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.description import Description, Kafka, Source
from airflow_bottledwater.provision import live
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor

TI: Any = None


def task(*tables: str, **kafka: Any) -> StreamToKafkaOperator:
    shop = Description("shop", source=Source(tables=tables), kafka=Kafka("kafka_default", **kafka))
    return StreamToKafkaOperator(task_id="stream", pipeline=shop)


@pytest.mark.usefixtures("connections")
def test_the_page_is_that_of_the_pipeline_or_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.com/a/")
    monkeypatch.setattr(live, "name_of", lambda _: "74/shop/shop")
    page = "https://airflow.example.com/a/plugin/bottledwater?kafka=kafka_default"
    assert PipelineLink().get_link(task("orders"), ti_key=TI) == f"{page}&name=74%2Fshop%2Fshop"

    def away(_: Any) -> str:
        raise Outage("The source does not answer.")

    monkeypatch.setattr(live, "name_of", away)
    assert PipelineLink().get_link(task("orders"), ti_key=TI) == page


def test_the_topic_is_the_tables_or_what_all_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__BOTTLEDWATER__TOPIC_URL", "https://c/{topic}/messages")

    def link(*tables: str) -> str:
        return TopicLink().get_link(task(*tables, topic_prefix="shop"), ti_key=TI)

    assert link("orders") == "https://c/shop.orders/messages"
    assert link("sales.orders") == "https://c/shop.sales.orders/messages"
    assert link("orders", "items") == link("o*") == "https://c/shop/messages"


def test_the_application_is_there_if_its_id_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__BOTTLEDWATER__SPARK_URL", "https://h/history/{application}")
    operator = task("orders")
    assert SparkLink().get_link(operator, ti_key=TI) == "https://h/history/"
    operator._identity = {"id": "j", "folder": "", "host": "h", "application": "application_1_2", "master": "yarn"}
    assert SparkLink().get_link(operator, ti_key=TI) == "https://h/history/application_1_2"


def test_each_task_has_those_whose_settings_are_there() -> None:
    assert [type(each) for each in task().operator_extra_links] == [PipelineLink]
    for made in (
        CreateReplicationSlotOperator(task_id="t", pipeline="shop"),
        ReplicationSlotLagSensor(task_id="t", pipeline="shop"),
    ):
        assert [type(each) for each in made.operator_extra_links] == [PipelineLink]
    code = (
        "import json; from airflow_bottledwater import StreamToKafkaOperator as S, StreamErrorSensor as E;"
        "print(json.dumps([[l.name for l in of.operator_extra_links] for of in (S, E)]))"
    )
    settings = {
        "AIRFLOW__BOTTLEDWATER__TOPIC_URL": "https://c/{topic}",
        "AIRFLOW__BOTTLEDWATER__SPARK_URL": "https://h",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [["Pipeline", "Topic", "Spark"], ["Pipeline", "Topic"]]


def test_airflow_knows_the_classes() -> None:
    from airflow_bottledwater.get_provider_info import get_provider_info

    for path in get_provider_info()["extra-links"]:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) in vars(links).values()
