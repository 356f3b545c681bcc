"""The whole description of a pipeline: all groups of settings, checked when it is made."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import MISSING, Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import msgspec

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.pipeline.formats import Format as RecordFormat
from airflow_bottledwater.pipeline.groups import (
    SERVERS,
    Connections,
    Errors,
    Format,
    Limits,
    Metrics,
    Name,
    Pace,
    Source,
    Topics,
    Types,
    Verification,
)
from airflow_bottledwater.pipeline.rules import Changes, convert, said, type_of

#: PostgreSQL's names have at most 63 bytes (NAMEDATALEN), and the second publication's has "_unkeyed" behind it
MAX_PUBLICATION_BYTES = 54


def unknown(name: str, known: Iterable[str], *, prefix: str = "") -> SettingError:
    """The error for a name that is none of a setting's, with the nearest that is. The value is not shown: it may be a
    misspelt secret.

    :param known: the names that exist.
    :param prefix: put before the name: the path of the section that it is in.
    """
    near = difflib.get_close_matches(name, known := sorted(known), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return SettingError(f"{prefix}{name}", None, "one of " + ", ".join(known), problem=f"does not exist{hint}")


# the bases are in reverse, since a dataclass has the fields of its last base first
@dataclass(frozen=True, kw_only=True)
class Pipeline(Metrics, Verification, Limits, Pace, Errors, Types, Topics, Format, Source, Name, Connections):
    """All settings of a pipeline; see docs/settings.md. Only its :class:`Connections` contain secrets.

    Loosely typed values (from a form, a file) are converted: lists to tuples, texts to numbers or switches.

    :raises SettingError: a value is not allowed.
    """

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, setting.take(getattr(self, name)))
        # what one rule cannot say
        if len(self.publication.encode(errors="surrogatepass")) > MAX_PUBLICATION_BYTES:
            SETTINGS["publication"].refuse(self.publication)
        if not self.kafka.get(SERVERS):
            SETTINGS["kafka"].refuse(self.kafka)
        if self.record_format.uses_registry and not self.registry.get("url"):
            SETTINGS["registry"].refuse(self.registry)

    @classmethod
    def of(cls, **values: Any) -> Pipeline:
        """Make a pipeline from values of a form or a file; None means the default.

        :raises SettingError: a name is unknown, or a value is not allowed.
        """
        for name in values:
            if name not in SETTINGS:
                raise unknown(name, SETTINGS)
        return cls(**{"postgres": "", **{name: value for name, value in values.items() if value is not None}})

    @property
    def publication_name(self) -> str:
        """The name of the publication of the keyed tables."""
        return self.publication or self.slot

    @property
    def record_format(self) -> RecordFormat:
        """The format of the records."""
        return FORMATS[self.format]

    @property
    def forms(self) -> TypeOptions:
        """The forms in which types are published, as far as the format offers a choice."""
        exact = self._offered("json_numeric") == "number" and self.numeric != "double"
        return TypeOptions(
            arrays=self.arrays,
            composites=self.composites,
            ranges=self.ranges,
            enums=self._offered("enums"),
            numeric="number" if exact else self.numeric,
            documents=self._offered("json_documents"),
            regs=self.regs,
            geometries=self._offered("json_geometries"),
            not_null=self._offered("not_null"),
        )

    def _offered(self, name: str) -> Any:
        """A setting that not each format offers: its default with the others."""
        return getattr(self, name) if name in self.record_format.offers else SETTINGS[name].default

    def public(self) -> dict[str, Any]:
        """All settings except the secrets, for logs and status."""
        return {name: value for name, value in asdict(self).items() if not SETTINGS[name].secret}

    def chosen(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as JSON values; no secrets."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.public().items()
            if value != SETTINGS[name].default
        }

    def with_(self, **changes: Any) -> Pipeline:
        """A copy with changed settings.

        :raises SettingError: a value is not allowed.
        """
        return replace(self, **changes)

    def write(self, folder: Path) -> Path:
        """Write the settings for a Spark job into a new file that only this user can read, and return its path. Secrets
        are passed in this way only, never on a command line."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix="pipeline-", suffix=".json", dir=folder)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(self), file)
        return Path(name)

    @classmethod
    def read(cls, path: Path, **more: Any) -> Pipeline:
        """The inverse of :meth:`write`.

        :param more: settings that override those of the file.
        :raises OSError: the file cannot be read.
        :raises SettingError: a setting is unknown or not allowed.
        """
        return cls.of(**{**json.loads(path.read_text()), **more})


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
            return convert(self.hint, value)
        except msgspec.ValidationError:
            self.refuse(value)

    def refuse(self, value: Any) -> NoReturn:
        """Raise the error for a value that is not allowed, without showing a secret.

        :raises SettingError: always.
        """
        if not self.secret:
            raise SettingError(self.name, value, self.allowed) from None
        missing = value in ("", {})
        problem = "is missing" if missing else "has a value that is not allowed (not shown, since it may hold secrets)"
        raise SettingError(self.name, None, self.allowed, problem=problem) from None


#: the groups of settings, in the order of docs/settings.md
GROUPS: tuple[type, ...] = Pipeline.__bases__[::-1]


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


#: all settings by their names
SETTINGS = described(Pipeline, [field.name for field in fields(Pipeline)])
