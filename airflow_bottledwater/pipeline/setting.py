"""The description of one setting: its rule, its sentence, its default; it converts and checks values."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, NoReturn, get_type_hints

import msgspec

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.rules import Changes, convert, inside, said, type_of


def unknown(name: str, known: Iterable[str], *, prefix: str = "", elsewhere: Sequence[str] = ()) -> SettingError:
    """The error for a name that is none of a setting's, with the nearest that is. The value is not shown: it may be a
    misspelt secret.

    :param known: the names that exist.
    :param prefix: put before the name: the path of the section that it is in.
    :param elsewhere: the paths of settings of this very name in other sections.
    """
    near = elsewhere or difflib.get_close_matches(name, sorted(known), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return SettingError(f"{prefix}{name}", None, "one of " + ", ".join(sorted(known)), problem=f"does not exist{hint}")


@dataclass(frozen=True)
class Setting:
    """The description of a setting.

    :param hint: its type with its rule, see :mod:`airflow_bottledwater.pipeline.rules`.
    :param sentence: what it is for.
    :param allowed: the allowed values in words.
    :param changes: when it may be given another value.
    :param default: its default; None if it must be given.
    :param secret: whether its value is never printed.
    """

    name: str
    hint: Any
    sentence: str
    allowed: str
    changes: Changes
    default: Any
    secret: bool

    @property
    def type(self) -> Any:
        """Its type: bool, int, float, str, tuple, dict or Literal."""
        return type_of(self.hint)

    @classmethod
    def of(cls, field: Field[Any], hint: Any, *, prefix: str) -> Setting:
        """Make the description from a field and its annotation."""
        default = field.default
        if default is MISSING:
            default = None if field.default_factory is MISSING else field.default_factory()
        return cls(f"{prefix}{field.name}", hint, default=default, secret=not field.repr, **said(hint))

    def take(self, value: Any) -> Any:
        """A value, converted to the setting's type.

        :raises SettingError: it is not allowed.
        """
        try:
            if (kind := inside(self.hint)) is not None and isinstance(value, Mapping):
                return {str(name): self._part(kind, str(name), each) for name, each in value.items()}
            return convert(self.hint, value)
        except (msgspec.ValidationError, UnicodeError):  # an argument may have bytes that are no text
            self.refuse(value)

    def _part(self, kind: Any, name: str, value: Any) -> Any:
        """A part of a description under a name that the user chooses.

        :raises SettingError: it is none, or one of its values is not allowed.
        """
        if isinstance(value, kind):
            return value
        if value is None:  # a key of a file without a value
            return kind()
        if not isinstance(value, Mapping):
            raise SettingError(f"{self.name}.{name}", value, "the keys " + ", ".join(kind.described()))
        try:
            return kind.of(value)
        except SettingError as error:
            at = f"{self.name}.{name}.{error.setting}"
            raise SettingError(at, error.value, error.allowed, error.problem) from None

    def refuse(self, value: Any) -> NoReturn:
        """Raise the error for a value that is not allowed, without showing a secret.

        :raises SettingError: always.
        """
        if not self.secret:
            raise SettingError(self.name, value, self.allowed) from None
        missing = value in ("", {})
        problem = "is missing" if missing else "has a value that is not allowed (not shown, since it may hold secrets)"
        raise SettingError(self.name, None, self.allowed, problem=problem) from None


def described(kind: Any, names: Collection[str], *, prefix: str = "") -> dict[str, Setting]:
    """The descriptions of settings by name.

    :param kind: the class whose fields they are.
    :param names: the fields that are settings.
    :param prefix: put before their names in messages.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: Setting.of(field, hints[field.name], prefix=prefix) for field in fields(kind) if field.name in names
    }


def plain(value: Any) -> Any:
    """The value of a setting as a JSON value; of the parts of a description in it, what was given."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {name: plain(each.as_dict() if hasattr(each, "as_dict") else each) for name, each in value.items()}
    return value
