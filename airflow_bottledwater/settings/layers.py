"""The sources of settings: a configuration file, and layers in which later ones override earlier ones."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow_bottledwater.errors import SettingError

#: sections of a configuration file that contain another system's properties
_SECTIONS = {"kafka": "kafka", "schema-registry": "registry", "topic": "topic_config"}


def read_config_file(path: Path) -> dict[str, Any]:
    """Read settings from an INI file: ``[bottledwater]`` with the pipeline's settings (dashes or underscores), ``[kafka]`` and
    ``[topic]`` with Kafka's properties, ``[schema-registry]`` with those of the registry client.

    :raises SettingError: the file cannot be read, or has another section.
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
    """Merge layers of settings: later layers override earlier ones, dictionaries are merged, and None is ignored."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(name), dict):
                merged[name] = {**merged[name], **value}
            elif value is not None:
                merged[name] = value
    return merged
