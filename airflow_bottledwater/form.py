"""A form for DAGs that any pipeline can be run with: a field for each setting, and a pipeline whose values are those of
the form."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from airflow.sdk import Param

from airflow_bottledwater.dag import Pipeline, text_of
from airflow_bottledwater.pipeline import file
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.section import Section
from airflow_bottledwater.pipeline.setting import Setting

#: the names of fields that are not those of the setting: a form has no sections in its names
_NAMES = {
    "name": "slot",
    "source.conn_id": "postgres_conn_id",
    "kafka.conn_id": "kafka_conn_id",
    "kafka.registry": "schema_registry_conn_id",
    "spark.conn_id": "spark_conn_id",
    "spark.conf": "spark_conf",
}
#: what everybody fills in: Airflow's form opens what has no section
OPEN = (
    "source.conn_id", "name", "source.tables", "source.schemas", "kafka.conn_id", "kafka.registry", "spark.conn_id",
    "kafka.topic_prefix", "kafka.format",
)  # fmt: skip
#: what only the command or a file has
_LEFT_OUT = ("saved", "spark.master", "schedules.bounded", "schedules.verify", "schedules.backfill_by",
             "schedules.approve")  # fmt: skip
#: the titles of the sections that are closed at first, by the part of the description
_SECTIONS = {"source": "Source", "kafka": "Kafka", "types": "Types", "spark": "Spark", "": "Behaviour"}


def _settings() -> dict[str, Setting]:
    """All settings of a description by their paths, without secrets."""
    sections: list[type[Section]] = [*Description.parts().values(), Description]
    found = {setting.name: setting for section in sections for setting in section.described().values()}
    return {path: each for path, each in found.items() if not each.secret and path not in _LEFT_OUT}


def field_of(path: str) -> str:
    """The name of a setting's field."""
    return _NAMES.get(path, path.rpartition(".")[2])


def fields(only: Collection[str] = ()) -> dict[str, Param]:
    """The fields of a form, generated from the settings: types, choices, patterns and limits are theirs.

    :param only: the paths of the settings that the form has, all of them open; empty for all, of which :data:`OPEN` are
        open.
    """
    settings = _settings()
    order = only or [*OPEN, *(path for path in settings if path not in OPEN)]
    return {field_of(path): _field(path, settings[path], opened=bool(only) or path in OPEN) for path in order}


def _field(path: str, setting: Setting, *, opened: bool) -> Param:
    found = file.schema_of(setting.hint)
    schema: dict[str, Any] = {name: each for name, each in found.items() if name not in ("description", "default")}
    if "enum" in schema:
        # the default first, as in the documentation
        schema |= {"type": "string", "enum": setting.allowed.split(" or ")}
    else:
        # a field that was cleared means the default
        schema["type"] = [schema["type"], "null"] if setting.default in ((), {}, "") else schema["type"]
    default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    more = {} if opened else {"section": _SECTIONS[path.rpartition(".")[0]]}
    title = field_of(path).replace("_conn_id", " connection").replace("_", " ")
    return Param(default, title=title[0].upper() + title[1:], description=setting.sentence, **schema, **more)


def pipeline(only: Collection[str] = ()) -> Pipeline:
    """The pipeline whose values are those of the form, as templates for a DAG with ``render_template_as_native_obj``,
    as all of this package are.

    :param only: as of :func:`fields`; the other settings are those of the pipeline's saved state.
    """
    values: dict[str, Any] = {"saved": bool(only)}
    settings = _settings()
    for path in only or settings:
        section, _, name = path.rpartition(".")
        place = values.setdefault(section, {}) if section else values
        field = field_of(path)
        place[name] = text_of(field) if settings[path].type is str else f"{{{{ params.{field} }}}}"
    return Pipeline.of(values)
