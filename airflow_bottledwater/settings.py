"""The one description of a pipeline, for DAG params, the command line and the Spark jobs alike."""

from __future__ import annotations

import configparser
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.model.forms import Forms
from airflow_bottledwater.model.lsn import POSITION
from airflow_bottledwater.model.slot import SLOT_NAME

DEFAULT_BROKER = "localhost:9092"
DEFAULT_REGISTRY = "http://localhost:8081"


@dataclass(frozen=True)
class Pipeline:
    """Everything that a pipeline is; see docs/settings.md. Secrets are only in the first three.

    :param postgres: connection string or URI of the source database (libpq's syntax; a service or password file works).
    :param kafka: librdkafka properties, at least ``bootstrap.servers``.
    :param registry: properties of the schema registry client, at least ``url``; unused with JSON.
    """

    postgres: str = field(repr=False)
    kafka: dict[str, str] = field(repr=False, default_factory=lambda: {"bootstrap.servers": DEFAULT_BROKER})
    registry: dict[str, str] = field(repr=False, default_factory=lambda: {"url": DEFAULT_REGISTRY})

    # what
    slot: str = "bottledwater"
    publication: str = ""  # empty: the slot's name
    tables: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    topic_prefix: str = ""
    output_format: str = "avro"
    allow_unkeyed: bool = False
    skip_snapshot: bool = False

    # how errors are met
    on_error: str = "exit"
    on_truncate: str = "event"
    outage_timeout: float = 300.0
    skip_position: str = ""

    # what may be made or used
    create_publication: bool = True
    create_topics: bool = True
    adopt_slot: bool = False
    share_topics: bool = False
    partitions: int = 1
    replication_factor: int = 3
    unkeyed_retention_ms: int = -1
    topic_config: dict[str, str] = field(default_factory=dict)
    xid_header: bool = False
    snapshot_headers: bool = False

    # in which form types are published that have several
    arrays: str = "array"
    composites: str = "record"
    ranges: str = "text"
    enums: str = "string"
    numeric: str = "decimal"
    json_numeric: str = "string"
    json_documents: str = "string"
    json_geometries: str = "ewkb"
    regs: str = "number"
    not_null: str = "nullable"

    # pace
    engine: str = "continuous"
    lanes: int = 2
    range_bytes: int = 16 << 20
    batch_bytes: int = 8 << 20
    buffer_bytes: int = 64 << 20
    max_transaction_bytes: int = 16 << 20
    keepalive_interval: float = 5.0
    heartbeat_interval: float = 2.0
    transaction_timeout: float = 60.0
    create_slot_timeout: float = 300.0
    lock_queue_limit: float = 30.0

    def __post_init__(self) -> None:
        for name, (check, allowed) in _RULES.items():
            value = getattr(self, name)
            if not check(value):
                raise SettingError(name, value, allowed)
        if not isinstance(self.postgres, str) or not self.postgres.strip():
            raise SettingError("postgres", "", "a connection string such as 'host=db dbname=shop user=cdc', or a URI")
        if not self.kafka.get("bootstrap.servers"):
            raise SettingError("kafka", "", "librdkafka properties with bootstrap.servers")
        if self.output_format == "avro" and not self.registry.get("url"):
            raise SettingError("registry", "", "properties with the url of a schema registry (or output_format json)")

    @classmethod
    def of(cls, **values: Any) -> Pipeline:
        """From loosely typed values (a form, a file): None is left out, lists become tuples, texts numbers.

        :raises SettingError: an unknown name, or a value that is not allowed.
        """
        known = {f.name: f for f in fields(cls)}
        clean: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise SettingError(name, value, "one of " + ", ".join(sorted(known)))
            if value is not None:
                clean[name] = _coerce(name, value, str(known[name].type))
        return cls(**{"postgres": "", **clean})

    @property
    def publication_name(self) -> str:
        """The publication of the keyed tables."""
        return self.publication or self.slot

    @property
    def forms(self) -> Forms:
        """The forms of types that this output format has."""
        as_json = self.output_format == "json"
        exact = as_json and self.json_numeric == "number" and self.numeric != "double"
        return Forms(
            arrays=self.arrays,
            composites=self.composites,
            ranges=self.ranges,
            enums="string" if as_json else self.enums,
            numeric="number" if exact else self.numeric,
            documents=self.json_documents if as_json else "string",
            regs=self.regs,
            geometries=self.json_geometries if as_json else "ewkb",
            not_null="nullable" if as_json else self.not_null,
        )

    def public(self) -> dict[str, Any]:
        """All but the secrets, for logs and status."""
        return {k: v for k, v in asdict(self).items() if k not in _SECRET}

    def with_(self, **changes: Any) -> Pipeline:
        """A changed copy."""
        return replace(self, **changes)

    def write(self, folder: Path) -> Path:
        """Store it for a Spark job in a file that only this user can read: the way of secrets, which never go through a
        command line."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix="pipeline-", suffix=".json", dir=folder)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(self), file)
        return Path(name)

    @classmethod
    def read(cls, path: Path) -> Pipeline:
        """The inverse of :meth:`write`."""
        return cls.of(**json.loads(path.read_text()))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and _between(low, high)(value)


def _text(check: Callable[[str], bool]) -> Callable[[Any], bool]:
    # what is not UTF-8 (a lone surrogate) is no name anywhere
    return lambda value: isinstance(value, str) and value.encode(errors="replace").decode() == value and check(value)


def _one_of(*allowed: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in allowed), " or ".join(allowed)


_BOOL = (_is_bool, "true or false")
_SECONDS = (_between(0.05, 86_400 * 7), "seconds, from 0.05 to a week")
_BYTES = (_whole(64 * 1024, 1 << 34), "bytes, from 64 KiB to 16 GiB")
_TOPIC_CHARACTERS = re.compile(r"^[A-Za-z0-9._-]{0,180}\Z")

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "slot": (_text(lambda v: bool(SLOT_NAME.match(v))), "1 to 63 lower-case letters, digits and underscores"),
    "publication": (_text(lambda v: len(v.encode()) <= 54), "at most 54 bytes (a second publication appends _unkeyed)"),
    "topic_prefix": (
        _text(lambda v: bool(_TOPIC_CHARACTERS.match(v))),
        "letters, digits, dots, dashes and underscores",
    ),
    "output_format": _one_of("avro", "json"),
    "on_error": _one_of("exit", "log"),
    "arrays": _one_of("array", "text"),
    "composites": _one_of("record", "text"),
    "ranges": _one_of("text", "record"),
    "enums": _one_of("string", "enum"),
    "numeric": _one_of("decimal", "string", "double"),
    "json_numeric": _one_of("string", "number"),
    "json_documents": _one_of("string", "value"),
    "json_geometries": _one_of("ewkb", "geojson"),
    "regs": _one_of("number", "name"),
    "not_null": _one_of("nullable", "required"),
    "on_truncate": _one_of("event", "stop"),
    "engine": _one_of("continuous", "micro-batch"),
    "skip_position": (
        _text(lambda v: not v or bool(POSITION.fullmatch(v))),
        "a position as a record error names it, such as 00000000016B3748/0000000C",
    ),
    "allow_unkeyed": _BOOL,
    "skip_snapshot": _BOOL,
    "create_publication": _BOOL,
    "create_topics": _BOOL,
    "adopt_slot": _BOOL,
    "share_topics": _BOOL,
    "xid_header": _BOOL,
    "snapshot_headers": _BOOL,
    "partitions": (_whole(1, 10_000), "1 to 10000"),
    "replication_factor": (_whole(1, 32), "1 to 32"),
    "lanes": (_whole(1, 256), "1 to 256"),
    "unkeyed_retention_ms": (_whole(-1, 2**63 - 1), "milliseconds, or -1 for ever"),
    "range_bytes": _BYTES,
    "batch_bytes": _BYTES,
    "buffer_bytes": _BYTES,
    "max_transaction_bytes": _BYTES,
    "keepalive_interval": _SECONDS,
    "heartbeat_interval": _SECONDS,
    "outage_timeout": _SECONDS,
    "create_slot_timeout": _SECONDS,
    "lock_queue_limit": _SECONDS,
    "transaction_timeout": (_between(1, 900), "1 to 900 seconds (the broker's transaction.max.timeout.ms)"),
}

#: never printed
_SECRET = ("postgres", "kafka", "registry")
_FORMS = {"tuple[str, ...]": "a list of texts, or one text with commas", "dict[str, str]": "names with values"}
_TRUE, _FALSE = {"true", "yes", "y", "1", "on"}, {"false", "no", "n", "0", "off"}


def _coerce(name: str, value: Any, kind: str) -> Any:
    try:
        if kind.startswith("tuple"):
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(str(part).strip() for part in parts if str(part).strip())
        if kind.startswith("dict"):
            # null (in a connection's extra) means not set
            return {str(k): str(v) for k, v in dict(value).items() if v is not None}
        if kind == "bool" and isinstance(value, str):
            if value.lower() not in _TRUE | _FALSE:
                raise ValueError
            return value.lower() in _TRUE
        if isinstance(value, bool):
            return value
        if kind == "int":
            number = int(value)
            if isinstance(value, float) and number != value:
                raise ValueError
            return number
        if kind == "float":
            return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = "…" if name in _SECRET else value
        raise SettingError(name, shown, _RULES.get(name, (None, _FORMS.get(kind, kind)))[1]) from None
    return value


#: sections of a configuration file that hold another system's properties
_SECTIONS = {"kafka": "kafka", "schema-registry": "registry", "topic": "topic_config"}


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings of an INI file: ``[bottledwater]`` with our settings (dashes or underscores), ``[kafka]`` and ``[topic]``
    with Kafka's properties, ``[schema-registry]`` with those of the registry client.

    :raises SettingError: the file cannot be read, or has a section that is none of these.
    """
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        with path.open() as file:
            parser.read_file(file)
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise SettingError("config_file", str(path), f"a readable INI file ({type(error).__name__})") from None
    found: dict[str, Any] = {}
    for section in parser.sections():
        if section == "bottledwater":
            found |= {name.replace("-", "_"): value for name, value in parser[section].items()}
        elif section in _SECTIONS:
            found[_SECTIONS[section]] = dict(parser[section])
        else:
            raise SettingError("config_file", f"[{section}]", "sections bottledwater, kafka, topic and schema-registry")
    return found


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; dictionaries are merged; None does not count."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **value}
            elif value is not None:
                merged[name] = value
    return merged
