"""What the state topic of a slot says, as typed values.

Keys: ``claim``, ``ids``, ``intent``, ``slot``, ``coverage``, ``complete``, ``position``; and by table oid ``table/…``, ``boundary/…``,
``plan/…``, ``progress/…/<range>``, ``sweep/…``.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from airflow_bottledwater.encoding import types
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.coverage import Coverage
from airflow_bottledwater.state.store import Facts

CLAIM, IDS, INTENT, SLOT, COMPLETE, POSITION = "claim", "ids", "intent", "slot", "complete", "position"
COVERAGE = "coverage"


def table_key(oid: int) -> str:
    """The key of a table's pinned definition."""
    return f"table/{oid}"


def boundary_key(oid: int) -> str:
    """The key of a table's boundary."""
    return f"boundary/{oid}"


def plan_key(oid: int) -> str:
    """The key of a table's snapshot plan."""
    return f"plan/{oid}"


def progress_key(oid: int, part: int) -> str:
    """The key of one range's progress."""
    return f"progress/{oid}/{part}"


def sweep_key(oid: int) -> str:
    """The key of the sweep that follows a table's snapshot onto a topic that was not empty."""
    return f"sweep/{oid}"


@dataclass(frozen=True, slots=True)
class Job:
    """Who works on a slot: written as the claim, compared at every initialisation.

    :param epoch: one more than the claim before; with ``id`` it is unique even if two jobs read the same claim.
    """

    epoch: int
    id: str
    kind: str
    host: str
    pid: int
    started: float

    @classmethod
    def next(cls, previous: dict[str, Any] | None, kind: str) -> Job:
        """A new job after the one that the state names."""
        epoch = (previous or {}).get("epoch", 0) + 1
        return cls(epoch, uuid.uuid4().hex, kind, socket.gethostname(), os.getpid(), time.time())

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind} job {self.id[:8]} (epoch {self.epoch}, process {self.pid} on {self.host})"


def _key_types(table: Table) -> list[object]:
    kinds = {c.name: c.type for c in table.columns}
    return [(t.oid, t.typmod, t.form, types.mapping(t).avro(t)) for t in (kinds[name] for name in table.key)]


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A table of the pipeline with what must not change by itself.

    :param oldest_xid: X0 of the table: taken after the publication had it.
    :param topic_id: Kafka's id of the topic; another one means that it was made anew.
    """

    table: Table
    topic: str
    topic_id: str
    partitions: int
    key_schema: int
    value_schema: int
    oldest_xid: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**{k: getattr(self, k) for k in self.__slots__ if k != "table"}, "table": self.table.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PinnedTable:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "table": Table.from_json(data["table"])})

    def check_key(self, table: Table, *, written: bool = False) -> None:
        """Whether the table's keys are still those that are in its topic.

        :param written: the stream has changes that were written under the key of this table.
        :raises Refused: they are not.
        """
        gone = [name for name in table.key if name not in {c.name for c in table.columns}]
        if not gone and table.key == self.table.key and _key_types(table) == _key_types(self.table):
            return
        what = f"from ({', '.join(self.table.key)}) to ({', '.join(table.key) or 'none'})"
        if gone:
            what = f"({', '.join(self.table.key)}: column {gone[0]!r} was dropped or renamed)"
        elif table.key == self.table.key:
            what = f"({', '.join(table.key)}: the type of a column, or the form that the settings choose for it)"
        raise Refused(
            f"The key of {table.qualified} changed {what}: the keys in its topic no longer mean the same.",
            ("Drop" if written else "Undo the change, or drop")
            + " the slot and start again with a snapshot under another topic prefix.",
        )

    @property
    def version(self) -> Version:
        """For batches."""
        return Version(self.table, self.topic, self.key_schema, self.value_schema)


class Pin(NamedTuple):
    """What must not change by itself of a data topic, compared wherever a producer is made.

    :param id: Kafka's id of the topic; another one means that it was deleted and made anew.
    :param partitions: another number would send the same key to another partition.
    :param keyed: whether its records have keys; a compacted topic takes no others.
    """

    id: str
    partitions: int
    keyed: bool


def pins(tables: Iterable[PinnedTable]) -> dict[str, Pin]:
    """The topics of these tables, by name, as they were pinned."""
    return {t.topic: Pin(t.topic_id, t.partitions, t.table.keyed) for t in tables}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one table is read.

    :param definition: of the table when the plan was made (:func:`airflow_bottledwater.postgres.catalog.definition`).
    :param ranges: [from block, to block, lane].
    """

    filenode: int
    definition: str
    ranges: tuple[tuple[int, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`."""
        return cls(data["filenode"], data["definition"], tuple((a, b, lane) for a, b, lane in data["ranges"]))


@dataclass(slots=True)
class PipelineState:
    """All facts of a slot at one moment."""

    facts: Facts = field(default_factory=dict)

    @property
    def claim(self) -> dict[str, Any] | None:
        """The last claim."""
        return self.facts.get(CLAIM)

    @property
    def ids(self) -> list[str]:
        """The transactional ids that were ever used."""
        return list(self.facts.get(IDS, {}).get("ids", []))

    @property
    def slot(self) -> SlotRecord | None:
        """The slot as recorded."""
        found = self.facts.get(SLOT)
        return SlotRecord(**found) if found else None

    @property
    def system_identifier(self) -> str:
        """Of the cluster whose state this is; empty where nothing was made yet."""
        found = self.facts.get(SLOT) or self.facts.get(INTENT) or {}
        return str(found.get("system_identifier", ""))

    @property
    def complete(self) -> bool:
        """Whether the snapshot's completion is recorded (or it was skipped on purpose) for every table."""
        done = self.facts.get(COMPLETE)
        return done is not None and all(oid in done["tables"] for oid in self.tables)

    @property
    def completed(self) -> list[int]:
        """Tables whose snapshot is complete."""
        return list(self.facts.get(COMPLETE, {}).get("tables", []))

    @property
    def tables(self) -> dict[int, PinnedTable]:
        """The pipeline's tables by oid."""
        return {
            pinned.table.oid: pinned
            for key, value in self.facts.items()
            if key.startswith("table/")
            for pinned in [PinnedTable.from_json(value)]
        }

    @property
    def boundaries(self) -> dict[int, Boundary]:
        """The boundaries by table oid."""
        return {
            int(key.partition("/")[2]): Boundary.from_json(value)
            for key, value in self.facts.items()
            if key.startswith("boundary/")
        }

    @property
    def coverage(self) -> Coverage | None:
        """What published the tables when they were taken in."""
        found = self.facts.get(COVERAGE)
        return Coverage.from_json(found) if found else None

    def plan(self, oid: int) -> Plan | None:
        """A table's plan."""
        found = self.facts.get(plan_key(oid))
        return Plan.from_json(found) if found else None

    def done(self, oid: int, part: int) -> dict[str, Any] | None:
        """A range's progress record."""
        return self.facts.get(progress_key(oid, part))

    @property
    def position(self) -> Position | None:
        """P, if anything was ever streamed."""
        found = self.facts.get(POSITION)
        return Position(found["lsn"], found["ordinal"]) if found else None

    @property
    def counters(self) -> dict[str, int]:
        """What the stream has published since the slot was made."""
        found = self.facts.get(POSITION, {})
        return {name: int(found.get(name, 0)) for name in ("published", "dead_letters", "superseded", "events")}


def id_prefix(cluster: Cluster, slot: str) -> str:
    """What every transactional id of a slot begins with: an id belongs to the work, never to a worker."""
    return f"bottledwater-{cluster.system_identifier}-{cluster.database}-{slot}"


def facts_id(prefix: str) -> str:
    """Of whoever drives a job and writes facts."""
    return f"{prefix}-facts"


def stream_id(prefix: str) -> str:
    """Of the stream's publisher."""
    return f"{prefix}-stream"


def lane_id(prefix: str, lane: int) -> str:
    """Of a snapshot lane's publisher."""
    return f"{prefix}-lane-{lane}"
