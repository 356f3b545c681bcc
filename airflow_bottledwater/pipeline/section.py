"""What the parts of a description have in common: they are checked when they are made, and say where in the file they
are."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self, cast, get_type_hints

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.rules import Written
from airflow_bottledwater.pipeline.setting import Setting, described, plain, unknown


def templated(value: Any) -> bool:
    """Whether a value is a Jinja template, which is checked when Airflow has rendered it."""
    return isinstance(value, str) and ("{{" in value or "{%" in value)


class Section:
    """A part of a description: a dataclass whose fields are settings, or parts of their own.

    :cvar AT: the path of its key in the file, with a dot behind it; empty for the whole.
    :raises SettingError: a value is not allowed.
    """

    AT: ClassVar[str] = ""

    def __new__(cls, *_: object, **given: object) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_given", frozenset(given))
        return made

    @property
    def given(self) -> Collection[str]:
        """Its own settings that were given by name: with its default value, too, one takes back what is saved, or what
        a less specific pattern says of a table."""
        return cast("frozenset[str]", vars(self)["_given"])

    def __post_init__(self) -> None:
        for name, setting in self.described().items():
            value = getattr(self, name)
            if not templated(value):
                object.__setattr__(self, name, setting.take(value))
        for name, kind in self.parts().items():
            if not isinstance(value := getattr(self, name), kind):
                raise SettingError(f"{self.AT}{name}", value, f"a {kind.__name__}, with {_names(kind)}")

    @classmethod
    @functools.cache
    def described(cls) -> dict[str, Setting]:
        """Its own settings by name; in messages, their names have the path of the section."""
        own = [field.name for field in fields(cls) if field.name not in cls.parts()]  # type: ignore[arg-type]
        return described(cls, own, prefix=cls.AT)

    @classmethod
    @functools.cache
    def parts(cls) -> dict[str, type[Section]]:
        """The parts inside of it, by name."""
        hints = get_type_hints(cls)
        return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Section)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make it from nested values of a file or a form; None means the default.

        :raises SettingError: a name does not exist, or a value is not allowed.
        """
        made = {}
        for name, value in values.items():
            part = cls.parts().get(name)
            if part is None and name not in cls.described():
                there = [kind.described()[name].name for kind in cls.parts().values() if name in kind.described()]
                raise unknown(str(name), [*cls.parts(), *cls.described()], prefix=cls.AT, elsewhere=there)
            if value is None:
                continue
            if part is not None and not isinstance(value, part):
                if not isinstance(value, Mapping):
                    raise SettingError(f"{cls.AT}{name}", value, _names(part))
                value = part.of(value)
            elif part is None and cls.described()[name].type is str and type(value) in (int, float, Written):
                # YAML, and a user's template that is rendered to a native value, make a number of a name like 2024
                value = str(value)
            made[name] = value
        return cls(**made)

    def __repr__(self) -> str:
        """What was given, without secrets: Airflow keeps this with a DAG."""
        return f"{type(self).__name__}({self.as_dict()!r})"

    def as_dict(self, *, secrets: bool = False) -> dict[str, Any]:
        """What was given (what differs from the defaults, or is in :attr:`given`), as nested JSON values.

        :param secrets: whether with what may hold secrets.
        """
        found: dict[str, Any] = {}
        for name, setting in self.described().items():
            value = getattr(self, name)
            if (value != setting.default or name in self.given) and (secrets or not setting.secret):
                found[name] = plain(value)
        for name in self.parts():
            if inside := getattr(self, name).as_dict(secrets=secrets):
                found[name] = inside
        return found

    def secrets(self) -> list[str]:
        """The names of the settings that were given and may hold secrets."""
        own = [each.name for name, each in self.described().items() if each.secret and getattr(self, name)]
        return own + [secret for name in self.parts() for secret in getattr(self, name).secrets()]


def _names(kind: type[Section]) -> str:
    return "the keys " + ", ".join([*kind.parts(), *kind.described()])
