"""The findings of preflight."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.state.pipeline_state import PipelineState


@dataclass(slots=True)
class Findings:
    """What preflight has found, besides problems.

    :param tables: the tables of the pipeline.
    :param via_root: whether a partitioned table is published as one, instead of its leaf partitions.
    :param adding: the oids of the tables that are to be added to a running pipeline; empty for those that the settings
        name.
    :param left: the oids of those that the stream is to take in.
    :param parts: the leaf partitions of those that are published as one.
    :param warnings: things that do not prevent the pipeline from working, but that its user should know.
    :param notes: what can happen later, depending on what is written into the tables.
    :param adopts_topics: whether a person has said that what the topics hold is this pipeline's.
    :param state: the pipeline's saved state; empty if there is none.
    """

    cluster: Cluster
    tables: list[SourceTable] = field(default_factory=list)
    via_root: bool = False
    adding: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    parts: list[SourceTable] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    adopts_topics: bool = False
    state: PipelineState = field(default_factory=PipelineState)
