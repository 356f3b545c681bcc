"""The schema ids that a pipeline's records carry, compared with what the registry says of them: at each start of a job,
and regularly while a stream runs.

A registry can lose its schemas (it was emptied, its subjects were deleted for good, its URL leads to another one), and
goes on to accept new ones. Records with an id that it does not know, or that means another schema there, can be read by
nobody.

* A value's schema is registered again, and its new id is used from then on. The rows of its table that were published
  before carry the id that is lost: a live snapshot, recorded together with the new id, publishes them again.
* A key's id is a part of the key's bytes. With another one each key would be another key, in another partition: a
  deleted row would stay for ever. So it never changes by itself: unless the registry gives the same id again, manual
  intervention is required.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from airflow_bottledwater import backoff
from airflow_bottledwater.backoff import stoppable, threads
from airflow_bottledwater.encoding import meaning
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import DOCS, BottledWaterError, Outage, Refused, SchemasLost, beside
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.state.records import LaterSchema, LiveProgress, StateRecord, live_key, schema_key, table_key

T = TypeVar("T")

log = logging.getLogger(__name__)

#: seconds between two comparisons of a running stream, and between two questions of one: a registry has other users
_INTERVAL, _PAUSE = 60.0, 0.1
#: seconds after which what a registry does not know is asked for again: what one of its servers has registered, another
#: one knows a moment later
_AGAIN = (0.5, 1.5, 3.0, 5.0)
#: questions at the same time when a job starts
_AT_ONCE = 8
#: schemas of a running stream that are compared before anything is said of them
_AT_A_TIME = 20
#: the name of this part among the problems of a job
_PART = "schemas"


@dataclass(frozen=True, slots=True)
class PinnedSchema:
    """A schema whose id the records of a table carry.

    :param oid: the table's.
    :param number: the id.
    :param of_key: whether it is that of the keys.
    :param oldest_xid: that of the table's record. A table that is recorded anew, with new keys, may get the same ids
        for the same schemas from a registry that was emptied.
    """

    oid: int
    subject: str
    schema: str
    number: int
    of_key: bool
    oldest_xid: int


def pinned_schemas(
    pipeline: Settings,
    tables: Iterable[PinnedTable],
    later: Mapping[int, Mapping[int, SourceTable]] = MappingProxyType({}),
) -> list[PinnedSchema]:
    """The schemas of these tables as they were registered; none if the format needs no registry.

    :param later: see :attr:`~airflow_bottledwater.state.pipeline_state.PipelineState.later`.
    """
    found, mapping = [], TableMapping.of(pipeline)
    for pinned in tables:
        subjects = mapping.subjects(pinned.topic, pinned.table)
        numbers = (pinned.key_schema, pinned.value_schema)[2 - len(subjects) :]
        others = later.get(pinned.table.oid, {})
        for (subject, schema), number in zip(subjects, numbers, strict=True):
            # a later definition with the same id has all of its columns
            if (of_key := subject.endswith("-key")) or number not in others:
                found.append(PinnedSchema(pinned.table.oid, subject, schema, number, of_key, pinned.oldest_xid))
        for number, table in others.items():
            subject, schema = mapping.subjects(pinned.topic, table)[-1]
            found.append(PinnedSchema(table.oid, subject, schema, number, False, pinned.oldest_xid))
    return found


def _registry(pipeline: Settings) -> Registry:
    """The registry of a pipeline whose format needs one."""
    return Registry(pipeline.registry, pipeline.record_format.schema_type)


def register_value(pipeline: Settings, topic: str, table: SourceTable, known: Sequence[Version] = ()) -> int:
    """Register the schema of the rows in a table's topic. Returns its id; 0 if the format needs no registry, or the
    table is an outbox.

    :param known: the relation versions of the rows that the topic has.
    :raises Outage: the registry does not answer, or takes no schemas now.
    :raises SchemaRefused: it refuses the schema, none can be made, or :func:`check_published` refuses the table.
    """
    registry = Registry.of(pipeline)
    if registry is None or table.outbox:
        return 0
    check_published(registry, pipeline, topic, table, known)
    return registry.register(*TableMapping.of(pipeline).subjects(topic, table)[-1])


def check_published(
    registry: Registry, pipeline: Settings, topic: str, table: SourceTable, known: Sequence[Version]
) -> None:
    """Check that no reader of a topic takes the values of a table's rows for others. The registry compares the schemas
    that it still has, in which a date or time under ``temporal = plain`` is a number of anything; the state has the
    definitions of all rows that were published. A definition that rows were published with is compared with no other.

    :param known: the relation versions of the rows that the topic has.
    :raises Outage: the registry does not answer.
    :raises SchemaRefused: a reader would, and the subject's compatibility level is not ``NONE``.
    """
    mapping, same = TableMapping.of(pipeline), meaning.OF[registry.schema_type].same
    # a registry counts its ids, so that the highest one was registered last
    of_rows = sorted((each for each in known if not each.table.outbox), key=lambda each: each.value_schema)
    if table.outbox or not of_rows or any(table.columns == each.table.columns for each in of_rows):
        return
    made = mapping.meaning(topic, table)
    earlier = [(f"records with schema id {each.value_schema}", mapping.meaning(topic, each.table)) for each in of_rows]
    if not any(same(text, made) for _, text in earlier):
        registry.check_meaning(mapping.subjects(topic, table)[-1][0], made, earlier)


def later_schema(pipeline: Settings, version: Version, known: Iterable[Version]) -> LaterSchema | None:
    """The record of a definition with which rows are published; None if the state has it already.

    :param known: the relation versions of the rows that the topic has.
    """
    mapping, same = TableMapping.of(pipeline), meaning.OF[pipeline.record_format.schema_type].same
    table, of_id = version.table, [each.table for each in known if each.value_schema == version.value_schema]
    if any(table.columns == each.columns for each in of_id):
        return None
    made = mapping.meaning(version.topic, table)
    if any(same(mapping.meaning(version.topic, each), made) for each in of_id):
        return None
    return LaterSchema(united(table, of_id), version.value_schema)


def united(table: SourceTable, others: Iterable[SourceTable]) -> SourceTable:
    """A definition with the columns that only others with the same schema id have.

    Several definitions may have one id: the schemas of some formats keep the fields of dropped columns, and a date or
    time under ``temporal = plain`` is a number of anything. If the registry loses the schema, it is registered again
    with the columns of all of them.
    """
    fields = {column.field for column in table.columns}
    more = {column.field: column for each in others for column in each.columns if column.field not in fields}
    return replace(table, columns=(*table.columns, *more.values()))


def lost(
    registry: Registry, wanted: Iterable[PinnedSchema], pause: Callable[[], object] | None = None
) -> list[PinnedSchema]:
    """The schemas whose ids the registry does not know, or knows as others, also when it is asked again some seconds
    later.

    :param pause: called before each question; None to ask several at a time.
    :raises Outage: it does not answer.
    :raises Refused: it denies access.
    :raises StopRequested: the job is asked to stop.
    """
    missing = _unknown(registry, wanted, pause)
    for seconds in _AGAIN:
        if not missing:
            break
        backoff.pause(seconds)
        missing = _unknown(registry, missing, pause)
    return missing


def _unknown(
    registry: Registry, wanted: Iterable[PinnedSchema], pause: Callable[[], object] | None
) -> list[PinnedSchema]:
    """What :func:`lost` finds, by one question for each id."""
    wanted, same = list(wanted), meaning.OF[registry.schema_type].same
    numbers = sorted({each.number for each in wanted})
    if pause is None:
        with threads(_AT_ONCE, "schemas") as pool:
            known = dict(zip(numbers, pool.map(registry.schema, numbers), strict=True))
    else:
        known = {}
        for number in numbers:
            pause()
            known[number] = registry.schema(number)
    return [each for each in wanted if not same(known[each.number] or "", each.schema)]


def _deleted(registry: Registry, subjects: Sequence[str], pause: Callable[[], object]) -> Sequence[str]:
    """The subjects that the registry does not have, also when it is asked again some seconds later. The list of all
    need not name each one that its user may read, so each is asked for.

    :param pause: called before each question.
    :raises Outage: it does not answer.
    :raises Refused: it denies access.
    :raises StopRequested: the job is asked to stop.
    """
    for seconds in (0.0, *_AGAIN):
        if not subjects:
            break
        backoff.pause(seconds)
        asked, subjects = subjects, []
        for each in asked:
            pause()
            subjects += [] if registry.versions(each) else [each]
    return subjects


def wait_for(pipeline: Settings, pinned: PinnedTable) -> None:
    """Check that the registry has a table's schemas, if it can be asked, before rows are published that their ids are
    to replace.

    :raises Outage: it has lost one. The stream notices it, too, and begins anew.
    :raises StopRequested: the job is asked to stop.
    """
    try:
        missing = lost(_registry(pipeline), pinned_schemas(pipeline, [pinned]))
    except (Outage, Refused) as error:
        log.info("The ids of the schemas could not be compared with the registry: %s", error)
        return
    if missing:
        raise Outage(
            f"The registry has lost schema {missing[0].number} of subject {missing[0].subject}.",
            "The stream begins anew within a minute, and registers it again.",
        )


def key_problems(pipeline: Settings, tables: Iterable[PinnedTable]) -> list[str]:
    """What is wrong with the ids of these tables' keys, for a check that changes nothing. Those that the registry gives
    back when a job starts (:func:`settle`) are only told.

    :raises Outage: the registry does not answer.
    :raises Refused: it denies access.
    """
    registry, found = _registry(pipeline), list[PinnedSchema]()
    for each in lost(registry, pinned_schemas(pipeline, tables)):
        if each.of_key and registry.gives_back(each.subject, each.schema):
            log.warning(
                "The registry has lost schema %d of subject %s; a job that starts registers it again.",
                each.number, each.subject,
            )  # fmt: skip
        elif each.of_key:
            found.append(each)
    return [str(_keys_lost(registry, found, {}))] if found else []


@dataclass(frozen=True, slots=True)
class Settled:
    """What a registry that has lost schemas leaves behind.

    :param lost: the schemas that stay lost, those of tables that were dropped, or that are recorded anew with new keys.
        Another one may have the same id: a registry that was emptied begins to count again.
    :param deleted: the schemas that are known and whose subjects stay deleted: those of such tables, and those that the
        registry does not take again.
    :param problems: the topics with records that nobody can read any more, and that cannot be published again.
    """

    lost: frozenset[PinnedSchema] = frozenset()
    deleted: frozenset[PinnedSchema] = frozenset()
    problems: tuple[Problem, ...] = ()


def settle(pipeline: Settings, connection: Connection, claim: Claim) -> Settled:
    """Compare the ids in the state with the registry, register again what it has lost, and record it. If the registry
    cannot be asked, the job goes on with the ids that it has: the registry is not needed to publish with them.

    :raises Outage: the registry takes no schemas now, or does not give by its id what it has registered.
    :raises Refused: the id of a key is lost, or a schema is refused.
    :raises StopRequested: the job is asked to stop.
    """
    known, registry = claim.state.tables, Registry.of(pipeline)
    if registry is None or not known:
        return Settled()
    later = claim.state.later
    wanted = pinned_schemas(pipeline, known.values(), later)
    try:
        missing, subjects = lost(registry, wanted), registry.subjects()
    except (Outage, Refused) as error:
        log.warning("The ids of the schemas could not be compared with the registry: %s", error)
        return Settled()
    # with new keys that are accepted, a table is recorded anew
    checked = known.keys() - claim.state.accepted
    present = {table.oid: table for table in catalog.load(connection, list(checked), TableMapping.of(pipeline))}
    deleted = [each for each in wanted if each not in missing and each.subject not in subjects]
    back = {each.subject for each in deleted if each.oid in present and _register_deleted(registry, each)}
    left = frozenset(each for each in missing if each.oid not in present)
    missing = [each for each in missing if each.oid in present]
    _restore_keys(registry, [each for each in missing if each.of_key])
    gone = dict[int, list[PinnedSchema]]()
    for each in missing:
        if not each.of_key and not _restored(registry, each):
            gone.setdefault(each.oid, []).append(each)
    again = [_value_again(pipeline, some, known[oid], present[oid]) for oid, some in gone.items()]
    restored = [each for each in missing if each not in gone.get(each.oid, ())]
    _confirm(registry, [*restored, *pinned_schemas(pipeline, again)])
    if again:
        # the rows of a table with a key get the schema of today, whichever they have
        obsolete = {
            schema_key(oid, number): None
            for oid, some in gone.items()
            for number in later.get(oid, ())
            if known[oid].table.keyed or number in {each.number for each in some}
        }
        values: dict[str, StateRecord | None] = {table_key(pinned.table.oid): pinned for pinned in again}
        for pinned in again:
            values |= claim.state.published_types(pinned.table.oid)
        # all rows of a table that is held are read when it goes on
        goes_on = [pinned for pinned in again if pinned.table.oid not in claim.state.held]
        claim.write({**values, **_read_again(goes_on), **obsolete})
    problems = tuple(_unreadable(each, gone[each.table.oid]) for each in again if not each.table.keyed)
    for problem in problems:
        log.error("%s", problem)
    return Settled(left, frozenset(each for each in deleted if each.subject not in back), problems)


def _confirm(registry: Registry, again: Sequence[PinnedSchema]) -> None:
    """Check that the registry has by their ids, as readers ask for them, the schemas that were registered again.

    :raises Outage: it does not, and the stream would find them lost again and again.
    """
    if still := lost(registry, again):
        raise Outage(
            f"The schema registry at {registry.url} says that subject {still[0].subject!r} has its schema, with id "
            f"{still[0].number}, and does not give that schema to who asks for the id: nobody could read the records.",
            "Check that the URL leads to one registry, and not to several by turns, and that its servers follow their "
            f"leader. What it answers to GET /schemas/ids/{still[0].number} has to be that schema.",
        )


def _register_deleted(registry: Registry, each: PinnedSchema) -> bool:
    """Register a schema whose subject was deleted although its id is known: it was not deleted for good. Returns
    whether the registry takes it."""
    log.warning("Subject %s was deleted from the registry; it is registered again.", each.subject)
    try:
        registry.register(each.subject, each.schema)
    except (Outage, Refused) as error:
        log.warning("Readers find the schema by its id only: %s", error)
        return False
    return True


def _restored(registry: Registry, each: PinnedSchema) -> bool:
    """Register a schema again if the registry gives it the id that it had; returns whether it has it now.

    :raises Outage: the registry takes no schemas now.
    """
    if registry.restore(each.subject, each.schema, each.number) != each.number:
        return False
    log.warning("The registry had lost schema %d of subject %s; it has it again.", each.number, each.subject)
    return True


def _value_again(
    pipeline: Settings, gone: Sequence[PinnedSchema], pinned: PinnedTable, today: SourceTable
) -> PinnedTable:
    """The table with the schema of today registered: an earlier one need not be compatible with it.

    :param gone: the schemas of its rows that the registry has lost.
    :raises Outage: the registry takes no schemas now.
    :raises Refused: it refuses the schema, or the table's key changed.
    """
    table = pinned.check_key(today)
    number = register_value(pipeline, pinned.topic, table)
    log.warning(
        "The registry has lost schema %s of subject %s; that of now has id %d.",
        _numbers(gone), gone[0].subject, number,
    )  # fmt: skip
    return replace(pinned, table=table, value_schema=number)


def _numbers(gone: Sequence[PinnedSchema]) -> str:
    return ", ".join(str(each.number) for each in gone)


def _read_again(tables: Sequence[PinnedTable]) -> dict[str, StateRecord]:
    """The record of the live snapshot that publishes these tables' rows with ids that are known."""
    keyed = tuple(pinned.table.oid for pinned in tables if pinned.table.keyed)
    return {live_key(uuid.uuid4().hex[:12]): LiveProgress(keyed, required=True)} if keyed else {}


def _unreadable(now: PinnedTable, gone: Sequence[PinnedSchema]) -> Problem:
    """What is said of a topic of a table without a key whose schema is lost."""
    return Problem(
        "schemas-lost",
        f"topic {now.topic}",
        f"The registry has lost schema {_numbers(gone)}: nobody can read the records that carry it, and "
        f"{now.table.qualified} has no key, so that its rows cannot be published again.",
        "Restore the registry from its backup; records from now on carry a schema that it knows.",
    )


def _restore_keys(registry: Registry, keys: Sequence[PinnedSchema]) -> None:
    """Register the schemas of keys again if the registry gives them the ids that they had. Otherwise nothing is
    registered: a person can then still restore the registry.

    :raises Refused: one has got another id, or would get one.
    """
    got = {each.subject: registry.restore(each.subject, each.schema, each.number) for each in keys}
    if others := [each for each in keys if got[each.subject] != each.number]:
        raise _keys_lost(registry, others, got)


def _keys_lost(registry: Registry, keys: Sequence[PinnedSchema], got: Mapping[str, int | None]) -> Refused:
    named = [
        f"{each.number} of subject {each.subject!r}"
        + (f" (registered again, it has id {number})" if (number := got.get(each.subject)) else "")
        for each in keys[:5]
    ]
    more = f", and {len(keys) - 5} more" if len(keys) > 5 else ""
    return Refused(
        f"The schema registry at {registry.url} has lost schema ids that keys in topics carry, or they mean other "
        f"schemas there: {', '.join(named)}{more}. With other ids the same rows would have other keys: deleted rows "
        "would stay for ever.",
        "Check that the URL leads to the registry that the pipeline was made with, or restore that one with its ids "
        "(from its backup; in its mode IMPORT the schemas are registered with these ids when the job starts). If they "
        "are lost for good, accept the ids of today while no job runs: bottledwater accept-new-keys "
        f"--tables … . See {DOCS}operations.html#a-registry-that-lost-its-schemas.",
    )


class SchemaWatch:
    """Compares ids and subjects regularly while a stream runs, in a thread of its own; the first time at once.

    :param known: the pipeline's state, as the stream began.
    :param problems: is told when the registry cannot be asked.
    :param left: what stayed lost when the stream began.
    :param interval: seconds between two comparisons.
    """

    def __init__(
        self,
        pipeline: Settings,
        known: PipelineState,
        problems: Problems,
        left: Settled = Settled(),
        *,
        interval: float | None = None,
    ) -> None:
        self._pipeline, self._left, self._later = pipeline, left, known.later
        self._wanted = self._of(known)
        self._problems, self._interval = problems, _INTERVAL if interval is None else interval
        #: what the registry has lost
        self._found = ""
        self._ended = threading.Event()
        if self._wanted:
            self._registry = _registry(pipeline)
            threading.Thread(target=self._run, name="schema watch", daemon=True).start()

    def _of(self, known: PipelineState) -> list[PinnedSchema]:
        wanted = pinned_schemas(self._pipeline, known.tables.values(), known.later)
        return [each for each in wanted if each not in self._left.lost]

    def check(self, known: PipelineState) -> None:
        """Raise what the thread has found, and let it compare what is used by now, too.

        :param known: the pipeline's state, with the tables as the stream began.
        :raises SchemasLost: the registry has lost ids or subjects: the stream is to begin anew, which settles it.
        """
        if known.later is not self._later:
            self._later, self._wanted = known.later, self._of(known)
        if self._found:
            raise SchemasLost(self._found)

    def close(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._ended.set()

    def _run(self) -> None:
        with stoppable(self._ended):
            while not self._ended.is_set():
                problems = []
                try:
                    self._found = self._lost()
                except BottledWaterError as error:
                    what = f"It cannot be asked whether it still has the schemas of the records: {error.what}"
                    where = f"schema registry {self._registry.url}"
                    problems = [Problem("schemas-unchecked", where, what, beside(error))]
                if not self._ended.is_set():
                    self._problems.tell(_PART, problems)
                self._ended.wait(self._interval)

    def _lost(self) -> str:
        """What the registry has lost; empty for nothing. The first schemas that are lost are enough: those of all
        tables would be asked for several times before a registry that was emptied is noticed."""

        def pause() -> None:
            backoff.pause(_PAUSE)

        for part in _parts(self._wanted):
            if missing := lost(self._registry, part, pause):
                shown = ", ".join(f"{each.number} ({each.subject})" for each in missing[:5])
                return f"The registry does not know these schema ids any more, or as others: {shown}."
        wanted = {each.subject for each in self._wanted if each not in self._left.deleted}
        for names in _parts(sorted(wanted - self._registry.subjects())):
            if deleted := _deleted(self._registry, names, pause):
                return f"These subjects were deleted from the registry: {', '.join(deleted[:5])}."
        return ""


def _parts(of: Sequence[T]) -> Iterator[Sequence[T]]:
    return (of[first : first + _AT_A_TIME] for first in range(0, len(of), _AT_A_TIME))
