"""All state records of a slot at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from airflow_bottledwater.model.attached import AttachedTable
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.coverage import Coverage
from airflow_bottledwater.postgres.partitions import KnownPartition
from airflow_bottledwater.state import records
from airflow_bottledwater.state.pinned import PinnedTable

R = TypeVar("R")


@dataclass(slots=True)
class PipelineState:
    """All state records of a slot at one moment; each is decoded when it is first used.

    :param raw: the records as they are in the topic, by key.
    """

    raw: dict[str, dict[str, Any]] = field(default_factory=dict)
    _decoded: dict[str, records.StateRecord] = field(default_factory=dict, compare=False, repr=False)
    _by_table: dict[str, dict[int, Any]] = field(default_factory=dict, compare=False, repr=False)
    _letters: dict[str, records.Letters] | None = field(default=None, compare=False, repr=False)

    def copy(self) -> PipelineState:
        """Another one with the same records, to which others can be applied; what is decoded stays so."""
        return PipelineState(dict(self.raw), dict(self._decoded))

    def get(self, key: str, kind: type[R]) -> R | None:
        """One record, decoded; None if there is none.

        :raises StateError: see :func:`decode`.
        """
        if key not in self.raw:
            return None
        if key not in self._decoded:
            self._decoded[key] = records.decode(key, self.raw[key])
        found = self._decoded[key]
        assert isinstance(found, kind)
        return found

    def check(self) -> None:
        """Check that this version can read all records.

        :raises StateError: see :func:`decode`.
        """
        for key in self.raw:
            self.get(key, object)

    def apply(self, changes: Mapping[str, records.StateRecord | None]) -> None:
        """Apply records that were written to the topic; None removes a record."""
        for key, record in changes.items():
            self._by_table.pop(kind := key.partition("/")[0], None)
            if kind == records.LETTERS:
                self._letters = None
            self._decoded.pop(key, None)
            if record is None:
                self.raw.pop(key, None)
            else:
                self.raw[key], self._decoded[key] = records.encode(record), record

    def _of_tables(self, prefix: str, kind: type[R]) -> dict[int, R]:
        """The records of a kind by table oid."""
        if prefix not in self._by_table:
            self._by_table[prefix] = {
                int(key.partition("/")[2]): self.get(key, kind) for key in self.raw if key.startswith(f"{prefix}/")
            }
        return self._by_table[prefix]

    @property
    def claim(self) -> Job | None:
        """The last claim."""
        return self.get(records.CLAIM, Job)

    @property
    def ids(self) -> list[str]:
        """All transactional ids that were ever used for the slot."""
        found = self.get(records.IDS, records.Ids)
        return list(found.ids) if found else []

    @property
    def intent(self) -> records.Intent | None:
        """What a creation was about to make, if one was begun."""
        return self.get(records.INTENT, records.Intent)

    @property
    def settings(self) -> dict[str, Any] | None:
        """The settings of the last start that differ from the defaults, by name; None if there was none."""
        found = self.get(records.SAVED_SETTINGS, records.SavedSettings)
        return None if found is None else found.values

    @property
    def hash_key(self) -> str:
        """The id of the key of masks that are hashes, at the last start; empty for none."""
        found = self.get(records.SAVED_SETTINGS, records.SavedSettings)
        return "" if found is None else found.hash_key

    @property
    def slot(self) -> SlotRecord | None:
        """The slot as recorded."""
        return self.get(records.SLOT, SlotRecord)

    @property
    def system_identifier(self) -> str:
        """The system identifier of the cluster whose state this is; empty if nothing was created yet."""
        found = self.slot or self.intent
        return found.system_identifier if found else ""

    @property
    def complete(self) -> bool:
        """Whether the snapshot's completion is recorded (or it was skipped on purpose) for every table."""
        return self.get(records.COMPLETE, records.Complete) is not None and set(self.tables) <= set(self.completed)

    @property
    def completed(self) -> list[int]:
        """The oids of the tables whose snapshot is complete."""
        found = self.get(records.COMPLETE, records.Complete)
        return list(found.tables) if found else []

    @property
    def tables(self) -> dict[int, PinnedTable]:
        """The pipeline's tables by oid."""
        return self._of_tables("table", PinnedTable)

    @property
    def boundaries(self) -> dict[int, Boundary]:
        """The boundaries by table oid."""
        return self._of_tables("boundary", Boundary)

    @property
    def shown(self) -> int:
        """The highest L of a snapshot of which something is published, so that the server's WAL was on disk up to
        there; 0 if there is none."""
        read = {int(key.split("/")[1]) for key in self.raw if key.startswith("progress/")}
        of = (boundary for oid, boundary in self.boundaries.items() if not read.isdisjoint(self.parts(oid)))
        return max((boundary.insert_lsn for boundary in of), default=0)

    @property
    def partitions(self) -> dict[int, dict[int, KnownPartition]]:
        """The partitions that are known, by the oid of the table that is published as one."""
        return {oid: found.known for oid, found in self._of_tables("partitions", records.Partitions).items()}

    @property
    def gaps(self) -> dict[int, records.Gap]:
        """The tables of which changes were left out, by oid."""
        return self._of_tables("gap", records.Gap)

    @property
    def types(self) -> dict[int, records.ChangedTypes]:
        """What the types of columns consist of, for the tables of which that has changed since they were recorded."""
        return self._of_tables("types", records.ChangedTypes)

    def published_types(self, oid: int) -> dict[str, records.StateRecord | None]:
        """The record with which a table's types stay known as the published rows have them, when another definition of
        the table is recorded: the stream then reads it again if names in them are others now."""
        types = self.types.get(oid) or records.ChangedTypes(self.tables[oid].table.columns)
        return {records.types_key(oid): types}

    @property
    def later(self) -> dict[int, dict[int, SourceTable]]:
        """By the table's oid, the definitions other than the pinned one with whose schemas there are rows in the topic,
        by the registry's ids, the newest last."""
        if "schema" not in self._by_table:
            found = self._by_table["schema"] = {}
            for key in self.raw:
                if key.startswith("schema/") and (record := self.get(key, records.LaterSchema)) is not None:
                    found.setdefault(record.table.oid, {})[record.number] = record.table
        return self._by_table["schema"]

    def versions(self, oid: int) -> list[Version]:
        """The relation versions of the rows in a table's topic; empty of a table that is not the pipeline's."""
        pinned = self.tables.get(oid)
        return [] if pinned is None else pinned.versions(self.later.get(oid, {}))

    @property
    def accepted(self) -> frozenset[int]:
        """The tables whose keys may become others: a person has accepted that."""
        return frozenset(oid for oid, gap in self.gaps.items() if gap.accepted)

    @property
    def held(self) -> frozenset[int]:
        """The tables of which no changes are published until a person lets them go on, or until they are filtered
        again."""
        return frozenset(oid for oid, gap in self.gaps.items() if gap.held or gap.unfiltered)

    @property
    def stopped(self) -> dict[int, SourceTable]:
        """The tables that are not followed any more, as they were recorded, by oid."""
        return {oid: found.table for oid, found in self._of_tables("stopped", records.Stopped).items()}

    @property
    def former(self) -> set[str]:
        """The topics that had rows of tables, and that no table has any more."""
        return {key.removeprefix(records.FORMER) for key in self.raw if key.startswith(records.FORMER)}

    def start(self, topic: str, topic_id: str) -> list[int] | None:
        """Per partition, the offset from which on a topic's records are this pipeline's, see
        :mod:`airflow_bottledwater.state.starts`; None if that is not known.

        :param topic_id: Kafka's id of the topic as it is now.
        """
        found = self.get(records.start_key(topic), records.StartOffsets)
        if found is None:
            return None
        return [each if found.topic_id == topic_id else 0 for each in found.offsets]

    @property
    def below(self) -> dict[int, AttachedTable]:
        """The tables that were attached below another one of the pipeline, by oid."""
        return self._of_tables("below", AttachedTable)

    def parts(self, oid: int) -> list[int]:
        """The oids by which plan and progress of a table are recorded: those of its partitions, if it is
        partitioned."""
        return list(self.partitions.get(oid, ())) or [oid]

    @property
    def coverage(self) -> Coverage | None:
        """How the publications covered the tables when these were added to the pipeline."""
        return self.get(records.COVERAGE, Coverage)

    def plan(self, oid: int) -> records.Plan | None:
        """A table's snapshot plan."""
        return self.get(records.plan_key(oid), records.Plan)

    def done(self, oid: int, chunk: int) -> records.Progress | None:
        """A range's progress record."""
        return self.get(records.progress_key(oid, chunk), records.Progress)

    def sweep(self, oid: int) -> records.Sweep | None:
        """The sweep that must follow a table's snapshot, if one must."""
        return self.get(records.sweep_key(oid), records.Sweep)

    def live(self, request_id: str) -> records.LiveProgress | None:
        """A live snapshot's progress."""
        return self.get(records.live_key(request_id), records.LiveProgress)

    @property
    def lives(self) -> dict[str, records.LiveProgress]:
        """The progress of all live snapshots that have a record, by their ids."""
        ids = [key.removeprefix(records.LIVE) for key in self.raw if key.startswith(records.LIVE)]
        return {each: progress for each in ids if (progress := self.live(each)) is not None}

    @property
    def progress(self) -> list[records.Progress]:
        """The progress records of all ranges that were begun."""
        found = (self.get(key, records.Progress) for key in self.raw if key.startswith("progress/"))
        return [each for each in found if each is not None]

    @property
    def reached(self) -> records.Reached | None:
        """P with its counters, if anything was ever streamed."""
        return self.get(records.POSITION, records.Reached)

    @property
    def position(self) -> Position | None:
        """P, if anything was ever streamed."""
        return self.reached.position if self.reached else None

    @property
    def resume_at(self) -> Position:
        """Where the stream goes on: P, or as long as nothing was streamed, the slot's consistent point. No change
        that was published is behind it, and none before it will be."""
        assert self.slot is not None, "the slot is recorded before anything is published"
        return self.position or Position(self.slot.consistent_point)

    @property
    def counters(self) -> dict[str, int]:
        """How many records of each kind the stream has published since the slot was created, and how many dead letters
        the stream and the snapshots have written."""
        streamed = {name: getattr(self.reached, name, 0) for name in ("published", "superseded", "events", "messages")}
        letters = self.letters.values()
        return {
            **streamed,
            "dead_letters": sum(each.written for each in letters),
            "open_dead_letters": sum(each.open for each in letters),
        }

    @property
    def letters(self) -> dict[str, records.Letters]:
        """The counts of dead letters by the keys of their records
        (:func:`~airflow_bottledwater.state.records.letters_key`)."""
        if self._letters is None:
            found = {key: self.get(key, records.Letters) for key in self.raw if key.startswith(f"{records.LETTERS}/")}
            self._letters = {key: each for key, each in found.items() if each is not None}
        return self._letters

    @property
    def open_letters(self) -> dict[str, dict[str, int]]:
        """How many dead letters are open, by the table's name as it is known now, and by what has written them:
        snapshot, stream or live."""
        found: dict[str, Counter[str]] = {}
        for key, each in self.letters.items():
            if each.open:
                oid, by = records.letters_of(key)
                pinned = self.tables.get(oid)
                table = pinned.table.qualified if pinned is not None else each.table
                found.setdefault(table, Counter())[by.partition("-")[0]] += each.open
        return {table: dict(found[table]) for table in sorted(found)}
