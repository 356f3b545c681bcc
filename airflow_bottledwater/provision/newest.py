"""What the topics have of the keys of dead letters: newer records, and TRUNCATEs."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.provision.source_rows import StoredDeadLetter

#: of a key that a topic does not have
_NOTHING = ("", False)


@dataclass(slots=True)
class Newest:
    """What the topics have of some keys.

    :param known: by topic and key, the highest position of a record, or LSN that a row of a live snapshot shows, and
        whether the last record is a row of a snapshot; by topic and None, the position of a TRUNCATE.
    :param unsure: the topics that may have records of other sources, or of which it is not known where the pipeline
        begins in them.
    :param unsure_events: the same of the topic with the TRUNCATEs.
    """

    known: dict[str, dict[bytes | None, tuple[str, bool]]] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    unsure_events: bool = False

    def add(self, topic: str, key: bytes | None, position: str, *, copied: bool = False) -> None:
        """Take note of a record, or of a TRUNCATE."""
        keys = self.known.setdefault(topic, {})
        keys[key] = max(keys.get(key, _NOTHING)[0], position), copied

    def overtake(self, dead_letter: StoredDeadLetter, records: Records, i: int) -> bool:
        """Whether one of a dead letter's records is older than what its topic has."""
        known = self._of(dead_letter)
        return dead_letter.overtaken(max(known.get(key, _NOTHING)[0] for key in (key_of(records, i), None)))

    def truncated(self, dead_letter: StoredDeadLetter) -> bool:
        """Whether a dead letter's table was truncated behind its change, by the dead letter's own source."""
        return dead_letter.overtaken(self._of(dead_letter).get(None, _NOTHING)[0])

    def in_doubt(self, dead_letter: StoredDeadLetter) -> bool:
        """Whether the positions of what has overtaken a dead letter may say nothing of it."""
        if self.truncated(dead_letter):
            return self.unsure_events
        return dead_letter.content["topic"] in self.unsure

    def may_show_more(self, dead_letter: StoredDeadLetter, records: Records, i: int) -> bool:
        """Whether one of a dead letter's records is a row that would follow a row of a snapshot."""
        copied = self._of(dead_letter).get(key_of(records, i), _NOTHING)[1]
        return records.table[i]["event"] != wire.EVENT_DELETE and copied

    def _of(self, dead_letter: StoredDeadLetter) -> dict[bytes | None, tuple[str, bool]]:
        return self.known.get(dead_letter.content["topic"], {})


def shown(label: bytes | None) -> str:
    """The position that a row of a live snapshot stands for, by its header ``snapshot``; empty for none."""
    lsn = b"/".join((label or b"").rsplit(b"/", 2)[1:]).decode(errors="replace")
    try:
        return str(Position(parse_lsn(lsn)))
    except ValueError:
        return ""


def key_of(records: Records, i: int) -> bytes | None:
    """The key of a record; None if it has none."""
    at, size = int(records.table[i]["key"]), int(records.table[i]["key_length"])
    return None if size < 0 else bytes(records.data[at : at + size])
