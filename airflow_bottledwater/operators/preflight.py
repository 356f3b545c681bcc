"""Check everything before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PipelineMixin, failing, take_pipeline_arguments

if TYPE_CHECKING:
    from airflow.sdk import Context


class ReplicationPreflightOperator(PipelineMixin, BaseOperator):
    """Check source, broker and schema registry; change nothing, and name every problem at once.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin`.
    """

    template_fields: Sequence[str] = PIPELINE_FIELDS
    ui_color = "#e8f4fd"

    def __init__(self, **kwargs: Any) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        super().__init__(**kwargs)
        self._set_pipeline(**pipeline)

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks; returns the tables and the warnings."""
        from airflow_bottledwater.flow import preflight

        with failing():
            found = preflight.run(self.pipeline_hook.pipeline())
        for table in found.tables:
            self.log.info(
                "%s: %d columns, key (%s)", table.qualified, len(table.columns), ", ".join(table.key) or "none"
            )
        return {"tables": [t.qualified for t in found.tables], "warnings": found.warnings}
