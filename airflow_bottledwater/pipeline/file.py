"""The file that describes a pipeline: YAML of the same shape as the objects, checked when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.description import Description

D = TypeVar("D", bound=Description)

#: how the name of a file ends
SUFFIXES = (".yaml", ".yml")
#: the JSON schema of the file, for editors
SCHEMA = Path(__file__).with_name("pipeline.schema.json")


def load(path: Path | str, kind: type[D]) -> D:
    """The pipeline that a file describes.

    :param kind: the class to make.
    :raises SettingError: the file cannot be read, or a value is not allowed. The message names the file and the path of
        the key.
    """
    try:
        raw = msgspec.yaml.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise SettingError(str(path), None, "a readable YAML file", problem=f"cannot be read ({why})") from None
    if not isinstance(raw, dict):
        raise SettingError(str(path), None, "a YAML mapping, as in docs/settings.md", problem="is no mapping")
    try:
        return kind.of(raw)
    except SettingError as error:
        raise error.within(str(path)) from None


def load_folder(folder: Path | str, kind: type[D]) -> list[D]:
    """The pipelines of all files of a folder, in the order of the files' names.

    :raises SettingError: see :func:`load`; or two files describe pipelines of one name.
    """
    found: dict[str, D] = {}
    for path in sorted(each for each in Path(folder).iterdir() if each.suffix in SUFFIXES):
        made = load(path, kind)
        if made.name in found:
            raise SettingError(
                "name", made.name, "another name: a second file has it already", problem="is used twice"
            ).within(str(path))
        found[made.name] = made
    return list(found.values())


def schema() -> dict[str, Any]:
    """The JSON schema of the file. It allows what the description allows; names are known, and no others are."""
    found = msgspec.json.schema(Description)
    for made in found["$defs"].values():
        made["additionalProperties"] = False
        made["description"] = " ".join(made["description"].partition("\n\n")[0].split())  # its first paragraph
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A pipeline of Bottled Water", **found}
    # with lists for the defaults that are tuples
    return dict(msgspec.json.decode(msgspec.json.encode(whole)))


if __name__ == "__main__":
    SCHEMA.write_bytes(msgspec.json.format(msgspec.json.encode(schema())) + b"\n")
