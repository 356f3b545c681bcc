"""The plans of a snapshot: which ranges of which tables are read, by which lane; stored before anything is published.

A partitioned table that is published as one has a plan for each leaf partition, by the partition's oid: another
partition that is rewritten does not matter to it. It has one boundary, by its own oid, since the stream sends its
partitions' changes under that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.offsets import has_records
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, partitions
from airflow_bottledwater.postgres import snapshot as pg
from airflow_bottledwater.postgres.partitions import Partition
from airflow_bottledwater.snapshot.task import LaneTask, SnapshotChunk
from airflow_bottledwater.state import records
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import shared

log = logging.getLogger(__name__)


class Plans:
    """The plans of one run of a snapshot: the stored ones as far as they still hold, and new ones.

    :param tables: the tables to be read, as they are under the holder's locks.
    :param below: what is below the partitioned ones, by oid.
    :ivar parts: by table, the tables that have its rows: itself, or its leaf partitions.
    :raises Refused: a table without a key was read in part: what is left can only be read under another snapshot, and
        nothing tells then which of its rows were published. What was updated meanwhile may have moved to a block that
        is done, and what was inserted is streamed, too.
    """

    def __init__(
        self, pipeline: Settings, claim: Claim, tables: Sequence[SourceTable], below: Mapping[int, Sequence[Partition]]
    ) -> None:
        self._pipeline, self._claim, self._tables, self._below = pipeline, claim, tables, below
        self.parts = {table.oid: partitions.parts(table, below.get(table.oid, ())) for table in tables}
        #: tables without a key: those that have been read to their end, and those of which nothing is published yet
        self._finished = {table.oid for table in tables if not table.keyed and self._is_finished(table)}
        self._begin = {table.oid for table in tables if not table.keyed} - self._finished

    @property
    def resumable(self) -> bool:
        """Whether what is left can be read under another snapshot: not what is left of a table without a key."""
        return not self._begin

    def tasks(self, held: pg.ExportedSnapshot, oldest: int) -> tuple[list[LaneTask], int]:
        """The lanes' tasks, after new plans were written with the boundaries; and the number of ranges that are done
        already.

        :param oldest: X0.
        """
        known = self._claim.state
        changes: dict[str, records.StateRecord | None] = {}
        plans: dict[int, records.Plan] = {}
        fresh: list[tuple[SourceTable, list[tuple[int, int]]]] = []
        for table, part in [(each, part) for each in self._tables for part in self.parts[each.oid]]:
            stored = known.plan(part.oid)
            if table.oid in self._finished:
                # all rows of a partition that was made since are in the stream
                plans[part.oid] = stored or records.Plan(part.filenode, catalog.definition(part), ())
                changes |= {} if stored else {records.plan_key(part.oid): plans[part.oid]}
                continue
            same = stored is not None and (stored.filenode, stored.definition) == (
                part.filenode,
                catalog.definition(part),
            )
            if stored is not None and same and table.oid not in self._begin:
                plans[part.oid] = stored
                continue
            if stored is not None and not same:
                log.warning(
                    "%s was rewritten or altered since its snapshot began: it is read again from its start.",
                    part.qualified,
                )
            if stored is not None:
                changes |= {records.progress_key(part.oid, chunk): None for chunk in range(len(stored.ranges))}
            fresh.append((part, pg.ranges(part, self._pipeline.range_bytes)))
        changes |= self._boundaries(held, oldest)
        dealt: dict[int, list[tuple[int, int, int]]] = {}
        for t, r, number in pg.deal(fresh, self._pipeline.lanes):
            part, chunks = fresh[t]
            dealt.setdefault(part.oid, []).append((*chunks[r], number))
        for part, _ in fresh:
            plans[part.oid] = records.Plan(part.filenode, catalog.definition(part), tuple(dealt[part.oid]))
            changes[records.plan_key(part.oid)] = plans[part.oid]
        numbers = sorted({lane_number for plan in plans.values() for _, _, lane_number in plan.ranges})
        self._claim.record_ids([records.lane_id(self._claim.prefix, number) for number in numbers])
        if changes:
            self._claim.write(changes)
        return self._lanes(plans, numbers, held)

    def _is_finished(self, table: SourceTable) -> bool:
        """Whether a table without a key has been read to its end; otherwise nothing of it was published.

        :raises Refused: it was read in part.
        """
        known = self._claim.state
        plans = {part.oid: known.plan(part.oid) for part in self.parts[table.oid]}
        ranges = [known.done(oid, number) for oid, plan in plans.items() if plan for number in range(len(plan.ranges))]
        if not any(progress is not None and (progress.rows or progress.letters) for progress in ranges):
            return False
        if all(progress is not None and progress.done for progress in ranges):
            return True
        raise self._unclear(table, "was interrupted when a part of its rows was published")

    def _unclear(self, table: SourceTable, why: str) -> Refused:
        """What to do if nothing tells which rows of a table without a key are published."""
        return Refused(
            f"The snapshot of {table.qualified}, which has no key, {why}: which of them are left cannot be told.",
            "Drop the slot (bottledwater drop-slot --when always), delete topic "
            f"{self._claim.state.tables[table.oid].topic!r} (or take another topic_prefix), and start again. A table "
            "with a key is resumed: give it one, if you can.",
        )

    def _boundaries(self, held: pg.ExportedSnapshot, oldest: int) -> dict[str, records.StateRecord | None]:
        """The records of tables that have no boundary yet, and of partitions that are read for the first time.

        :raises Refused: the topic of a table without a key has records, of which the saved state does not know: it was
            lost in part. Its rows would come twice.
        """
        known = self._claim.state
        changes: dict[str, records.StateRecord | None] = {}
        published = self._published(
            [table for table in self._tables if table.oid not in known.boundaries or table.oid in self._begin]
        )
        kept = shared(self._pipeline, known, [topic for topic, ends in published.items() if any(ends)])
        for table in self._tables:
            if table.partitioned and table.oid not in self._finished:
                today = partitions.remembered(self._below.get(table.oid, ()))
                # what is known of a partition is kept: if it was truncated since its rows were published, that must be
                # noticed
                before = {} if table.oid in self._begin else known.partitions.get(table.oid, {})
                changes[records.partitions_key(table.oid)] = records.Partitions({**today, **before})
            if table.oid in known.boundaries and table.oid not in self._begin:
                continue
            topic = known.tables[table.oid].topic
            ends = published[topic]
            # its end may also be behind markers of transactions, of a job that died
            if not (table.keyed or self._pipeline.share_topics) and has_records(self._pipeline.kafka, topic, ends):
                raise self._unclear(table, f"has published rows to topic {topic!r} that its saved state does not know")
            # The stream may leave out what the snapshot contains only if nothing of the table was published before: a
            # key could go back in time. Rows without a key cannot, but they could come twice
            filtered = not any(ends) or not table.keyed
            changes[records.boundary_key(table.oid)] = Boundary(held.snapshot, held.insert_lsn, oldest, filtered)
            if any(ends) and table.keyed and topic not in kept:
                changes[records.sweep_key(table.oid)] = records.Sweep(tuple(ends), False)
        return changes

    def _published(self, tables: Sequence[SourceTable]) -> dict[str, list[int]]:
        """The end of each partition of these tables' topics: requested together to be quick, since the tables are
        locked."""
        pinned = [self._claim.state.tables[table.oid] for table in tables]
        found = (
            Topics(self._pipeline.kafka).all_ends({each.topic: each.partitions for each in pinned}) if pinned else {}
        )
        for each in pinned:
            if any(found[each.topic]) and each.table.keyed:
                log.warning(
                    "Topic %r already holds records: the stream of %s is not filtered, some rows come twice.",
                    each.topic,
                    each.table.qualified,
                )
        return found

    def _lanes(
        self, plans: Mapping[int, records.Plan], numbers: Sequence[int], held: pg.ExportedSnapshot
    ) -> tuple[list[LaneTask], int]:
        state = self._claim.state
        tasks, skipped = [], 0
        for number in numbers:
            chunks = []
            for table, part in [(each, part) for each in self._tables for part in self.parts[each.oid]]:
                for i, (first, last, of_lane) in enumerate(plans[part.oid].ranges):
                    if of_lane != number:
                        continue
                    done = state.done(part.oid, i)
                    if done is not None and done.done:
                        skipped += 1
                    else:
                        chunks.append(SnapshotChunk(table.oid, i, first, last, part if table.partitioned else None))
            if chunks:
                mine = {chunk.oid for chunk in chunks}
                tasks.append(
                    LaneTask(
                        number, self._claim.job, self._claim.prefix, self._claim.topic, held,
                        tuple(t for oid, t in state.tables.items() if oid in mine), tuple(chunks),
                    )
                )  # fmt: skip
        return tasks, skipped
