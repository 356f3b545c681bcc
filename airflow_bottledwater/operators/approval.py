"""Operators that ask a person before they take something away: they say in numbers what will happen, and do it only if
that is approved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.exceptions import HITLRejectException
from airflow.providers.standard.operators.hitl import ApprovalOperator, HITLOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_bottledwater.operators.base import failing, true
from airflow_bottledwater.operators.control import PipelineControlOperator
from airflow_bottledwater.operators.slot import DropReplicationSlotOperator
from airflow_bottledwater.pipeline.argument import PipelineArgument

if TYPE_CHECKING:
    from airflow.sdk import Context


class AskingOperator(ApprovalOperator):
    """Airflow's ApprovalOperator for a task that itself does what is asked about, so that nothing else has to know of
    the answer: a teardown, for example, is not skipped with what is before it. If nothing is taken away, nobody is
    asked. A task that is rejected is skipped, unless ``fail_on_reject``; one that is tried again asks again.

    :param approve: False: it is done without asking, as a form may have it. (templated)
    """

    def __init__(self, *, approve: bool | str = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.approve = approve

    @abstractmethod
    def consequences(self) -> str:
        """What will happen, in numbers; empty if nothing is taken away."""

    if TYPE_CHECKING:

        def carry_out(self, context: Context) -> Any:
            """Do it: the operator that asks has this from the one that does not."""

    def execute(self, context: Context) -> Any:
        """Ask, or do it at once."""
        with failing():
            says = self.consequences() if true(self.approve) else ""
        if not says:
            return self.carry_out(context)
        self.body = says
        self.log.info("Asked for approval: %s", says)
        return super().execute(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Do it, if that is approved.

        :raises AirflowSkipException: it is rejected.
        :raises HITLRejectException: the same, with ``fail_on_reject``.
        """
        answer = HITLOperator.execute_complete(self, context, event)
        who = (answer["responded_by_user"] or {}).get("name") or "nobody in time"
        if answer["chosen_options"] != [self.APPROVE]:
            said = f"Rejected by {who}: nothing was done."
            raise HITLRejectException(said) if self.fail_on_reject else AirflowSkipException(said)
        self.log.info("Approved by %s.", who)
        return self.carry_out(context)


class DropReplicationSlotApprovalOperator(AskingOperator, DropReplicationSlotOperator):
    """:class:`~airflow_bottledwater.operators.slot.DropReplicationSlotOperator` that asks before it drops a slot; one
    that is kept needs no answer. It may be a teardown.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param when: ``retired`` (default), ``always`` or ``never``. (templated)
    :param approve: see :class:`AskingOperator`. (templated)
    :param subject: the question. (templated)
    """

    template_fields: Sequence[str] = (*DropReplicationSlotOperator.template_fields, "approve", "subject")

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        when: str = "retired",
        subject: str = "Drop the replication slot?",
        **kwargs: Any,
    ) -> None:
        super().__init__(pipeline=pipeline, when=when, subject=subject, **kwargs)

    def consequences(self) -> str:
        """What is lost with the slot; empty if it is kept."""
        from airflow_bottledwater.provision import consequences

        self._check_when()
        return consequences.of_drop(self.pipeline_hook.pipeline(), self.when)


class PipelineControlApprovalOperator(AskingOperator, PipelineControlOperator):
    """:class:`~airflow_bottledwater.operators.control.PipelineControlOperator` that asks before what takes something
    away: the slot, keys that a table does not have, dead letters, the keys that records have. Anything else is done at
    once.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param action: one of :data:`~airflow_bottledwater.operators.control.ACTIONS`. (templated)
    :param approve: see :class:`AskingOperator`. (templated)
    :param subject: the question. (templated)
    """

    template_fields: Sequence[str] = (*PipelineControlOperator.template_fields, "approve", "subject")

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        action: str = "stop",
        subject: str = "May this be done?",
        **kwargs: Any,
    ) -> None:
        super().__init__(pipeline=pipeline, action=action, subject=subject, **kwargs)

    def consequences(self) -> str:
        """What the action takes away; empty if nothing."""
        from airflow_bottledwater.provision import consequences

        pipeline = self.pipeline_hook.pipeline()
        return consequences.of_action(pipeline, self.action, self.tables, sweep=self.sweeps)
