"""The file that describes a pipeline: YAML of the same shape as the objects, checked when it is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.rules import Written

D = TypeVar("D", bound=Description)

#: how the name of a file ends
SUFFIXES = (".yaml", ".yml")
#: the JSON schema of the file, for editors
SCHEMA = Path(__file__).with_name("pipeline.schema.json")
_PLAIN = ["string", "number", "boolean"]
#: octal and sexagesimal numbers
_OTHER_BASE = re.compile(r"[-+]?0[0-9_]|.*:")
#: by the type of a setting, the others that its values may have in a file
_FORMS = {
    "array": ["string"],
    "boolean": ["string", "integer"],
    "integer": ["string"],
    "number": ["string"],
    "object": [],
    "string": ["number"],
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that a mapping has twice, of which the first would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See the class."""
        seen: set[str] = set()
        for key in (each for each, _ in node.value if isinstance(each, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} is there twice,{key.start_mark}"
                )
            seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int | str:
        """A number that is a text as it is written, where a text is wanted: to YAML 1.1, 2024_07 is 202407, which would
        be another name. What it reads to other bases without saying so is a text only: 0123, and 12:30."""
        if _OTHER_BASE.match(node.value):
            return str(node.value)
        number = Written(super().construct_yaml_int(node))
        number.written = node.value
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load(path: Path | str, kind: type[D]) -> D:
    """The pipeline that a file describes.

    :param kind: the class to make.
    :raises SettingError: the file cannot be read, or a value is not allowed. The message names the file and the path of
        the key.
    """
    try:
        raw = yaml.load(Path(path).read_bytes(), _Loader)  # noqa: S506 - it is a safe one
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise SettingError(str(path), None, "a readable YAML file", problem=f"cannot be read ({why})") from None
    if not isinstance(raw, dict):
        raise SettingError(str(path), None, "a YAML mapping, as in docs/settings.md", problem="is no mapping")
    try:
        return kind.of(raw)
    except SettingError as error:
        raise error.within(str(path)) from None


def load_folder(folder: Path | str, kind: type[D]) -> tuple[list[D], list[SettingError]]:
    """The pipelines of all files of a folder, in the order of the files' names, and what is wrong with the files that
    describe none: see :func:`load`; or another file describes a pipeline of the same name already."""
    found: dict[str, D] = {}
    errors: list[SettingError] = []
    for path in sorted(each for each in Path(folder).iterdir() if each.suffix in SUFFIXES):
        try:
            made = load(path, kind)
            if made.name in found:
                allowed = "another name: a second file has it already"
                raise SettingError("name", made.name, allowed, problem="is used twice").within(str(path))
        except SettingError as error:
            errors.append(error)
        else:
            found[made.name] = made
    return list(found.values()), errors


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a description or of one of its settings, which allows what these allow: also values for texts
    that are none in YAML and JSON.

    :param kind: the class, or the type of the setting.
    """
    found = msgspec.json.schema(kind)
    parts = (each for made in found.get("$defs", {}).values() for each in made.get("properties", {}).values())
    for values in (each.get("additionalProperties", {}) for each in (found, *parts)):
        if values.get("type") == "string" and "maxLength" not in values:
            # a mask may be null; a property of a client or a topic may be a number, or a switch
            values["type"] = ["string", "null"] if "null" in values.get("pattern", "") else _PLAIN
    return found


def _loosened(rule: dict[str, Any]) -> dict[str, Any]:
    """The rule of a key with the other forms that its values may have: nothing, texts, and for texts numbers."""
    if (kind := rule.get("type")) in _FORMS:
        return {**rule, "type": [kind, *_FORMS[kind], "null"]}
    told: dict[str, Any] = {name: rule[name] for name in ("description", "default") if name in rule}
    return {**told, "anyOf": [{name: each for name, each in rule.items() if name not in told}, {"type": "null"}]}


def schema() -> dict[str, Any]:
    """The JSON schema of the file. It allows what the description allows; names are known, and no others are."""
    found = schema_of(Description)
    for made in found["$defs"].values():
        made["properties"] = {name: _loosened(rule) for name, rule in made["properties"].items()}
        made["additionalProperties"] = False
        made["description"] = " ".join(made["description"].partition("\n\n")[0].split())  # its first paragraph
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A pipeline of Bottled Water", **found}
    # with lists for the defaults that are tuples
    return dict(msgspec.json.decode(msgspec.json.encode(whole)))


if __name__ == "__main__":
    SCHEMA.write_bytes(msgspec.json.format(msgspec.json.encode(schema())) + b"\n")
