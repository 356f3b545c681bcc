"""The rules of settings: how a loosely typed value (from a form, a file, an option) is converted, and which values are
allowed.

A setting's rule is its annotation, which msgspec checks: ``Annotated[type, about("What it is for.", limits)]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from airflow_bottledwater.errors import SettingError

#: when a setting may be given another value
Changes = Literal["never", "at the next start", "at each use"]

#: what is allowed, by type, where a rule does not say it in its own words
_ALLOWED: Mapping[Any, str] = {
    bool: "true or false",
    tuple: "a list of texts (in YAML, quote null and no), or one text with commas",
    dict: "names with values",
}


def about(sentence: str, *, allowed: str = "", changes: Changes = "at the next start", **limits: Any) -> Meta:
    """The rule of a setting.

    :param sentence: what it is for.
    :param allowed: the allowed values in words, where the type does not say it.
    :param changes: when it may be given another value.
    :param limits: of :class:`msgspec.Meta`: ``ge``, ``le``, ``pattern`` and so on.
    """
    extra = {"changes": changes, **({"allowed": allowed} if allowed else {})}
    return Meta(description=sentence, extra=extra, **limits)


def limited(allowed: str, **limits: Any) -> Meta:
    """The limits of a type that several settings have, in words and for :class:`msgspec.Meta`."""
    return Meta(extra={"allowed": allowed}, **limits)


def type_of(hint: Any) -> Any:
    """The type of an annotation without its limits: a class, or Literal."""
    bare = hint.__origin__ if get_origin(hint) is Annotated else hint
    return get_origin(bare) or bare


def inside(hint: Any) -> Any:
    """The type of the values of a dictionary that are parts of a description; None if they are not."""
    bare = hint.__origin__ if get_origin(hint) is Annotated else hint
    kind = get_args(bare)[1] if type_of(hint) is dict else None
    return kind if hasattr(kind, "of") else None


def said(hint: Any) -> dict[str, Any]:
    """What an annotation says about its setting: ``sentence``, ``allowed`` and ``changes``.

    :raises TypeError: it lacks one of these.
    """
    metas = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Meta)]
    found: dict[str, Any] = {}
    if get_origin(hint) is Annotated and type_of(hint) is Literal:
        found["allowed"] = " or ".join(get_args(hint.__origin__))
    elif type_of(hint) in _ALLOWED:
        found["allowed"] = _ALLOWED[type_of(hint)]
    for meta in metas:
        found |= meta.extra or {}
        if meta.description:
            found["sentence"] = meta.description
    if missing := {"sentence", "allowed", "changes"} - found.keys():
        raise TypeError(f"A setting needs {', '.join(sorted(missing))}: Annotated[{hint!r}, about(...)].")
    return found


def listed(value: Sequence[Any] | str | None) -> list[str]:
    """A list of texts, which may be given as one text with commas."""
    if value is None:
        return []
    parts = value.split(",") if isinstance(value, str) else value
    _refuse_no_texts(parts)
    # a template makes a number of a table called 2024
    return [text for part in parts if (text := str(part).strip())]


def selected(value: Sequence[Any] | str | None) -> list[str]:
    """Patterns of tables, as :func:`listed` takes them; empty, which may mean all tables, only if none were given.

    :raises SettingError: what was given has no pattern, as a template or a variable of a shell that came out empty.
    """
    found = listed(value)
    if not found and (isinstance(value, str) or value):
        raise SettingError("tables", value, "[schema.]table, or a pattern; leave it out where all tables are meant")
    return found


def refuse_none(tables: Sequence[str]) -> None:
    """Check that tables are named, where no name must not mean all of them.

    :raises SettingError: none is.
    """
    if not tables:
        raise SettingError("tables", "", "at least one table ('*' means all of public)")


def _refuse_no_texts(values: Iterable[Any]) -> None:
    """Refuse what is no name of anything: in YAML, no and an empty item are not texts unless they are quoted.

    :raises msgspec.ValidationError: there is a switch, or nothing.
    """
    if any(each is None or isinstance(each, bool) for each in values):
        raise msgspec.ValidationError("There is a value that is no text.")


class Written(int):
    """A number, which as a text is what was written."""

    written: str

    def __str__(self) -> str:
        return self.written


def convert(hint: Any, value: Any) -> Any:
    """A value, converted to the type of an annotation: numbers and switches may be texts, lists one text with commas,
    and properties without a value (null in a connection's extra) are left out.

    :raises msgspec.ValidationError: it is not allowed.
    """
    kind = type_of(hint)
    if kind is tuple:
        if isinstance(value, str | list | tuple):
            value = listed(value)
    elif kind is dict and isinstance(value, Mapping):
        # properties of servers, whose values have no limits here, may be switches, and their numbers are meant as such
        if get_origin(get_args(getattr(hint, "__origin__", hint))[1]) is not None:
            _refuse_no_texts(value.values())
        else:
            value = {name: int(each) if isinstance(each, Written) else each for name, each in value.items()}
        value = {str(name): str(each) for name, each in value.items() if each is not None}
    return msgspec.convert(value, hint, strict=False)
