"""Tasks of this Airflow are told from those of another one with the same ids."""

from __future__ import annotations

import pytest

from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.hooks.instance import instance
from airflow_bottledwater.hooks.tasks import Fate
from airflow_bottledwater.model.job import Owner

NAMED, BASE = "AIRFLOW__BOTTLEDWATER__AIRFLOW_ID", "AIRFLOW__API__BASE_URL"


@pytest.mark.parametrize(
    ("of", "settings", "fate"),
    [
        ("", {}, Fate.ENDED),
        ("https://a", {}, Fate.ENDED),
        ("", {BASE: "https://a"}, Fate.ENDED),
        ("https://a", {BASE: "https://a/"}, Fate.ENDED),
        ("https://b", {BASE: "https://a"}, Fate.FOREIGN),
        ("https://a", {BASE: "https://a", NAMED: "production"}, Fate.FOREIGN),
        ("production", {BASE: "https://a", NAMED: "production"}, Fate.ENDED),
    ],
)
def test_what_became_of_a_task_is_known_in_its_own_airflow(
    monkeypatch: pytest.MonkeyPatch, of: str, settings: dict[str, str], fate: Fate
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tasks, "states_now", lambda *_: {"failed"})
    owner = Owner("d", "r", "stream", -1, "h", "", "s", of)
    assert tasks.owners_fate(owner) is fate
    assert of in str(owner)


def test_without_a_setting_an_airflow_has_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert instance() == ""
    monkeypatch.setenv(BASE, "https://a.example/team/")
    assert instance() == "https://a.example/team"
