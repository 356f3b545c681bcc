"""Streams that look at the catalog more often than they do otherwise."""

from __future__ import annotations

import pytest

from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.stream import engine
from airflow_bottledwater.tables import watch
from tests.support.topics import Flow


def look_often(patch: pytest.MonkeyPatch, *, interval: float = 10.0, lasts: float = 0.2) -> None:
    """Let streams ask ten times a second whether the catalog has changed.

    :param interval: seconds between two looks at a catalog that has not changed.
    :param lasts: seconds for which a reason has to last.
    """
    patch.setattr(watch, "INTERVAL", interval)
    patch.setattr(watch, "QUESTION", 0.1)
    patch.setattr(watch, "LASTS", lasts)
    patch.setattr(watch, "KEYLESS", lasts)
    patch.setattr(watch, "AGAIN", 1.0)


def problems(flow: Flow) -> dict[str, Problem]:
    """What the pipeline's job tells, by its subject."""
    return {each.subject: each for each in job.problems} if (job := flow.job) else {}


def dies_before_it_reads(flow: Flow) -> None:
    """A run that dies when tables or partitions are taken in, before their rows are asked for."""

    def die(_: object, __: object, known: PipelineState) -> None:
        if known.lives:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.snapshots, "ask_for_recorded", die)
        flow.stream()
