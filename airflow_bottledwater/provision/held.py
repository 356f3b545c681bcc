"""What the source holds today for a dead letter, and so whether it may still be published."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.current import Found, row_key


@dataclass(frozen=True, slots=True)
class Held:
    """What the source holds today for a dead letter's keys.

    :param gone: whether no row has the key that the change deleted, or changed to another one.
    :param same: whether the row that the change wrote exists unchanged.
    :param unknown: why this is not known; empty if it is.
    """

    gone: bool
    same: bool
    unknown: str = ""

    def allows(self, records: Records, i: int) -> bool:
        """Whether a record of the dead letter may be published."""
        return self.gone if records.table[i]["value_length"] < 0 else self.same


def compare(table: Table, message: pgoutput.RowMessage, found: Found, converted: Collection[str]) -> Held:
    """Compare a dead letter's row with what the source holds today.

    :param converted: columns whose values a snapshot's dead letter contains as the server's text; they are not compared.
    """
    lost = [reason for c, reason in found.unreadable.items() if table.columns[c].name in table.key]
    if lost:
        return Held(gone=False, same=False, unknown=lost[0])
    gone = message.old is None or row_key(table, message.old) not in found.rows
    if message.new is None:
        return Held(gone, same=False)
    row = found.rows.get(row_key(table, message.new))
    if row is None:
        return Held(gone, same=False)
    comparable = (
        (value, row[c])
        for c, (column, value) in enumerate(zip(table.columns, message.new, strict=True))
        if value.kind in "nb" and c not in found.unreadable and column.name not in converted
    )
    return Held(gone, same=all((None if value.kind == "n" else value.data) == now for value, now in comparable))
