"""Tables of which nothing is published until a person lets them go on, or until they are filtered again: why, for the
state, and as a problem."""

from __future__ import annotations

import time

from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.state.records import Gap

#: the kinds of the problems: of a table that a person has paused, of one with a record that cannot be published, and of
#: one of which rows are sent that its filter hides
PAUSED, SET_ASIDE, UNFILTERED = "paused", "set-aside", "unfiltered"


def paused(by: str, why: str, at: float) -> Gap:
    """The record of a table that a person has paused.

    :param by: who; ``why`` is the reason that was given. Both may be empty.
    :param at: seconds since 1970.
    """
    on = time.strftime("%Y-%m-%d at %H:%M UTC", time.gmtime(at))
    said = f"was paused{f' by {by}' if by else ''} on {on}{f' ({why})' if why else ''}"
    return Gap(said, held=True, paused=True, at=at)


def set_aside(what: str, why: str) -> Gap:
    """The record of a table that is set aside because of a record.

    :param what: the record, with its article; ``why`` is the reason why it cannot be published.
    """
    return Gap(f"has {what} that cannot be published ({why.rstrip('.')})", held=True, at=time.time())


def unfiltered() -> Gap:
    """The record of a table of which rows are sent that its filter hides."""
    return Gap("was published without its row filter", unfiltered=True, at=time.time())


def goes_on(gap: Gap, name: str) -> str:
    """What lets a table go on: a sentence whose end says what comes then.

    :param name: the table's.
    """
    if gap.held:
        return f"Let it go on (bottledwater resume-table --tables {name})"
    return "It goes on as soon as its publications filter it again ('bottledwater status' says which do not)"


def problem(gap: Gap, table: SourceTable, *, shared: bool) -> Problem:
    """That a table's topic gets none of its changes.

    :param shared: whether others write to the topic, too.
    """
    name = table.qualified
    remedy = f"{goes_on(gap, name)}: then its rows are read again, and the topic is brought to what it holds."
    if shared or not table.keyed:
        why = "Others write to its topic, too (share_topics)" if shared else "It has no key"
        remedy = (
            f"{why}, so that what was left out cannot be brought to its topic. Drop the slot (bottledwater "
            "drop-slot --when always) and start again with a snapshot under another topic_prefix; or leave the table "
            "out."
        )
    reason = f"It {gap.why}: its topic gets none of its changes."
    if gap.paused or not gap.held:
        return Problem(PAUSED if gap.paused else UNFILTERED, name, reason, remedy, gap.at)
    return Problem(SET_ASIDE, name, reason, f"Mend the cause. {remedy}", gap.at)
