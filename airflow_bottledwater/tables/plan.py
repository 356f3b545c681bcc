"""The plan: compares what is known of a pipeline's tables with what the catalog shows, and says for each table what is
to be done, or what is missing. It decides only; nothing here asks or changes anything.

A topic is found by the name that people see. So a topic belongs to the table that bears its name: a table that was
renamed keeps its topic only as long as no other table that is followed bears the name that it had. Then the topic
passes to that table, and the renamed one moves to the topic of its own name, or is not followed any more if the
settings do not name it now.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.connect import quoted
from airflow_bottledwater.postgres.partitions import Partition
from airflow_bottledwater.state import held
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.tables.look import CatalogLook

#: the kind of the problem of a table that is wanted and not followed, and of one whose topic lacks changes
NOT_FOLLOWED, NOT_COMPLETE = "not-followed", "not-complete"
#: that of a table whose rows are in tables that inherit from it, and that are not followed
ROWS_ELSEWHERE = "rows-elsewhere"
#: that of a table that could not be taken out of its publication yet, with which its UPDATE and DELETE fail
WRITES_FAIL = "writes-fail"

#: what can be done where a topic without keys cannot be brought to its table
_ANOTHER_TOPIC = (
    "Drop the slot (bottledwater drop-slot --when always) and start again with a snapshot under another topic_prefix. Or "
    "leave the table out of tables, and take it out of the publication, too (as its owner: ALTER PUBLICATION … DROP TABLE "
    "…): as long as that has it, it stays followed."
)


class Do(enum.Enum):
    """What is done about a table. The first three publish it and have its rows read, with a sweep where its topic may
    have others."""

    FOLLOW = "it is published from now on, and its rows are read"
    MOVE = "its topic is another one from now on, and its rows are read there"
    READ = "its rows are read again"
    STOP = "it is not followed any more"
    READ_PARTS = "the rows of partitions that were attached are read"
    BELOW = "its changes are those of another table from now on"
    APART = "it is a table of its own again, and its rows are read"
    NOTHING = "it cannot be followed as it is meant"


#: steps that pin a table: its definition, key and topic are recorded anew
PINNING = frozenset({Do.FOLLOW, Do.MOVE, Do.READ})


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done about one table, or what is missing.

    :param table: its name, for messages.
    :param topic: its topic from then on; empty if it has none then.
    :param why: the reason: the end of a sentence that begins with the table's name.
    :param remedy: where nothing can be done: what the reader can do, as a sentence.
    :param parts: what was attached and is to be read.
    :param root: as which its changes are sent from now on; empty if it is not below another table.
    :param known: whether the pipeline has followed it until now, so that what it has published so far must be behind
        the stream.
    :param held: that none of its changes is published until a person lets it go on; None if they are.
    """

    oid: int
    table: str
    topic: str
    why: str
    do: Do
    remedy: str = ""
    parts: tuple[Partition, ...] = ()
    root: str = ""
    known: bool = True
    held: Problem | None = None

    @property
    def problem(self) -> Problem:
        """As a problem, for the status."""
        if self.held is not None:
            return self.held
        kind = NOT_COMPLETE if self.known else NOT_FOLLOWED
        return Problem(kind, self.table, f"It {self.why}.".replace("..", "."), self.remedy)


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a table cannot be published or read as it is; ``why`` and ``remedy`` are those of :class:`Step`.

    :param lasts: whether it is not tried again before the stream starts again.
    """

    why: str
    remedy: str = ""
    lasts: bool = False


def plan(
    pipeline: Settings, known: PipelineState, seen: CatalogLook, unfit: Mapping[int, Unfit] | None = None
) -> list[Step]:
    """What is to be done about each table; nothing for those that are followed as they are meant.

    :param unfit: the tables that cannot be published or read, which :mod:`airflow_bottledwater.tables.checks` finds.
    """
    return list(_Planner(pipeline, known, seen, unfit or {}).steps())


class _Planner:
    def __init__(self, pipeline: Settings, known: PipelineState, seen: CatalogLook, unfit: Mapping[int, Unfit]) -> None:
        self._pipeline, self._known, self._seen = pipeline, known, seen
        self._unfit = {**{oid: _to_mend(said) for oid, said in seen.hindered.items()}, **unfit}
        self._tables = known.tables
        self._owners = {pinned.topic: pinned for pinned in self._tables.values()}
        # those that are to be followed, and those whose changes are sent as another one's
        self._followed = {oid for oid in seen.wanted if oid in self._tables or pipeline.new_tables == "add"}
        self._natural = {
            oid: TableMapping.of(pipeline).topic(seen.tables[oid]) for oid in self._followed if oid in seen.tables
        }
        self._bearers = dict(self._bearing())

    def _bearing(self) -> Iterator[tuple[str, int]]:
        """By topic, which table bears its name: of two with one topic the one that has it, or the older one."""
        natural = sorted(
            self._natural.items(),
            key=lambda item: (item[0] in self._tables and self._tables[item[0]].topic == item[1], -item[0]),
        )
        for oid, topic in natural:
            if oid in self._tables and self._tables[oid].topic == topic:
                yield topic, oid
            elif oid not in self._unfit:
                owner = self._owners.get(topic)
                if owner is None or _incomparable(owner, self._seen.tables[oid]) is None:
                    yield topic, oid

    def steps(self) -> Iterator[Step]:
        """See :func:`plan`."""
        for oid in sorted(self._natural):
            if oid in self._tables:
                yield from self._of_followed(oid)
            else:
                yield self._of_new(oid)
        for oid in sorted(self._tables.keys() - self._natural.keys()):
            yield from self._of_rest(oid)
        for oid, parts in self._seen.attached.items():
            if oid in self._known.held:
                continue  # all of its rows are read when it goes on
            table, topic = self._tables[oid].table.qualified, self._tables[oid].topic
            named = ", ".join(part.qualified for part in parts)
            why = f"has partitions whose rows were not sent: {named}"
            yield Step(oid, table, topic, why, Do.READ_PARTS, parts=tuple(parts))

    # ------------------------------------------------------------------ one table
    def _of_new(self, oid: int) -> Step:
        table, topic = self._seen.tables[oid], self._natural[oid]
        step = Step(oid, table.qualified, topic, "is wanted and was not followed", Do.FOLLOW, known=False)
        if oid in self._unfit:
            return self._nothing(step, self._unfit[oid])
        owner = self._owners.get(topic)
        if owner is not None and (unfit := _incomparable(owner, table)):
            return self._nothing(step, unfit)
        if self._bearers.get(topic) != oid:
            return self._nothing(step, self._same_topic(oid))
        if owner is None:
            return step
        return _because(step, f"bears the name of {owner.table.qualified}, whose topic it gets", known=True)

    def _of_followed(self, oid: int) -> Iterator[Step]:
        table, pinned = self._seen.tables[oid], self._tables[oid]
        topic = self._natural[oid]
        owner = self._owners.get(topic)
        contested = self._bearers.get(pinned.topic, oid) != oid
        kept = topic == pinned.topic or pinned.table.outbox
        if kept or not (contested or owner is not None or topic in self._known.former):
            yield from self._as_it_is(oid)
            return
        step = Step(oid, table.qualified, topic, "bears another name, whose topic it gets", Do.MOVE)
        unfit = self._unfit.get(oid) or _incomparable(owner or pinned, table)
        if unfit is None and self._bearers.get(topic) != oid:
            unfit = self._same_topic(oid)
        if unfit is None:
            yield step
        elif contested:
            # a topic never has the rows of two tables
            bearer = self._seen.tables[self._bearers[pinned.topic]].qualified
            yield _because(step, f"was renamed, and {bearer} bears its name: {unfit.why}", Do.STOP, unfit.remedy)
        else:
            yield self._nothing(step, unfit)

    def _of_rest(self, oid: int) -> Iterator[Step]:
        """A table that is followed although the settings do not name it, or that is dropped, or a partition of another
        one."""
        pinned = self._tables[oid]
        bearer = self._bearers.get(pinned.topic)
        if bearer is not None:
            name = self._seen.tables[bearer].qualified
            there = "was renamed" if oid in self._seen.tables else "was dropped"
            yield Step(oid, pinned.table.qualified, "", f"{there}, and {name} bears its name", Do.STOP)
        elif oid not in self._seen.tables:
            # what is in the topic of one without a key, or of one whose name is wanted, is told by the table that had it
            if pinned.table.keyed and pinned.topic not in self._natural.values():
                yield Step(oid, pinned.table.qualified, "", "was dropped", Do.STOP)
        elif (oid in self._seen.below) != (oid in self._known.below):
            yield self._moved(oid)
        elif oid not in self._seen.below:
            if not self._let_go(oid):
                yield from self._as_it_is(oid)
            elif self._pipeline.new_tables == "add" or not self._detached(oid):
                why = "is neither named by the settings nor published any more"
                yield Step(oid, pinned.table.qualified, "", why, Do.STOP)

    def _let_go(self, oid: int) -> bool:
        """Whether neither the settings nor its publication name a table any more, and nothing else keeps it from being
        published. One whose changes are not decoded can be left out as it is."""
        pinned, seen = self._tables[oid], self._seen
        if oid in {*seen.kept, *(seen.hindered.keys() - seen.undecoded)} or oid in seen.coverage.tables:
            return False
        lost_key = pinned.table.keyed and not seen.tables[oid].keyed
        return not lost_key and publication_of(self._pipeline, pinned) in seen.coverage.publications

    def _detached(self, oid: int) -> bool:
        """Whether a table that is not published any more was published as a partition only: when it is attached again,
        it is none of the new tables."""
        recorded = self._known.coverage
        return recorded is not None and recorded.by_parents(oid)

    def _as_it_is(self, oid: int) -> Iterator[Step]:
        """A table that keeps its topic: what it lacks."""
        table, pinned = self._seen.tables[oid], self._tables[oid]
        if oid in {*self._known.below, *self._seen.below}:
            if (oid in self._known.below) != (oid in self._seen.below):
                yield self._moved(oid)
            return
        step = Step(oid, table.qualified, pinned.topic, "", Do.READ)
        if (gap := self._known.gaps.get(oid)) is not None and gap.held:
            as_published = replace(table, key=pinned.table.key)
            problem = held.problem(gap, as_published, shared=self._pipeline.share_topics)
            yield replace(step, do=Do.NOTHING, held=problem)
            return
        why = self._lacks(oid)
        if pinned.table.keyed and not table.keyed:
            # with the replica identity NOTHING, inserts are sent as before
            still = table.identity == "n" and oid in self._seen.coverage.tables
            lost = Unfit(
                f"has no key any more ({table.key_problem}), so that its topic gets none of its "
                f"{'updates and deletes' if still else 'changes'}",
                "Give it its key again: then its rows are read, and the topic is brought to what it holds.",
            )
            yield self._nothing(step, lost)
        elif unfit := self._hindered(oid):
            yield self._nothing(step, unfit)
        elif why and not pinned.table.keyed and table.where != pinned.table.where:
            lost = Unfit(
                f"{why}, and without a key its topic cannot be brought to it",
                "Give it the filter of before; or drop the slot (bottledwater drop-slot --when always) and start again "
                "with a snapshot under another topic_prefix.",
            )
            yield self._nothing(step, lost)
        elif why and not pinned.table.keyed:
            lost = Unfit(
                f"{why}: what was committed meanwhile is not in its topic, and cannot be brought there without a key",
                _ANOTHER_TOPIC,
            )
            yield self._nothing(step, lost)
        elif table.keyed and not pinned.table.keyed:
            yield self._nothing(step, self._without_its_key(oid))
        elif (why := why or self._seen.altered.get(oid, "")) and oid in self._unfit:
            unfit = self._unfit[oid]
            yield self._nothing(step, Unfit(f"{why}, and cannot be read again: {unfit.why}", unfit.remedy))
        elif why:
            yield _because(step, why)

    def _lacks(self, oid: int) -> str:
        """Why a table's topic lacks changes; empty if it does not."""
        pinned = self._tables[oid]
        if oid not in self._seen.coverage.tables:
            return "is no longer published"
        if (gap := self._known.gaps.get(oid)) is not None:
            return gap.why
        recorded, where = self._known.coverage, self._seen.tables[oid].where
        if where != pinned.table.where:
            return f"has another row filter in table_options ({where or 'none'}) than before"
        if recorded is not None and (lost := recorded.lost(self._seen.coverage, oid)):
            return lost
        if recorded is not None and pinned.table.keyed and (why := recorded.rewritten(self._seen.coverage, oid)):
            # without a key it could not be mended, and would be told for ever also of a table that was always logged
            return why
        name, keyed = publication_of(self._pipeline, pinned), pinned.table.keyed
        if recorded is not None and (why := recorded.altered(self._seen.coverage, name, keyed=keyed)):
            return why
        try:
            if self._seen.tables[oid].keyed:
                pinned.check_key(self._seen.tables[oid])
        except Refused:
            return "has another key"
        return ""

    def _without_its_key(self, oid: int) -> Unfit:
        """What is said of a table that was taken in without a key, and has one now."""
        table, pinned = self._seen.tables[oid], self._tables[oid]
        lacking = "deletes" if pinned.table.identity == "f" else "updates and deletes"
        why = (
            f"was taken in without a key, and has one now ({', '.join(table.key)}): the records of topic "
            f"{pinned.topic!r} go on without keys, and its {lacking} are not sent"
        )
        if not self._pipeline.create_publication:
            return Unfit(why, _ANOTHER_TOPIC)
        first = publication.names(self._pipeline.publication_name)[:1] if oid in self._seen.members else ()
        run = " ".join(
            f"ALTER PUBLICATION {quoted(name)} DROP TABLE ONLY {quoted(table.schema, table.name)};"
            for name in dict.fromkeys((*first, publication_of(self._pipeline, pinned)))
        )
        return Unfit(
            why,
            f"To have it with its key, stop the stream, leave the table out ('!{table.qualified}' in tables), run: {run} "
            "and start the stream. When its log says that the table is not followed any more, stop it, delete the "
            "topic, name the table again, and start: then it is a new one, with all of its rows.",
        )

    def _hindered(self, oid: int) -> Unfit | None:
        """What somebody has to mend before the table can be published, or its rows read."""
        if oid in self._seen.hindered:
            return _to_mend(self._seen.hindered[oid])
        name, recorded = publication_of(self._pipeline, self._tables[oid]), self._known.coverage
        if recorded is None or not (lacking := recorded.lacking(self._seen.coverage, name)):
            return None
        return Unfit(
            f"is published without {', '.join(lacking)}: publication {name!r} was altered",
            f"Run: ALTER PUBLICATION {quoted(name)} SET (publish = '{recorded.publications[name].sends}'); then its rows "
            "are read again.",
        )

    def _moved(self, oid: int) -> Step:
        pinned = self._tables[oid]
        name, topic = pinned.table.qualified, pinned.topic
        if (root := self._seen.below.get(oid)) is not None:
            why = f"is a partition of {root} now: its changes are published as those of that table, and its own topic gets none"
            return Step(oid, name, topic, why, Do.BELOW, root=root)
        if not pinned.table.keyed:
            why = "was detached from another table: its topic lacks what was committed meanwhile, and cannot be brought to a table without a key"
            return Step(oid, name, topic, why, Do.BELOW)
        return Step(oid, name, topic, "was detached from another table", Do.APART)

    # ------------------------------------------------------------------ what is missing
    def _same_topic(self, oid: int) -> Unfit:
        other = self._seen.tables[self._bearers[self._natural[oid]]] if self._natural[oid] in self._bearers else None
        name = other.qualified if other else "another table"
        return Unfit(f"would have the same topic as {name}", "Rename one of them, or leave one out.")

    @staticmethod
    def _nothing(step: Step, unfit: Unfit) -> Step:
        return _because(step, unfit.why, Do.NOTHING, unfit.remedy)


def _to_mend(said: str) -> Unfit:
    what, _, remedy = said.partition(". ")
    return Unfit(f"cannot be followed as it is: {what}", remedy)


def _because(step: Step, why: str, do: Do | None = None, remedy: str = "", *, known: bool | None = None) -> Step:
    return replace(
        step,
        why=why,
        do=step.do if do is None else do,
        remedy=remedy,
        known=step.known if known is None else known,
    )


def _incomparable(owner: PinnedTable, table: SourceTable) -> Unfit | None:
    """Why a table cannot get the topic of another one: its records, or those that are there, have no keys. No record of
    an outbox is another one's newer version: so one can follow another."""
    if (table.keyed and owner.table.keyed) or (table.outbox and owner.table.outbox):
        return None
    who = "the table that had it before had no key" if table.keyed else table.key_problem or "it has no key"
    return Unfit(
        f"cannot get topic {owner.topic!r}, since {who}: what the topic has cannot be told from what the table has",
        f"{'Give the table a primary key, or rename it' if owner.table.keyed else 'Rename the table'}: then it gets "
        f"{'the topic, or ' if owner.table.keyed else ''}a topic of its own, if the settings name it so.",
    )


def publication_of(pipeline: Settings, pinned: PinnedTable) -> str:
    """The name of the publication that a table belongs to: see :func:`publication.split`."""
    return publication.names(pipeline.publication_name)[not pinned.table.identifiable]


def unfollowed(pipeline: Settings, known: PipelineState, seen: CatalogLook) -> list[str]:
    """The names of the tables that the settings name and that are not followed."""
    return sorted(seen.tables[oid].qualified for oid in seen.wanted if oid not in known.tables and oid in seen.tables)
