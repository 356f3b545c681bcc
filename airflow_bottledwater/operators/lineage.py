"""What tasks tell OpenLineage: which tables go to which topics, column by column, how many rows were published, and
what a verification has found.

Airflow's OpenLineage provider asks operators for it, if it is installed and configured
(``get_openlineage_facets_on_start``, ``…_on_complete``: airflow/providers/openlineage/extractors/base.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.lineage.datasets import TableDatasets
from airflow_bottledwater.lineage.job import PARENT
from airflow_bottledwater.pipeline.settings import Settings

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset

    from airflow_bottledwater.model.relation import SourceTable
    from airflow_bottledwater.state.verification import Verification

log = logging.getLogger(__name__)


def parent_of_job(ti: Any) -> dict[str, str]:
    """The variable by which a job tells OpenLineage that it belongs to a task; nothing if the provider is not there, or
    not configured.

    :param ti: the task's instance.
    """
    try:
        from airflow.providers.openlineage.conf import is_disabled
        from airflow.providers.openlineage.plugins.macros import lineage_parent_id
    except ImportError:
        return {}
    return {} if is_disabled() else {PARENT: lineage_parent_id(ti)}


class LineageMixin:
    """Tells OpenLineage the tables and topics of a task's pipeline.

    :ivar published: rows by topic, once they are counted.
    :ivar verified: what a verification has found.
    """

    published: Mapping[str, int] | None = None
    verified: Verification | None = None
    _kept: OperatorLineage | None = None

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """The pipeline's tables and topics when the task begins. A stream has no other end than being stopped, so this
        is what is known of it while it runs."""
        return self._lineage()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        """The same when the task has ended, with what was counted or compared; see :meth:`keep_lineage`."""
        return self._kept

    def keep_lineage(self) -> None:
        """Read what the provider will ask for at the task's end. The provider asks in a process that it forks off the
        task's, where nothing of Kafka's client works any more that the task has used. An error is only logged."""
        try:
            from airflow.providers.openlineage.conf import is_disabled
        except ImportError:
            return
        if is_disabled():
            return
        try:
            self._kept = self._lineage()
        except BottledWaterError as error:
            log.warning("OpenLineage is not told the tables and topics of the task: %s", error)

    def publishes(self, table: SourceTable) -> bool:
        """Whether the task publishes rows of a table of its pipeline, as far as it is known."""
        return True

    def _lineage(self) -> OperatorLineage:
        """
        :raises BottledWaterError: source or Kafka does not answer; the provider logs it, and the task goes on.
        """
        from airflow.providers.openlineage.extractors import OperatorLineage

        from airflow_bottledwater.jobs import status

        task: Any = self
        pipeline: Settings = task.pipeline_hook.pipeline()
        known = status.known(pipeline)
        inputs: list[Dataset] = []
        outputs: list[Dataset] = []
        for pinned in sorted(known.tables.values(), key=lambda each: each.table.qualified):
            if not self.publishes(pinned.table):
                continue
            names = TableDatasets(pipeline, pinned)
            if self.verified is None:
                inputs.append(names.source())
                outputs.append(names.target((self.published or {}).get(pinned.topic)))
            else:
                found = next((each for each in self.verified.tables if each.topic == pinned.topic), None)
                inputs += [names.source(), names.compared(found)]
        return OperatorLineage(inputs=inputs, outputs=outputs)
