"""The settings of a pipeline's last start, compared with those of now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.saved import check_started


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ({"a": {"where": "x > 0"}}, True),
        # what is no matter of its rows, a default, another pattern for the same, and what another table will have
        ({"a": {"where": "x > 0", "on_error": "log", "topic_config": {"a": "b"}, "exclude": []}}, True),
        ({"public.a": {"where": "x > 0"}}, True),
        ({"a": {"where": "x > 0"}, "b": {"exclude": ["y"]}}, True),
        ({"a": {"where": "x > 1"}}, False),
        ({"a": {"where": "x > 0", "new_columns": "leave_out"}}, False),
        ({"a": {"where": "x > 0"}, "*": {"mask": {"y": "null"}}}, False),
        ({}, False),
    ],
)
def test_topics_have_what_the_options_say_that_the_stream_has_started_with(options: Any, alike: bool) -> None:
    started = Settings.of(postgres="host=db", format="json", table_options={"a": {"where": "x > 0"}})
    table = SimpleNamespace(table=SimpleNamespace(schema="public", name="a"))
    known = cast("Any", SimpleNamespace(settings=started.chosen(), tables={1: table}))
    now = started.with_(table_options=options)
    if alike:
        check_started(now, known)
    else:
        with pytest.raises(Refused, match=r"not started with table_options"):
            check_started(now, known)
