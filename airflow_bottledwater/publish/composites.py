"""Values of composites in binary form, which PostgreSQL takes only with exactly the attributes that the type has when
it takes them."""

from __future__ import annotations

from airflow_bottledwater.model.relation import ColumnType

_NULL = (-1).to_bytes(4, "big", signed=True)


def with_known_attributes(kind: ColumnType, value: bytes) -> bytes | None:
    """A value with NULL for each attribute that was added to its type after it was written; None if it has attributes
    that are not known, or of other types.

    :param kind: the value's type, as it is known: a composite, an array of composites, or a type without attributes.
    :param value: as record_send and array_send write it (src/backend/utils/adt/rowtypes.c, arrayfuncs.c).
    """
    if kind.attributes:
        return _record(kind, value)
    if kind.kind == "b" and kind.element is not None and kind.element.attributes:
        # int32 dimensions, flags and element type; for each dimension int32 size and lower bound; then the elements
        at = 12 + 8 * int.from_bytes(value[:4], "big")
        parts = [value[:at]]
        while at < len(value):
            item, at = _item(kind.element, value, at)
            if item is None:
                return None
            parts.append(item)
        return b"".join(parts)
    return value


def _record(kind: ColumnType, value: bytes) -> bytes | None:
    # int32 count; for each attribute int32 type, and its value
    count, at = int.from_bytes(value[:4], "big"), 4
    if count > len(kind.attributes):
        return None
    parts = [len(kind.attributes).to_bytes(4, "big")]
    for attribute in kind.attributes[:count]:
        parts.append(_oid(attribute.type))
        if value[at : at + 4] != parts[-1]:
            return None
        item, at = _item(attribute.type, value, at + 4)
        if item is None:
            return None
        parts.append(item)
    parts += [_oid(attribute.type) + _NULL for attribute in kind.attributes[count:]]
    return b"".join(parts)


def _oid(kind: ColumnType) -> bytes:
    return kind.oid.to_bytes(4, "big")


def _item(kind: ColumnType, value: bytes, at: int) -> tuple[bytes | None, int]:
    """The item at a position, an int32 length (-1: NULL) and a value, and the position behind it."""
    length = int.from_bytes(value[at : at + 4], "big", signed=True)
    if length < 0:
        return _NULL, at + 4
    end = at + 4 + length
    item = with_known_attributes(kind, value[at + 4 : end])
    return None if item is None else len(item).to_bytes(4, "big") + item, end
