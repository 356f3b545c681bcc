"""The command's options, and the pipeline that they describe.

The options of settings take their text, choices and default from the settings themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from psycopg import conninfo

from airflow_bottledwater.cli.log import FORMATS, name_slot, use_format
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.jobs.restarts import RESTARTS
from airflow_bottledwater.pipeline.description import Description, Spark
from airflow_bottledwater.pipeline.file import load
from airflow_bottledwater.pipeline.groups import DEFAULT_BROKER, DEFAULT_REGISTRY, SECRET_PROPERTIES, SERVERS
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[F], F]


#: the longest time that an option may say, in seconds
LONGEST = 7 * 86_400.0


class Number(click.FloatRange):
    """A finite number, within the limits: NaN would be within all, and infinity within those without an upper one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See the class."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def timeout_option(help: str) -> Option[Any]:
    """The option ``--timeout`` of a subcommand that waits for a job, a minute if it is not given.

    :param help: what is waited for.
    """
    return click.option("--timeout", type=Number(min=0, max=LONGEST), default=60.0, show_default=True, help=help)


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


def _pairs(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals:
            raise click.BadParameter(f'Expected configuration in the form property=value, not "{value}"')
        found[name] = rest
    return found


def _properties(*names: str, text: str, metavar: str = "PROPERTY=VALUE") -> Option[Any]:
    """An option that can be given several times, once for each property."""
    return click.option(*names, multiple=True, callback=_pairs, metavar=metavar, help=f"{text}; repeatable.")


def _setting(*names: str, default: str = "") -> Option[Any]:
    """The option for the setting of the same name.

    :param default: the meaning of an empty value, if the setting's sentence does not mention it.
    """
    setting = SETTINGS[names[-1].removeprefix("--").replace("-", "_")]
    if setting.type is bool:
        return click.option(*names, is_flag=True, default=None, help=setting.sentence)
    if setting.type is dict:
        return _properties(*names, text=setting.sentence.removesuffix("."))
    notes = []
    if setting.type is Literal:
        notes.append(setting.allowed)
    if setting.type is tuple:
        notes.append("comma-separated")
    if shown := setting.default or default:
        notes.append(f"default: {shown}")
    return click.option(*names, help=setting.sentence + (f"  [{'; '.join(notes)}]" if notes else ""))


def _choose_format(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        use_format(value)


_SOURCE = _setting("-d", "--postgres")
_CONFIG = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    help="YAML file that describes the pipeline (docs/settings.md); options win over it.",
)
#: where a Kafka is: of all that a pipeline has, or of what is about all pipelines of a Kafka
_BROKER = click.option("-b", "--broker", help=f"Comma-separated Kafka servers.  [default: {DEFAULT_BROKER}]")
_KAFKA: tuple[Option[Any], ...] = (
    _properties("-C", "--kafka-config", text="A librdkafka property"),
    _CONFIG,
)
_OF_ALL: tuple[Option[Any], ...] = (
    click.option(
        "--allow-password-argument",
        is_flag=True,
        help="Accept a password on the command line, where others can see it.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(FORMATS),
        # first, so that what is wrong with other options is said in this format, too
        is_eager=True,
        expose_value=False,
        callback=_choose_format,
        help="How log lines are written.  [default: text, at a terminal without the time]",
    ),
)
_OF_A_PIPELINE: tuple[Option[Any], ...] = (
    _SOURCE,
    _setting("-s", "--slot"),
    _BROKER,
    click.option(
        "-r", "--schema-registry", help=f"URL of the schema registry (not for json).  [default: {DEFAULT_REGISTRY}]"
    ),
    _setting("-f", "--format"),
    _setting("-p", "--topic-prefix"),
    *_KAFKA,
    _properties("--set", "settings", text="A setting of docs/settings.md that has no option", metavar="SETTING=VALUE"),
    *_OF_ALL,
)

_OF_SPARK: tuple[Option[Any], ...] = (
    click.option("--master", help=f"Where Spark runs the jobs.  [default: the file's, or {Spark().master}]"),
    _properties("--spark-conf", text="A Spark property"),
)

_OF_A_RUN: tuple[Option[Any], ...] = (
    _setting("-u", "--allow-unkeyed"),
    _setting("-e", "--on-error"),
    _setting("-x", "--skip-snapshot"),
    _setting("-T", "--topic-config"),
    _setting("-o", "--schemas"),
    _setting("-i", "--tables", default="all"),
    *_OF_SPARK,
    click.option("--bounded", is_flag=True, help="End when everything is published that is committed now."),
    click.option(
        "--restart",
        is_flag=True,
        help=f"After a transient failure start again, with back-off; at most {RESTARTS} times without progress.",
    ),
    click.option(
        "--assume-snapshot-complete",
        is_flag=True,
        help="The slot's records are lost, its topics are not: go on from --position.",
    ),
    click.option("--position", help="Header pos of the last record in the topics, for --assume-snapshot-complete."),
)
#: the options of a run that do not belong to the pipeline's settings
RUN_ONLY = ("master", "spark_conf", "bounded", "restart", "assume_snapshot_complete", "position")


def options(*, everything: bool) -> Option[Any]:
    """A decorator with the options that identify a pipeline; with ``everything``, also those of a run."""

    def decorate(function: F) -> F:
        for option in reversed([*_OF_A_PIPELINE, *(_OF_A_RUN if everything else ())]):
            function = option(function)
        return function

    return decorate


def kafka_options(function: F) -> F:
    """A decorator with the options of a command that is about all pipelines of a Kafka."""
    for option in reversed([_BROKER, *_KAFKA, *_OF_ALL]):
        function = option(function)
    return function


def source_options(function: F) -> F:
    """A decorator with the options of a command that is about the source database only."""
    for option in reversed([_SOURCE, _CONFIG, *_OF_ALL]):
        function = option(function)
    return function


def spark_options(function: F) -> F:
    """A decorator with the options of a command that runs a Spark job."""
    for option in reversed(_OF_SPARK):
        function = option(function)
    return function


def pipeline_of(values: dict[str, Any], *, later: bool = False, asks: bool = True) -> Settings:
    """The pipeline that the options describe: defaults, then the file, then the command line.

    :param values: the values of all options that describe a pipeline.
    :param later: whether the pipeline exists, so that its settings that are not given are those of its last start. A
        file says so by ``saved``.
    :param asks: whether they are looked up there, which asks PostgreSQL and Kafka. A command that needs no settings but
        the pipeline's name and its connections does without.
    :raises SettingError: a setting is unknown or not allowed, or a secret is on the command line.
    :raises click.UsageError: the options contradict each other, or the database is missing.
    """
    values = dict(values)
    force = values.pop("allow_password_argument")
    path = values.pop("config")
    broker, registry = values.pop("broker"), values.pop("schema_registry")
    settings = values.pop("settings")
    for name, instead in _NOT_SET.items():
        if name in settings:
            raise SettingError(name, None, instead, problem="cannot be given with --set")
    given: dict[str, Any] = {
        **settings,
        **{k: v for k, v in values.items() if v is not None and v != {}},
    }
    given["kafka"] = _kafka(given.pop("kafka_config", {}), broker)
    given["registry"] = {"url": registry} if registry else {}
    if not force:
        _refuse_secrets(given)
    defaults = {name: SETTINGS[name].default for name in ("kafka", "registry")}
    described = _described(path)
    merged = merge(described.settings() | described.connections(), given)
    _refuse_missing(merged.get("postgres"))
    _refuse_airflows("kafka", merged["kafka"], described, path)
    pipeline = Settings.of(**merge(defaults, merged))
    if registry and "format" in given and not pipeline.record_format.uses_registry:
        raise click.UsageError(f"Specifying --schema-registry doesn't make sense for --format={pipeline.format}")
    name_slot(pipeline.slot)
    if asks and (later or described.saved):
        from airflow_bottledwater.state import saved

        given_by = described.settings().keys() | given.keys()
        pipeline = saved.completed(pipeline, given_by, exists=not later)
    if pipeline.record_format.uses_registry:
        _refuse_airflows("registry", merged["registry"], described, path)
    return pipeline.with_hash_key()


def kafka_of(values: dict[str, Any]) -> dict[str, str]:
    """The Kafka that the options name: its properties by default, then by the file, then by the command line.

    :param values: the values of :func:`kafka_options`.
    :raises SettingError: a secret is on the command line, or the file is not one that describes a pipeline.
    """
    given = _kafka(values["kafka_config"], values["broker"])
    if not values["allow_password_argument"]:
        _refuse_secrets({"kafka": given, "registry": {}})
    described = _described(values["config"])
    found = {**described.kafka.properties, **given}
    _refuse_airflows("kafka", found, described, values["config"])
    return {**SETTINGS["kafka"].default, **found}


def source_of(values: dict[str, Any]) -> str:
    """The source database that the options name: its connection string by the command line, else by the file.

    :param values: the values of :func:`source_options`.
    :raises SettingError: a secret is on the command line, or the file is not one that describes a pipeline.
    :raises click.UsageError: it is missing.
    """
    if not values["allow_password_argument"]:
        _refuse_secrets({"postgres": values["postgres"], "kafka": {}, "registry": {}})
    found = values["postgres"] or _described(values["config"]).source.dsn
    _refuse_missing(found)
    return found


def _described(path: Path | None) -> Description:
    return load(path, Description) if path else Description()


def _refuse_missing(postgres: str | None) -> None:
    """:raises click.UsageError: there is no connection string of the source database."""
    if not postgres:
        raise click.UsageError("--postgres is required (or source.dsn in the file of --config)")


#: what a file may leave to a connection of Airflow: the connection's key, the property without which the command cannot
#: connect, and what gives it to the command
_AIRFLOWS = {
    "kafka": ("conn_id", SERVERS, f"kafka.properties with {SERVERS}, or the option --broker"),
    "registry": ("registry", "url", "kafka.registry_properties with url, or the option --schema-registry"),
}


def _refuse_airflows(name: str, properties: Mapping[str, str], described: Description, path: Path | None) -> None:
    """Refuse a file that leaves Kafka or the registry to a connection of Airflow, which the command does not have:
    another one on this host would be taken instead.

    :param name: ``kafka`` or ``registry``.
    :param properties: those that the file and the options give.
    :raises SettingError: nothing says where it is but the connection.
    """
    key, needed, instead = _AIRFLOWS[name]
    setting = described.kafka.described()[key]
    if needed in properties or getattr(described.kafka, key) == setting.default:
        return
    problem = "names a connection of Airflow, and the command has none"
    raise SettingError(setting.name, None, instead, problem=problem, file=str(path))


#: settings that are not given by --set, and what is given instead
_NOT_SET = {
    **dict.fromkeys(("kafka", "postgres", "registry"), "-d, -b and -C, -r or --config"),
    "hash_key": "hash_key_file, the path of a file",
    **dict.fromkeys(("messages", "table_options"), "the file of --config"),
}


def _kafka(properties: dict[str, str], broker: str | None) -> dict[str, str]:
    return {**properties, **({SERVERS: broker} if broker else {})}


def spark_of(config: Path | None, master: str | None, conf: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Spark's master and properties, by the options, else by the file.

    :raises SettingError: the file is not one that describes a pipeline.
    """
    spark = _described(config).spark
    return master or spark.master, {**spark.conf, **conf}


def _refuse_secrets(given: dict[str, Any]) -> None:
    """Refuse secrets in arguments, which every user of the machine can see (ps) and which stay in the shell's history.

    :raises SettingError: an argument contains a secret.
    """
    try:
        parsed = conninfo.conninfo_to_dict(given.get("postgres") or "")
    except Exception:
        parsed = {}
    if parsed.get("password") or parsed.get("sslpassword"):
        _refuse_secret("postgres", "a password", "~/.pgpass, a service file, PGPASSWORD, --config")
    for name, value in given["kafka"].items():
        if value and any(word in name for word in SECRET_PROPERTIES):
            _refuse_secret("kafka", f"the secret {name}", "--config")
    if "@" in given["registry"].get("url", ""):
        _refuse_secret("registry", "a password", "--config")


def _refuse_secret(setting: str, what: str, instead: str) -> None:
    raise SettingError(
        setting,
        None,
        f"{instead}, or the option --allow-password-argument",
        problem=f"must not have {what} on the command line, where other users can see it",
    )
