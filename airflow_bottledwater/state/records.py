"""The records of a slot's state topic, typed.

Keys: ``claim``, ``ids``, ``intent``, ``settings``, ``slot``, ``coverage``, ``complete``, ``position``; and by table oid
``table/…``, ``boundary/…``, ``plan/…``, ``progress/…/<range>``, ``sweep/…``, ``partitions/…``; plan and progress of a
partitioned table by the oids of its leaf partitions; ``below/…`` by the oid of a table whose changes are sent as
another one's; ``gap/…`` by that of one of which changes were left out; ``stopped/…`` by that of one that is not
followed any more; ``former/…`` by the name of a topic that no table of the pipeline has any more; ``start/…`` by that
of a topic that it publishes to; ``live/…`` by the id of a live snapshot; ``schema/…/<id>`` by a table's oid and the
registry's id; and ``letters/…/<writer>`` by a table's oid and by what has written dead letters of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.errors import LOST_STATE, StateError
from airflow_bottledwater.model.attached import AttachedTable
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.postgres.coverage import Coverage
from airflow_bottledwater.postgres.partitions import KnownPartition
from airflow_bottledwater.state.pinned import PinnedTable

CLAIM, IDS, INTENT, SLOT, COMPLETE, POSITION = "claim", "ids", "intent", "slot", "complete", "position"
COVERAGE, SAVED_SETTINGS = "coverage", "settings"
#: the prefix of the keys of live snapshots
LIVE = "live/"
#: the first part of the keys of dead letters' counts, and what writes dead letters; each lane of a snapshot has a count
#: of its own
LETTERS = "letters"
BY_STREAM, BY_LIVE, _BY_SNAPSHOT = "stream", "live", "snapshot"
#: the prefix of the keys of topics that no table has any more
FORMER = "former/"
#: the key of the tombstone with which a transaction of the stream may begin; there is never a value
BEGUN = b"begun"


def table_key(oid: int) -> str:
    """The key of a table's pinned definition."""
    return f"table/{oid}"


def boundary_key(oid: int) -> str:
    """The key of a table's boundary."""
    return f"boundary/{oid}"


def plan_key(oid: int) -> str:
    """The key of a table's snapshot plan."""
    return f"plan/{oid}"


def progress_key(oid: int, chunk: int) -> str:
    """The key of one range's progress."""
    return f"progress/{oid}/{chunk}"


def sweep_key(oid: int) -> str:
    """The key of the sweep that follows a table's snapshot onto a topic that was not empty."""
    return f"sweep/{oid}"


def partitions_key(oid: int) -> str:
    """The key of the partitions of a table that is published as one."""
    return f"partitions/{oid}"


def gap_key(oid: int) -> str:
    """The key of a table of which changes were left out."""
    return f"gap/{oid}"


def types_key(oid: int) -> str:
    """The key of what the types of a table's columns consist of."""
    return f"types/{oid}"


def stopped_key(oid: int) -> str:
    """The key of a table that is not followed any more."""
    return f"stopped/{oid}"


def schema_key(oid: int, number: int) -> str:
    """The key of a schema of a table's rows that is not the one of its pinned definition.

    :param number: the registry's id.
    """
    return f"schema/{oid}/{number}"


def former_key(topic: str) -> str:
    """The key of a topic that no table of the pipeline has any more."""
    return f"{FORMER}{topic}"


def start_key(topic: str) -> str:
    """The key of where the pipeline begins in a topic."""
    return f"start/{topic}"


def attached_key(oid: int) -> str:
    """The key of a table whose changes are sent as another one's."""
    return f"below/{oid}"


def live_key(request_id: str) -> str:
    """The key of a live snapshot's progress."""
    return f"{LIVE}{request_id}"


def by_lane(lane: int) -> str:
    """What writes the dead letters of a lane of the snapshot."""
    return f"{_BY_SNAPSHOT}-{lane}"


def letters_key(oid: int, by: str) -> str:
    """The key of the count of a table's dead letters.

    :param by: what has written them: :data:`BY_STREAM`, :data:`BY_LIVE`, or :func:`by_lane`.
    """
    return f"{LETTERS}/{oid}/{by}"


def letters_of(key: str) -> tuple[int, str]:
    """The table's oid, and what has written them, of a key of :func:`letters_key`."""
    _, oid, by = key.split("/", 2)
    return int(oid), by


@dataclass(frozen=True, slots=True)
class Ids:
    """All transactional ids that were ever used: a job that claims the slot initialises them all."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Intent:
    """What is about to be created: written before the slot is, so that a creation that was killed can be resumed.

    :param at: seconds since 1970.
    :param fingerprint: the definitions of the tables before the slot was created
        (:func:`airflow_bottledwater.postgres.catalog.fingerprint`).
    :param partitioned_tables: root or leaves, as the publications were made.
    :param format: as the records are made; ``envelope`` and ``envelope_schema`` likewise.
    :param create_publication: whether this pipeline has made its publications, so that it changes and drops them.
    :param state_topic_id: Kafka's id of the state topic, which a copy of it does not have.
    """

    slot: str
    publication: str
    at: float
    system_identifier: str
    partitioned_tables: str
    format: str
    topic_prefix: str
    fingerprint: dict[str, str] | None = None
    envelope: str = "none"
    envelope_schema: bool = False
    create_publication: bool = True
    state_topic_id: str = ""


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The settings of the pipeline's last start, for whoever comes later: backfills, verification, sensors, the
    command.

    :param values: those that differ from the defaults, by name; no connections.
    :param hash_key: the id of the key of masks that are hashes; empty for none.
    """

    values: dict[str, Any]
    hash_key: str = ""


@dataclass(frozen=True, slots=True)
class Complete:
    """The tables whose snapshot is complete.

    :param tables: their oids.
    :param skipped: whether the snapshot was skipped on purpose.
    :param at: seconds since 1970.
    """

    tables: tuple[int, ...]
    skipped: bool
    at: float


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions whose rows are in the topic of a partitioned table, or have come with the stream.

    :param known: by oid, at any level below the table.
    """

    known: dict[int, KnownPartition]


@dataclass(frozen=True, slots=True)
class PartOfTransaction:
    """What is published of a source transaction that P is inside of.

    :param time: of its commit, in milliseconds since 1970.
    :param counts: records, by topic.
    """

    xid: int
    time: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Reached:
    """P, and how many records of each kind the stream has published since the slot was created.

    :param at: seconds since 1970.
    :param fingerprint: see :func:`airflow_bottledwater.stream.start.fingerprint`; only inside of a transaction.
    :param epoch: the epoch of the job that wrote it.
    :param part: if P is inside a transaction.
    """

    lsn: int
    ordinal: int
    at: float
    fingerprint: str | None = None
    epoch: int | None = None
    published: int = 0
    superseded: int = 0
    events: int = 0
    messages: int = 0
    part: PartOfTransaction | None = None

    @property
    def position(self) -> Position:
        """P."""
        return Position(self.lsn, self.ordinal)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the snapshot reads one table.

    :param filenode: of the table when the plan was made; block numbers only hold for this file.
    :param definition: the table's definition when the plan was made
        (:func:`airflow_bottledwater.postgres.catalog.definition`).
    :param ranges: for each range: first block, the block behind the last one, lane.
    """

    filenode: int
    definition: str
    ranges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a range of a table's snapshot is published.

    :param upto: the block behind the last one that is published.
    :param letters: rows that became dead letters.
    """

    rows: int
    upto: int
    done: bool
    lane: int
    epoch: int
    letters: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that follows a table's snapshot onto a topic that was not empty.

    :param ends: per partition, the topic's end when the plan was made.
    """

    ends: tuple[int, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class Letters:
    """The dead letters of one table that one publisher has written, in the same Kafka transactions as the letters.

    :param table: the table's name when the last one was written.
    :param written: how many, since the slot was created; of these, ``closed`` were re-driven, overtaken or dismissed.
        Some are of before, if they were open when an earlier slot was dropped.
    :param topic: the topic that has those of before; empty if there are none.
    :param pipeline: the name of the pipeline that has written those of before, which had another one if it was of
        another cluster (pg_upgrade, a restored dump); empty if there are none.
    """

    table: str
    written: int
    closed: int = 0
    topic: str = ""
    pipeline: str = ""

    @property
    def open(self) -> int:
        """How many nobody has settled yet."""
        return self.written - self.closed


@dataclass(frozen=True, slots=True)
class Gap:
    """The topic of a table lacks changes, or has keys that are to be others, until the table is recorded anew and read
    by a live snapshot with a sweep.

    :param why: the reason: the end of a sentence that begins with the table's name.
    :param accepted: whether a person has accepted keys of other bytes, with which none of its changes is published
        before.
    :param held: whether none of its changes is published until a person lets the table go on.
    :param paused: whether a person has asked for that; otherwise one of its records could not be published.
    :param at: seconds since 1970 when it was held.
    :param unfiltered: whether none of its changes is published until rows that its filter hides are not sent any more.
    """

    why: str
    accepted: bool = False
    held: bool = False
    paused: bool = False
    at: float = 0.0
    unfiltered: bool = False


@dataclass(frozen=True, slots=True)
class ChangedTypes:
    """What the types of a table's columns consist of, as its published records have it, if that has changed since the
    table was recorded.

    :param columns: those of which the type has attributes or labels.
    """

    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """A table is not followed any more, and is still there: taken in again by another name, it must not show what is
    hidden by the one that it had.

    :param table: as it was recorded.
    """

    table: SourceTable


@dataclass(frozen=True, slots=True)
class LaterSchema:
    """A definition of a table other than the pinned one, with whose schema there are rows in its topic. It is written
    in the Kafka transaction of the first of them; and again if a later definition with the same schema has a column
    that it lacks, or has as another one.

    :param number: the registry's id of the schema.
    """

    table: SourceTable
    number: int


@dataclass(frozen=True, slots=True)
class Former:
    """A topic had the rows of a table, and no table of the pipeline has it now: whichever gets its name gets the topic,
    with a sweep.

    :param table: the last one's name, for messages; ``oid`` is its oid.
    """

    oid: int
    table: str


@dataclass(frozen=True, slots=True)
class StartOffsets:
    """Where a topic ended when the pipeline took it, see :mod:`airflow_bottledwater.state.starts`.

    :param topic_id: Kafka's id of the topic; in one that was made again since, the pipeline begins at its beginning.
    :param offsets: per partition.
    """

    topic_id: str
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiveProgress:
    """How far a live snapshot is published.

    :param tables: the oids of its tables, in the order in which they are read.
    :param done: how many of them are done.
    :param part: the oid of what is being read of the next one: itself, or one of its partitions; 0: nothing is.
    :param filenode: a number for the file that this had when its reading began
        (:meth:`airflow_bottledwater.postgres.snapshot.OwnSnapshot.files`); block numbers only hold for this file. In
        the order of keys, a number for what that order holds for (:func:`airflow_bottledwater.live.keys.place`).
    :param upto: the block of it behind the last one that is published.
    :param read: what is published of the next one to its end, with these numbers, by oid.
    :param key: of a reading in the order of keys: that of the last row that is published, as text.
    :param rows: rows published; for ``superseded`` and ``tombstones``, see
        :class:`airflow_bottledwater.state.control_records.SnapshotReport`.
    :param bytes: the size of the blocks that were read.
    :param parts: the oids of all that is read below these tables, leaf partitions and what is between; empty: the
        tables are read whole.
    :param found: the partitions of the next table whose rows are published, while it is being swept.
    :param sweep: whether it was recorded, before anybody asked for it, as one with a sweep.
    :param required: whether its tables' topics lack rows until it has finished: it was recorded together with tables
        that were added, or taken up again, or for partitions that were attached. It cannot be cancelled, and is tried
        again at each start of the stream.
    :param ended: finished, cancelled or failed; empty until then.
    """

    tables: tuple[int, ...]
    done: int = 0
    part: int = 0
    filenode: int = 0
    upto: int = 0
    read: dict[int, int] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    rows: int = 0
    superseded: int = 0
    dead_letters: int = 0
    tombstones: int = 0
    bytes: int = 0
    parts: tuple[int, ...] = ()
    found: Partitions | None = None
    sweep: bool = False
    required: bool = False
    ended: str = ""
    error: str = ""

    def at_start(self) -> LiveProgress:
        """It, at the start of its next table."""
        return replace(self, part=0, filenode=0, upto=0, read={}, key=(), found=None)

    @property
    def unfinished(self) -> bool:
        """Whether its tables' topics lack rows, since it is not finished."""
        return self.required and self.ended != "finished"


StateRecord = (
    Job | Ids | Intent | SavedSettings | SlotRecord | Coverage | Complete | Reached | PinnedTable | Boundary | Plan
    | Progress | Sweep
    | Partitions | AttachedTable | Gap | ChangedTypes | LaterSchema | Stopped | Former | StartOffsets | LiveProgress
    | Letters
)  # fmt: skip

#: the record's class by the first part of its key; the parts after it are the table's oid and, for progress, the
#: range's number
_KINDS: dict[str, type[StateRecord]] = {
    CLAIM: Job,
    IDS: Ids,
    INTENT: Intent,
    SAVED_SETTINGS: SavedSettings,
    SLOT: SlotRecord,
    COVERAGE: Coverage,
    COMPLETE: Complete,
    POSITION: Reached,
    "table": PinnedTable,
    "boundary": Boundary,
    "plan": Plan,
    "progress": Progress,
    "sweep": Sweep,
    "partitions": Partitions,
    "gap": Gap,
    "types": ChangedTypes,
    "stopped": Stopped,
    "schema": LaterSchema,
    "former": Former,
    "start": StartOffsets,
    "below": AttachedTable,
    "live": LiveProgress,
    LETTERS: Letters,
}
prepare(*_KINDS.values())

R = TypeVar("R")


def encode(record: StateRecord) -> dict[str, Any]:
    """A record as plain JSON values; fields that are None are left out."""
    found: dict[str, Any] = msgspec.to_builtins(record, str_keys=True, order="deterministic")
    return {name: value for name, value in found.items() if value is not None}


def _kind(key: str) -> str:
    return key.partition("/")[0]


def _newer(key: str, what: str) -> StateError:
    return StateError(
        f"The slot's state has a record {key!r} that this version does not know ({what}).",
        "It was written by a newer version of the provider: install that one here, too.",
    )


def decode(key: str, raw: Mapping[str, Any]) -> StateRecord:
    """The inverse of :func:`encode`.

    :raises StateError: the record is malformed, or of a kind or with a field, at any depth, that this version does not
        know.
    """
    if (kind := _KINDS.get(_kind(key))) is None:
        raise _newer(key, "its key")
    try:
        record: StateRecord = msgspec.convert(raw, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        raise StateError(
            f"The slot's state has a record {key!r} that is malformed for this version of the provider: {error}.",
            "If a newer version has written it, install that one here, too. If another program writes to the topic: "
            f"{LOST_STATE}",
        ) from None
    # what is not known may say what must not be published, and it would be gone when the record is written again
    kept = msgspec.json.decode(msgspec.json.encode(encode(record)))
    if kept != raw and (unknown := _unknown(raw, kept)):
        raise _newer(key, f"its field {unknown!r}")
    return record


def _unknown(found: Any, kept: Any) -> str:
    """The name of a field that a record has, at any depth, and that was not taken over from it; empty if there is
    none."""
    if isinstance(found, Mapping) and isinstance(kept, Mapping):
        return next(
            (deeper for name in found if (deeper := _unknown(found[name], kept[name]) if name in kept else name)), ""
        )
    if isinstance(found, list) and isinstance(kept, list):
        return next((deeper for pair in zip(found, kept, strict=False) if (deeper := _unknown(*pair))), "")
    return ""


def id_prefix(cluster: Cluster, slot: str) -> str:
    """The prefix of every transactional id of a slot. An id names the work (a lane, the stream), never the process that
    does it."""
    return f"bottledwater-{cluster.system_identifier}-{cluster.database}-{slot}"


def state_writer_id(prefix: str) -> str:
    """The transactional id of the producer with which a job's driver writes state records."""
    return f"{prefix}-state"


def preflight_id(prefix: str) -> str:
    """The transactional id with which preflight tries whether those with this prefix may be used."""
    return f"{prefix}-preflight"


def id_prefixes(own: str, ids: Iterable[str]) -> list[str]:
    """The prefixes of all transactional ids that a job of a slot initialises, each of which needs a right: its own, and
    those that the slot had in clusters before this one (``pg_upgrade`` makes another).

    :param ids: all that were ever used.
    """
    suffix = state_writer_id("")
    return sorted({own, *(each.removesuffix(suffix) for each in ids if each.endswith(suffix))})


def stream_id(prefix: str) -> str:
    """The transactional id of the stream's publisher."""
    return f"{prefix}-stream"


def lane_id(prefix: str, lane: int) -> str:
    """The transactional id of a snapshot lane's publisher."""
    return f"{prefix}-lane-{lane}"
