"""What preflight has found."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.state.pipeline_state import PipelineState


@dataclass(slots=True)
class Findings:
    """What preflight saw.

    :param tables: the tables of the pipeline.
    :param warnings: what works, but should be known.
    """

    cluster: Cluster
    tables: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    state: PipelineState = field(default_factory=PipelineState)
