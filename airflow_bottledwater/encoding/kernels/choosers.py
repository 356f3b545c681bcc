"""The partitions that some columns of the key choose, for tables that have such columns: a second pass over the rows of
records, so that all other tables are encoded by code that knows nothing of it."""

from __future__ import annotations

from airflow_bottledwater.compiled import callee, compiled
from airflow_bottledwater.encoding.kernels.fields import NEW, OLD, convert_fields, is_row, read_change, read_copy_row
from airflow_bottledwater.encoding.kernels.rows import _encode, murmur2
from airflow_bottledwater.encoding.wire import EVENT_DELETE, SPACE


@callee
def _choose(program, relation, chooser, b, texts, fields, record, out):
    """Give a record the partition that its columns choose: by the bytes that a key of just these has behind its
    schema's id. Returns whether ``out`` has room for them."""
    end, _ = _encode(program, program.relations[chooser], True, b, texts, fields, out, 0)
    if end == SPACE:
        return False
    # there is no other error: the whole key was encoded
    head = (5 if program.framed else 0) + (1 if program.protobuf else 0)
    record.partition = murmur2(out, head, end - head) % relation.partitions
    return True


@compiled
def choose_for_copy(b, offsets, program, rel, choosers, fields, records, out):
    """Give the records of COPY rows their partitions; returns whether ``out`` has room for each.

    :param choosers: see :class:`~airflow_bottledwater.encoding.program.Programs`.
    :param fields: scratch memory, as in :func:`~airflow_bottledwater.encoding.kernels.rows.encode_copy`, with which
        ``b``, ``offsets`` and ``rel`` were encoded.
    :param out: scratch memory for one key.
    """
    relation = program.relations[rel]
    row = fields[0, : relation.columns]
    for r in range(records.size if choosers[rel] >= 0 else 0):
        at = records[r].row
        read_copy_row(b, offsets[at], offsets[at + 1], row)
        if not _choose(program, relation, choosers[rel], b, b, row, records[r], out):
            return False
    return True


@compiled
def choose_for_changes(b, changes, program, choosers, texts, fields, records, out):
    """Give the records of changes their partitions; returns whether ``out`` has room for each.

    :param changes: all that were encoded, from the first on; ``texts`` likewise, see
        :func:`~airflow_bottledwater.encoding.kernels.rows.encode_changes`.
    :param out: scratch memory for one key.
    """
    r = 0
    cursor = 0
    for i in range(changes.size):
        change = changes[i]
        if not is_row(change.kind):
            continue
        relation = program.relations[change.relation]
        if relation.outbox:
            continue
        chooser = choosers[change.relation]
        if chooser < 0 and not relation.converts:
            while r < records.size and records[r].row == i:
                r += 1
            continue
        old, new = fields[0, : relation.columns], fields[1, : relation.columns]
        rows, _, _ = read_change(b, change, old, new)
        if rows & OLD:
            cursor = convert_fields(program, relation, relation.whole_old == 0, old, texts, cursor)
        if rows & NEW:
            cursor = convert_fields(program, relation, False, new, texts, cursor)
        while r < records.size and records[r].row == i:
            # a record that deletes has the key of the old row
            row = old if records[r].event == EVENT_DELETE else new
            if chooser >= 0 and not _choose(program, relation, chooser, b, texts.data, row, records[r], out):
                return False
            r += 1
    return True
