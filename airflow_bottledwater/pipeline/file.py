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
