"""A replication slot: its name, the cluster and database it belongs to, and where it begins."""

from __future__ import annotations

from dataclasses import dataclass

#: what PostgreSQL allows (ReplicationSlotValidateName, src/backend/replication/slot.c; NAMEDATALEN is 64), as a
#: pattern: "$" alone would allow a line break behind it, and patterns in browsers have no "\Z"
SLOT_NAME = r"^[a-z0-9_]{1,63}$(?!\n)"

#: the form of a pipeline's name, and where it is found, for messages
WHOLE_NAME = "SYSTEM_IDENTIFIER/DATABASE/SLOT, as messages, bottledwater_health and the page in Airflow have it"


def _pipeline(system_identifier: str, database: str, slot: str) -> str:
    return f"{system_identifier}/{database}/{slot}"


def parts(pipeline: str) -> tuple[str, str, str]:
    """The system identifier, the database and the slot in a pipeline's name; a database's name may have a slash."""
    system_identifier, _, rest = pipeline.partition("/")
    database, _, slot = rest.rpartition("/")
    return system_identifier, database, slot


def of_source(pipeline: str, other: str) -> bool:
    """Whether two pipelines read the same database: only positions of one source can be compared.

    :param other: the other one's name.
    """
    return pipeline.rpartition("/")[0] == other.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The server, its timeline and the database of a connection, as ``IDENTIFY_SYSTEM`` reports them."""

    system_identifier: str
    timeline: int
    database: str
    version: int

    def pipeline(self, slot: str) -> str:
        """The name of a slot's pipeline in the shared state topic."""
        return _pipeline(self.system_identifier, self.database, slot)


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What the pipeline remembers of a slot that it created or adopted.

    :param consistent_point: A: every transaction whose commit record lies at or after it is streamed.
    :param oldest_xid: X0, a transaction id taken after A was known.
    """

    name: str
    system_identifier: str
    timeline: int
    database: str
    consistent_point: int
    oldest_xid: int

    @property
    def pipeline(self) -> str:
        """The name of the slot's pipeline, see :meth:`Cluster.pipeline`."""
        return _pipeline(self.system_identifier, self.database, self.name)
