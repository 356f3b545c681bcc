"""The whole description of a pipeline: all groups of settings, checked when it is made."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.pipeline.formats import ENVELOPED, FORMATS, Format
from airflow_bottledwater.pipeline.groups import (
    SERVERS,
    Connections,
    Errors,
    FormatSettings,
    GuardSettings,
    LimitSettings,
    Metrics,
    Name,
    PerformanceSettings,
    SourceSettings,
    TopicSettings,
    TypeSettings,
    VerificationSettings,
)
from airflow_bottledwater.pipeline.setting import described, plain, unknown

#: PostgreSQL's names have at most 63 bytes (NAMEDATALEN), and the second publication's has "_unkeyed" behind it
MAX_PUBLICATION_BYTES = 54
#: the settings of forms for whose values Kafka Connect's JsonConverter has no schema, and what is said of these
_WITHOUT_SCHEMA = {
    "json_documents": "documents have",
    "json_geometries": "a GeoJSON object has",
    "json_numeric": "numbers of any size have",
}


def first_broker(kafka: Mapping[str, str]) -> str:
    """Host and port of the first of the brokers, by which a Kafka is named."""
    return kafka[SERVERS].split(",")[0].strip().rpartition("://")[2]


# the bases are in reverse, since a dataclass has the fields of its last base first
@dataclass(frozen=True, kw_only=True)
class Settings(
    Metrics,
    VerificationSettings,
    GuardSettings,
    LimitSettings,
    PerformanceSettings,
    Errors,
    TypeSettings,
    TopicSettings,
    FormatSettings,
    SourceSettings,
    Name,
    Connections,
):
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
        self._check_envelope()

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Make a pipeline from values of a form or a file; None means the default.

        :raises SettingError: a name is unknown, or a value is not allowed.
        """
        for name in values:
            if name not in SETTINGS:
                raise unknown(name, SETTINGS)
        return cls(**{"postgres": "", **{name: value for name, value in values.items() if value is not None}})

    def _check_envelope(self) -> None:
        """:raises SettingError: what is said of the rows does not go into the envelope."""
        if self.before != "none" and self.envelope != "none":
            said = "cannot be 'header' with an envelope, which has the old row in its field before"
            raise SettingError("before", self.before, "none", problem=said)
        if self._offered("not_null") == "required" and (self.before, self.envelope) != ("none", "none"):
            said = "cannot be 'required' with old rows (envelope, before): of many, only the key is known"
            raise SettingError("not_null", "required", "nullable", problem=said)
        if self.envelope == "none":
            return
        if self.format not in ENVELOPED:
            said = f"cannot be {self.envelope!r} with format = {self.format}"
            raise SettingError("envelope", self.envelope, f"none, or format = {' or '.join(ENVELOPED)}", problem=said)
        for name, what in _WITHOUT_SCHEMA.items() if self.envelope_schema else ():
            if (value := self._offered(name)) != SETTINGS[name].default:
                said = f"cannot be {value!r} with envelope_schema: {what} no schema of Kafka Connect"
                raise SettingError(name, value, SETTINGS[name].default, problem=said)

    @property
    def first_broker(self) -> str:
        """See :func:`first_broker`."""
        return first_broker(self.kafka)

    @property
    def sends_messages(self) -> bool:
        """Whether PostgreSQL is asked for logical messages."""
        return bool(self.messages or self.ddl_topic)

    @property
    def publication_name(self) -> str:
        """The name of the publication of the keyed tables."""
        return self.publication or self.slot

    @property
    def record_format(self) -> Format:
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
            temporal=self._offered("temporal"),
        )

    def _offered(self, name: str) -> Any:
        """A setting that not each format offers: its default with the others."""
        return getattr(self, name) if name in self.record_format.offers else SETTINGS[name].default

    def chosen(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as JSON values; no secrets."""
        return {
            name: plain(value)
            for name, setting in SETTINGS.items()
            if not setting.secret and (value := getattr(self, name)) != setting.default
        }

    def with_hash_key(self) -> Settings:
        """A copy with the key of ``hash_key_file``; the same if there is none.

        :raises SettingError: the file cannot be read, or has no key.
        """
        if not self.hash_key_file or self.hash_key:
            return self
        try:
            key = Path(self.hash_key_file).read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(
                "hash_key_file",
                self.hash_key_file,
                "a readable file",
                problem=f"cannot be read ({type(error).__name__})",
            ) from None
        if not key:
            SETTINGS["hash_key"].refuse(key)
        return self.with_(hash_key=key)

    def with_(self, **changes: Any) -> Settings:
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
            json.dump({name: plain(getattr(self, name)) for name in SETTINGS}, file)
        return Path(name)

    @classmethod
    def read(cls, path: Path, **more: Any) -> Settings:
        """The inverse of :meth:`write`.

        :param more: settings that override those of the file.
        :raises OSError: the file cannot be read.
        :raises SettingError: a setting is unknown or not allowed.
        """
        return cls.of(**{**json.loads(path.read_text()), **more})


#: the groups of settings, in the order of docs/settings.md
GROUPS: tuple[type, ...] = Settings.__bases__[::-1]


#: all settings by their names
SETTINGS = described(Settings, [field.name for field in fields(Settings)])
