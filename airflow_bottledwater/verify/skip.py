"""Passes over values of any Avro schema, for the columns that have no compiled form: a schema is a tree of nodes
(https://avro.apache.org/docs/1.12.0/specification/#binary-encoding)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.compiled import callee
from airflow_bottledwater.encoding.layout import Rows

#: a node: what it is; a number of bytes, or how many nodes are below it; where these are in the list of children
NODE = np.dtype([(name, np.int64) for name in ("kind", "count", "first")])
#: what a node is: nothing, a number of variable length, so many bytes, a length and so many bytes, and what has others
NOTHING, NUMBER, FIXED, SIZED, UNION, RECORD, ARRAY = range(7)
_PLAIN = {
    "null": (NOTHING, 0),
    "int": (NUMBER, 0),
    "long": (NUMBER, 0),
    "enum": (NUMBER, 0),
    "boolean": (FIXED, 1),
    "float": (FIXED, 4),
    "double": (FIXED, 8),
    "bytes": (SIZED, 0),
    "string": (SIZED, 0),
}


class Nodes:
    """The nodes of several schemas.

    :ivar named: the named types that were met, by name; those of one schema only, see :meth:`begin`.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, int, int]] = []
        self._children: list[int] = []
        self._known: dict[str, int] = {}
        self.named: dict[str, Any] = {}

    def begin(self) -> None:
        """Begin with another schema, in which names can mean something else."""
        self._known, self.named = {}, {}

    def add(self, schema: Any) -> int:
        """Add the nodes of a schema, in the order in which its document has them; returns the number of the first.

        :raises KeyError: it has a type that is not Avro's.
        """
        if isinstance(schema, list):
            return self._above(UNION, schema)
        if isinstance(schema, str):
            return self._known[schema] if schema in self._known else self._node(*_PLAIN[schema])
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self.add(kind)
        if schema.get("name"):
            self.named[schema["name"]] = schema
        if kind == "array":
            number = self._above(ARRAY, [schema["items"]])
        elif kind == "map":  # as an array of pairs
            pair = {"type": "record", "name": "", "fields": [{"type": "string"}, {"type": schema["values"]}]}
            number = self._above(ARRAY, [pair])
        elif kind == "record":
            number = self._above(RECORD, [field["type"] for field in schema["fields"]])
        elif kind == "fixed":
            number = self._node(FIXED, schema["size"])
        else:
            number = self.add(kind)
        if schema.get("name"):
            self._known[schema["name"]] = number
        return number

    def _node(self, kind: int, count: int, first: int = 0) -> int:
        self._nodes.append((kind, count, first))
        return len(self._nodes) - 1

    def _above(self, kind: int, schemas: list[Any]) -> int:
        children = [self.add(each) for each in schemas]
        self._children += children
        return self._node(kind, len(children), len(self._children) - len(children))

    def arrays(self) -> tuple[Rows, npt.NDArray[np.int64]]:
        """Nodes and children, as the kernels take them."""
        return np.array(self._nodes or [(0, 0, 0)], dtype=NODE), np.array(self._children or [0], dtype=np.int64)


def expanded(schema: Any, named: dict[str, Any], seen: set[str]) -> Any:
    """A schema in which the types that ``named`` has are written out where they are first named.

    :param seen: the names that are written out already; is added to.
    """
    if isinstance(schema, list):
        return [expanded(each, named, seen) for each in schema]
    if isinstance(schema, str):
        return schema if schema in seen or schema not in named else expanded(named[schema], named, seen)
    if "name" in schema:
        if schema["name"] in seen:
            return schema["name"]
        seen.add(schema["name"])
    found = dict(schema)
    for part in ("type", "items", "values"):
        if part in found:
            found[part] = expanded(found[part], named, seen)
    if "fields" in found:
        found["fields"] = [field | {"type": expanded(field["type"], named, seen)} for field in found["fields"]]
    return found


@callee
def varint(data, at, end):
    """(value, next) of a number of seven bits in each byte; next is -1 if the bytes end."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < end and shift < np.uint64(70):
        value |= np.uint64(data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, np.int64(at)
        shift += np.uint64(7)
    return np.uint64(0), np.int64(-1)


@callee
def long(data, at, end):
    """(value, next) of a zigzag number; next is -1 if the bytes end."""
    value, at = varint(data, at, end)
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), at


@callee
def skipped(nodes, children, number, data, at, end):
    """Behind a value; -1 if the bytes are no such value."""
    kind, count, first = nodes[number].kind, nodes[number].count, nodes[number].first
    if kind == FIXED:
        return np.int64(at + count) if at + count <= end else np.int64(-1)
    if kind == NUMBER or kind == SIZED:
        size, at = long(data, at, end)
        if kind == SIZED and at >= 0:
            return np.int64(at + size) if 0 <= size <= end - at else np.int64(-1)
        return np.int64(at)
    if kind == UNION:
        branch, at = long(data, at, end)
        if at < 0 or branch < 0 or branch >= count:
            return np.int64(-1)
        return np.int64(skipped(nodes, children, children[first + branch], data, at, end))
    if kind == RECORD:
        for n in range(count):
            at = np.int64(skipped(nodes, children, children[first + n], data, at, end)) if at >= 0 else np.int64(-1)
        return np.int64(at)
    while kind == ARRAY:
        items, at = long(data, at, end)
        if items < 0:  # the size of the block comes, too
            items = -items
            _, at = long(data, at, end)
        # an item of no bytes could come as often as a damaged count says
        if at < 0 or items < 0 or items > end - at:
            return np.int64(-1)
        if items == 0:
            break
        for _ in range(items):
            at = np.int64(skipped(nodes, children, children[first], data, at, end))
            if at < 0:
                return np.int64(-1)
    return np.int64(at)
