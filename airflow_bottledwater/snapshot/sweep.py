"""After a slot was lost: a tombstone for every key that the new snapshot did not find again.

The topic then held records before the table got its plan; the plan's ends say where these stop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from airflow_bottledwater.kafka.publisher import tombstones
from airflow_bottledwater.kafka.scan import scan
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state.records import PinnedTable, Sweep, sweep_key

log = logging.getLogger(__name__)


def sweep(session: PublishSession, pinned: PinnedTable, ends: Sequence[int]) -> int:
    """Publish the tombstones and the record that it is done, in one transaction; returns how many.

    :param ends: per partition, the topic's end when the plan was made.
    :raises TakenOver: another job has claimed the slot.
    """

    def work() -> int:
        config = session.pipeline.kafka
        latest: dict[bytes, tuple[int, int, bool]] = {}
        for message in scan(config, pinned.topic, Topics(config).ends(pinned.topic, pinned.partitions)):
            latest[message.key()] = (message.partition(), message.offset(), message.value() is not None)
        stale = [(partition, key) for key, (partition, at, live) in latest.items() if live and at < ends[partition]]
        done = {sweep_key(pinned.table.oid): Sweep(tuple(ends), True)}
        session.transact([tombstones(session.index[pinned.topic], stale)], done)
        return len(stale)

    swept = session.run(work)
    log.info("Swept %r: %d keys that the source no longer has.", pinned.topic, swept)
    return swept
