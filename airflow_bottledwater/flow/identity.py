"""What a pipeline is: a slot of one database of one cluster; a table by its oid; a topic of one table at a time.

Names do not identify anything here: a copy of a cluster has the same database and slot names, a renamed table keeps its rows,
and a new table may take the name of an old one.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.encoding import names
from airflow_bottledwater.errors import StateError
from airflow_bottledwater.flow import facts as f
from airflow_bottledwater.kafka.topics import Topic
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.slot import Cluster


def check_cluster(known: f.State, cluster: Cluster, topic: str) -> None:
    """Whether a state topic is of this cluster. Before anything is claimed, stopped or dropped: the topic's name has only
    database and slot in it, which a copy of the cluster has, too.

    :raises StateError: it is another cluster's; nothing was changed.
    """
    other = known.system_identifier
    if other and other != cluster.system_identifier:
        raise StateError(
            f"State topic {topic!r} belongs to the cluster with system identifier {other}; the database of this connection is in "
            f"cluster {cluster.system_identifier} (a copy, a restored dump, or another server). Nothing was changed.",
            "Use another slot name for this database, and leave the other pipeline alone. If that cluster is gone for good, its "
            f"state can be deleted with 'bottledwater drop-slot --forget-cluster {other}'.",
        )


def topic_problems(known: f.State, tables: Sequence[Table], prefix: str) -> list[str]:
    """The tables that today have the name of another one whose rows are in the topic.

    :param tables: those of the pipeline as the catalog has them today.
    """
    owners = {pinned.topic: pinned.table for pinned in known.tables.values()}
    problems = []
    for table in tables:
        topic = names.topic(table.schema, table.name, prefix)
        owner = owners.get(topic)
        if table.oid not in known.tables and owner is not None:
            problems.append(
                f"Topic {topic!r} holds the rows of another table (oid {owner.oid}), which was called {owner.qualified} when the slot was "
                f"made; the table that has this name today (oid {table.oid}) was created or renamed since. Two tables in one topic "
                "would overwrite and delete each other's rows. Rename the tables back; or give today's table a topic_prefix in a "
                "pipeline of its own; or drop the slot (bottledwater drop-slot --when always) and start again: the new "
                "snapshot removes from the topic what the table does not have."
            )
    return problems


def check_topic(name: str, found: Topic | None, pin: f.Pin | None) -> None:
    """Whether a topic is still the one that was pinned: another partition count moves keys, another id is an empty topic.

    :param found: as the broker has it; None: it has not.
    :param pin: None for a topic that is no table's.

    :raises StateError: it is not.
    """
    if found is None:
        raise StateError(
            f"Topic {name!r} does not exist any more.",
            "Deleting topics of a running pipeline loses data. Drop the slot and start again with a snapshot.",
        )
    if pin is None:
        return
    if found.id != pin.id:
        raise StateError(
            f"Topic {name!r} was deleted and made again: its rows are gone.",
            "Drop the slot and start again with a snapshot.",
        )
    if found.partitions != pin.partitions:
        raise StateError(
            f"Topic {name!r} has {found.partitions} partitions, it had {pin.partitions}: keys would move between them.",
            "Drop the slot and start again with a snapshot into a new topic (topic_prefix).",
        )
    if not pin.keyed and "compact" in found.cleanup:
        raise StateError(
            f"Topic {name!r} is compacted now, but its table has no key: Kafka refuses records without one.",
            f"Set it back (kafka-configs.sh --alter --entity-type topics --entity-name {name} --add-config cleanup.policy=delete), "
            "then start again.",
        )
