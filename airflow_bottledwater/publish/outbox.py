"""The rows of outboxes as the records that they describe: each names its topic, its key, its value and its headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled
from airflow_bottledwater.encoding import layout, outbox, wire
from airflow_bottledwater.encoding.kernels.outbox import NO_TOPIC, PART, PLAN, ROUTE, encode_outbox, find_route
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka.publisher import NO_RECORDS, Records
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.chosen import ChosenTopics
from airflow_bottledwater.publish.reject import Rejection

#: rows that a kernel may refuse in one call, and bytes that are added where there is no room for a row
_REJECTIONS, _MORE = 256, 64 << 10
_UPDATED = "a row of an outbox was updated, and its record is published when it is inserted only"


class _Plans(NamedTuple):
    """What the kernels have to know of a batch's relation versions.

    :param width: the columns of the widest.
    :param unfit: why the rows of a version cannot be records, by its number.
    """

    plans: layout.Rows
    parts: layout.Rows
    names: bytes
    width: int
    unfit: dict[int, str]


class _Route(NamedTuple):
    """The rows of an outbox that have one value in the column that chooses the topic.

    :param of: the topics of the outbox, which it has kept since it was taken in, whatever its name is now.
    :param topic: empty if it cannot be, for a reason.
    """

    of: str
    value: bytes
    topic: str
    why: str = ""


class Outbox:
    """Publishes the rows of outboxes under a session's transactional id. The topics that rows choose are made, and
    taken into the session, between two transactions (:meth:`prepare`).

    :param chosen: those topics.
    """

    def __init__(self, chosen: ChosenTopics) -> None:
        self._chosen, self._session = chosen, chosen.session
        self._mapping = TableMapping.of(self._session.pipeline)
        self._routes: list[_Route] = []
        self._plans: tuple[tuple[Version, ...], _Plans] | None = None
        warm_up()

    def prepare(self, batch: Batch) -> None:
        """Make the topics that rows of a batch choose, where they are missing, and take them into the session.

        :raises Refused: Kafka denies it.
        """
        rows = self._inserts(batch)
        plans = self._planned(batch.versions)
        # values that cannot be are not kept: there may be ever others
        self._routes = [route for route in self._routes if route.topic]
        fields, start, more = np.zeros(plans.width, dtype=layout.FIELD), 0, dict[tuple[str, bytes], _Route]()
        (routes, texts), told = self._tables(plans, self._routes), 0
        while True:
            start, at, length = find_route(
                batch.data, batch.changes, rows, start, fields, plans.plans, plans.parts, routes, texts
            )
            if start >= len(rows):
                break
            relation = int(batch.changes[rows[start]]["relation"])
            of, value = batch.versions[relation].topic, bytes(batch.data[at : at + length])
            if (of, value) not in more:
                form = int(plans.parts[plans.plans[relation]["first"]]["form"])
                more[of, value] = self._route(of, value, form)
            start += 1
            if len(more) >= 2 * told:  # not at each of them: it takes as long as there are routes
                (routes, texts), told = self._tables(plans, [*self._routes, *more.values()]), len(more)
        found = list(more.values())
        for of, table in {v.topic: v.table for v in batch.versions if _is_outbox(v)}.items() if found else ():
            refused = self._chosen.take((route.topic for route in found if route.of == of and route.topic), table)
            found = [
                each._replace(topic="", why=refused[each.topic]) if each.topic in refused else each for each in found
            ]
        self._routes += found

    def _route(self, route: str, value: bytes, form: int) -> _Route:
        """The route of rows with a value, before anybody is asked whether its topic can be.

        :param form: how the value becomes a text.
        """
        column = f"column {outbox.column_of(route)!r}, which chooses the topic,"
        try:
            topic = outbox.topic_of(route, outbox.text_of(form, value))
        except ValueError as error:
            return _Route(route, value, "", f"{column} {error}")
        why = self._chosen.problem(topic)
        return _Route(route, value, "" if why else topic, why)

    def records(self, batch: Batch, headers: int) -> tuple[Records, list[Rejection]]:
        """The records of a batch's rows of outboxes, and the rows that cannot be published.

        :param batch: one that was prepared, or a part of it.
        :param headers: see :class:`~airflow_bottledwater.kafka.publisher.Records`.
        """
        plans, rejections = self._planned(batch.versions), []
        for row in self._rows(batch, wire.MESSAGE_UPDATE).tolist():
            rejections.append(Rejection(row, _UPDATED))
        rows = self._inserts(batch)
        for row in rows[plans.plans["columns"][batch.changes["relation"][rows]] < 0].tolist():
            rejections.append(Rejection(row, plans.unfit[int(batch.changes[row]["relation"])]))
        rows = rows[plans.plans["columns"][batch.changes["relation"][rows]] >= 0]
        if not len(rows):
            return NO_RECORDS, rejections
        routes, texts = self._tables(plans, self._routes)
        fields, start, used, made = np.zeros(plans.width, dtype=layout.FIELD), 0, 0, 0
        size = int(batch.changes["length"][rows].sum()) + _MORE
        records, errors, out = layout.output(len(rows) + 1, _REJECTIONS, size)
        while start < len(rows):
            before = start
            start, size, count, failed = encode_outbox(
                batch.data, batch.changes, rows, start, fields, plans.plans, plans.parts, routes, texts,
                layout.Output(records[made:], errors, out[used:]),
            )  # fmt: skip
            for name in ("key", "value", "headers"):
                records[name][made : made + count] += used
            for row, code, number, _ in errors[:failed].tolist():
                why = self._routes[number].why if code == NO_TOPIC else wire.REASONS[code]
                rejections.append(Rejection(row, why, 0 if code == NO_TOPIC else code))
            used, made = used + size, made + count
            if start < len(rows) and failed < len(errors):
                need = int(batch.changes["length"][rows[before]]) if start == before else 0
                out = np.concatenate([out, np.empty(max(out.size, need) + _MORE, dtype=np.uint8)])
        return Records(records[:made], out, headers), rejections

    # ------------------------------------------------------------------ what the kernels look things up in
    def _inserts(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._rows(batch, wire.MESSAGE_INSERT)

    @staticmethod
    def _rows(batch: Batch, kind: int) -> npt.NDArray[np.int64]:
        """The numbers of a batch's changes of this kind that are rows of outboxes."""
        of = np.array([_is_outbox(version) for version in batch.versions] or [False], dtype=np.bool_)
        found: npt.NDArray[np.int64] = np.flatnonzero((batch.changes["kind"] == kind) & of[batch.changes["relation"]])
        return found

    def _planned(self, versions: tuple[Version, ...]) -> _Plans:
        if self._plans is None or self._plans[0] != versions:
            self._plans = versions, self._plan(versions)
        return self._plans[1]

    def _plan(self, versions: Sequence[Version]) -> _Plans:
        plans, parts, unfit = np.zeros(max(1, len(versions)), dtype=PLAN), list[tuple[int, ...]](), dict[int, str]()
        texts, width = bytearray(b"\0"), 1
        plans["columns"] = -1
        for number, version in enumerate(versions):
            if not _is_outbox(version):
                continue
            try:
                found = outbox.plan(self._mapping, version.table, version.topic)
            except outbox.NoOutbox as error:
                unfit[number] = f"its table cannot be an outbox now: {error}"
                continue
            columns = len(version.table.columns)
            plans[number] = (columns, len(parts), len(found) - 3, _number(version.topic))
            width = max(width, columns)
            for part in found:
                header = part.header + b"\0"
                parts.append((part.column, part.form, len(texts), len(header) if part.header else 0))
                texts += header
        return _Plans(plans, np.array(parts or [(0, 0, 0, 0)], dtype=PART), bytes(texts), width, unfit)

    def _tables(self, plans: _Plans, routes: Sequence[_Route]) -> tuple[layout.Rows, npt.NDArray[np.uint8]]:
        """The routes as the kernels have them, and the bytes of names and values."""
        table, texts = np.zeros(max(1, len(routes)), dtype=ROUTE), bytearray(plans.names)
        table["route"] = -1
        for each, route in enumerate(routes):
            topic = self._session.index.get(route.topic, -1)
            partitions = self._session.partitions[route.topic] if topic >= 0 else 1
            table[each] = (_number(route.of), len(texts), len(texts) + len(route.value), topic, partitions)
            texts += route.value
        return table, np.frombuffer(texts, dtype=np.uint8)


def warm_up() -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`."""
    compiled.warm_up("outbox", _encode_nothing)


def _is_outbox(version: Version) -> bool:
    """Whether it is that of a table; messages that describe records are none."""
    return version.table.outbox and version.table.oid != 0


def _number(route: str) -> int:
    """A number by which the kernels tell outboxes apart."""
    return hash(route) & 0x7FFFFFFFFFFFFFFF


def _encode_nothing() -> None:
    data, nothing = np.zeros(1, dtype=np.uint8), np.zeros(0, dtype=np.int64)
    changes, fields = np.zeros(0, dtype=layout.CHANGE), np.zeros(1, dtype=layout.FIELD)
    tables = np.zeros(1, dtype=PLAN), np.zeros(1, dtype=PART), np.zeros(1, dtype=ROUTE)
    find_route(data, changes, nothing, 0, fields, *tables, data)
    encode_outbox(data, changes, nothing, 0, fields, *tables, data, layout.output(1, 1, 1))
