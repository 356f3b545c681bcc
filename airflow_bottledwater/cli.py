"""``bottledwater``: the original's main job at a shell prompt, without Airflow.

Options, defaults and exit codes are Bottled Water's: 0 after a stop by signal and for ``--help``, 1 for everything that
fails, bad usage included. Progress and errors go to standard error, what ``status`` reports to standard output.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from psycopg import conninfo
from rich.console import Console
from rich.table import Table as RichTable

from airflow_bottledwater import errors, extras
from airflow_bottledwater.errors import BottledWaterError, Interrupted, JobFailed, SettingError
from airflow_bottledwater.local.commands import COMMANDS
from airflow_bottledwater.settings import Pipeline, merge, read_config_file

if TYPE_CHECKING:
    from airflow_bottledwater.spark.supervise import LogReader

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("bottledwater")

# bad usage exits with 1, as the original's
click.UsageError.exit_code = 1

#: how the names of the jobs' folders begin, in the folder for temporary files
_RUN_FOLDER = "bottledwater-run-"
#: bytes of a job's log that are shown at once
_MOST = 1 << 20

_PASSWORD_PROPERTIES = ("password", "secret", "user.info", "token", "ssl.key.pem")


def _pairs(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals:
            raise click.BadParameter(f'Expected configuration in the form property=value, not "{value}"')
        found[name] = rest
    return found


def _options(*, everything: bool) -> Callable[[F], F]:
    """The options that name a pipeline; with ``everything`` also those of a run."""
    connection = [
        click.option(
            "-d",
            "--postgres",
            help="Connection string or URI of the source database (libpq's; a service or password file works).",
        ),
        click.option("-s", "--slot", help="Name of the replication slot.  [default: bottledwater]"),
        click.option("-b", "--broker", help="Comma-separated Kafka servers.  [default: localhost:9092]"),
        click.option(
            "-r", "--schema-registry", help="URL of the schema registry (avro).  [default: http://localhost:8081]"
        ),
        click.option("-f", "--output-format", help="avro or json.  [default: avro]"),
        click.option("-p", "--topic-prefix", help="Put before every topic's name, with a dot."),
        click.option(
            "-C",
            "--kafka-config",
            multiple=True,
            callback=_pairs,
            metavar="PROPERTY=VALUE",
            help="A librdkafka property; repeatable.",
        ),
        click.option(
            "-g",
            "--config-file",
            type=click.Path(path_type=Path),
            help="INI file with sections bottledwater, kafka, topic, schema-registry.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            callback=_pairs,
            metavar="SETTING=VALUE",
            help="Any setting of docs/settings.md; repeatable.",
        ),
        click.option(
            "--allow-password-argument",
            is_flag=True,
            help="Accept a password on the command line, where others can see it.",
        ),
    ]
    run = [
        click.option("-u", "--allow-unkeyed", is_flag=True, default=None, help="Publish tables without a usable key (inserts only)."),
        click.option("-e", "--on-error", help="exit or log: what a record that cannot be published does.  [default: exit]"),
        click.option("-x", "--skip-snapshot", is_flag=True, default=None, help="Start with the changes from now on."),
        click.option("-T", "--topic-config", multiple=True, callback=_pairs, metavar="PROPERTY=VALUE", help="A topic property, for topics that are created; repeatable."),
        click.option("-o", "--schemas", help="Comma-separated schemas, with * and ?."),
        click.option("-i", "--tables", help="Comma-separated [schema.]tables, with * and ?.  [default: all]"),
        click.option("--master", default="local[*]", show_default=True, help="Where Spark runs the jobs."),
        click.option("--spark-conf", multiple=True, callback=_pairs, metavar="PROPERTY=VALUE", help="A Spark property; repeatable."),
        click.option("--bounded", is_flag=True, help="End when everything is published that is committed now."),
        click.option("--assume-snapshot-complete", is_flag=True, help="The slot's records are lost, its topics are not: go on from --position."),
        click.option("--position", help="Header pos of the last record in the topics, for --assume-snapshot-complete."),
    ]  # fmt: skip

    def decorate(function: F) -> F:
        for option in reversed([*connection, *(run if everything else [])]):
            function = option(function)
        return function

    return decorate


def _pipeline(values: dict[str, Any]) -> Pipeline:
    """The pipeline that the options describe: defaults, then the file, then the command line."""
    values = dict(values)
    force = values.pop("allow_password_argument")
    path = values.pop("config_file")
    broker, registry = values.pop("broker"), values.pop("schema_registry")
    settings = values.pop("settings", {})
    if misplaced := sorted({"postgres", "kafka", "registry"} & set(settings)):
        raise SettingError(misplaced[0], "(in --set)", "given by -d, -b and -C, -r or --config-file")
    given: dict[str, Any] = {
        **settings,
        **{k: v for k, v in values.items() if v is not None and v != {}},
    }
    given["kafka"] = {**given.pop("kafka_config", {}), **({"bootstrap.servers": broker} if broker else {})}
    given["registry"] = {"url": registry} if registry else {}
    if not force:
        _refuse_passwords(given)
    defaults = {"kafka": {"bootstrap.servers": "localhost:9092"}, "registry": {"url": "http://localhost:8081"}}
    if registry and given.get("output_format") == "json":
        raise click.UsageError("Specifying --schema-registry doesn't make sense for --output-format=json")
    merged = merge(defaults, read_config_file(path) if path else {}, given)
    if not merged.get("postgres"):
        raise click.UsageError("--postgres is required (or postgres in the configuration file)")
    return Pipeline.of(**merged)


def _refuse_passwords(given: dict[str, Any]) -> None:
    """Arguments are visible to every user of the machine (ps) and stay in the shell's history."""
    way_out = "Others can see arguments. Use ~/.pgpass, a service file, PGPASSWORD or --config-file; or --allow-password-argument."
    try:
        parsed = conninfo.conninfo_to_dict(given.get("postgres") or "")
    except Exception:
        parsed = {}
    if parsed.get("password") or parsed.get("sslpassword"):
        raise SettingError("postgres", "(a connection string with a password)", f"one without. {way_out}")
    for name, value in given["kafka"].items():
        if value and any(word in name for word in _PASSWORD_PROPERTIES):
            raise SettingError(f"kafka {name}", "(a secret on the command line)", way_out)
    if "@" in given["registry"].get("url", ""):
        raise SettingError("schema_registry", "(a URL with a password)", f"one without. {way_out}")


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s", stream=sys.stderr)
    for noisy in ("httpx2", "httpx", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@_options(everything=True)
@click.version_option(package_name="airflow-provider-bottledwater")
@click.pass_context
def cli(
    context: click.Context,
    /,
    master: str,
    spark_conf: dict[str, str],
    bounded: bool,
    assume_snapshot_complete: bool,
    position: str | None,
    **values: Any,
) -> None:
    """Publish a consistent snapshot of a PostgreSQL database, then every committed change, to Kafka.

    Creates the slot where it is absent, takes (or resumes) the snapshot, and streams in the foreground until it is
    interrupted. Started again it goes on where it was.
    """
    if context.invoked_subcommand is None:
        if assume_snapshot_complete != (position is not None):
            raise click.UsageError("--assume-snapshot-complete and --position belong together")
        _run(_pipeline(values), master, spark_conf, bounded, position)


def _run(pipeline: Pipeline, master: str, spark_conf: dict[str, str], bounded: bool, position: str | None) -> None:
    from airflow_bottledwater.model.lsn import POSITION, Position
    from airflow_bottledwater.provision.create import assume_complete, create
    from airflow_bottledwater.spark import supervise

    if position is not None and not POSITION.fullmatch(position):
        raise SettingError("position", position, "a header pos, such as 00000000016B3748/0000000C")

    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda *_: stopped.set())
    supervise.sweep(list(Path(tempfile.gettempdir()).glob(f"{_RUN_FOLDER}*")))
    console = Console(stderr=True)
    log.info("Writing messages to Kafka in %s format.", "Avro" if pipeline.output_format == "avro" else "JSON")
    if position is not None:
        assume_complete(pipeline, Position.parse(position))
    else:
        create(pipeline, stopped=stopped)
    for name in ("snapshot", "stream"):
        if stopped.is_set():
            log.info("Terminated, shutting down...")
            return
        if not _job(pipeline, name, master, spark_conf, bounded and name == "stream", stopped, console):
            return


def _job(
    pipeline: Pipeline,
    name: str,
    master: str,
    spark_conf: dict[str, str],
    bounded: bool,
    stopped: threading.Event,
    console: Console,
) -> bool:
    """Run one Spark job to its end, showing progress; a signal ends it in order. False if it was stopped before its end.

    :raises JobFailed: it failed; the message is the job's own.
    """
    from airflow_bottledwater.spark import submit, supervise

    with tempfile.TemporaryDirectory(prefix=_RUN_FOLDER) as folder:
        run = Path(folder)
        settings = pipeline.write(run)
        command = submit.command(name, settings, master=master, conf=spark_conf, bounded=bounded)
        # a command that is killed takes its job with it: nobody would see that it goes on
        supervise.start(run, command, submit.environment(master=master), tied=True)
        log.info("%s job started.", name.capitalize())
        follower = supervise.LogReader(run)
        with console.status(f"{name} …"):
            while supervise.running(run):
                _show_log(follower)
                if stopped.wait(0.3):
                    log.info("Terminated, shutting down...")
                    supervise.stop(run)
        while _show_log(follower):
            pass
        outcome, code = supervise.outcome(run), supervise.exit_code(run)
        if outcome is None or not outcome["ok"]:
            # the signal was for the command; a terminal or a service manager sends it to the job's processes, too
            if stopped.is_set() and (outcome is None or outcome["kind"] == Interrupted.__name__):
                return False
            what = (
                outcome["error"]
                if outcome
                else f"The {name} job ended with exit code {code}.\n{supervise.log_tail(run)}"
            )
            raise JobFailed(what)
        log.info("%s: %s", name.capitalize(), ", ".join(f"{k} {v}" for k, v in outcome.items() if k != "ok"))
        return not outcome.get("stopped")


def _show_log(follower: LogReader) -> bool:
    """The job's own lines (not Spark's) as they come; whether there were any lines."""
    lines = follower.read(_MOST)
    for line in lines:
        if " INFO " in line or " WARNING " in line or " ERROR " in line:
            _, _, message = line.partition(" INFO ") if " INFO " in line else line.partition(" ")
            if line[:4].isdigit():  # ours begin with the year, Spark's with two digits of it
                log.info("%s", message)
    return bool(lines)


@cli.command()
@_options(everything=True)
def preflight(**values: Any) -> None:
    """Check source, broker and registry; change nothing."""
    from airflow_bottledwater.provision import preflight as checks

    for of_a_run in ("master", "spark_conf", "bounded", "assume_snapshot_complete", "position"):
        del values[of_a_run]
    found = checks.run(_pipeline(values))
    keyed = sum(t.keyed for t in found.tables)
    log.info("Ready: %d tables (%d with a key) of database %r.", len(found.tables), keyed, found.cluster.database)


@cli.command()
@_options(everything=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(as_json: bool, **values: Any) -> None:
    """Slot, lag, boundaries, progress and errors of a pipeline."""
    from airflow_bottledwater.state import status as reports

    report = reports.report(_pipeline(values))
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    console = Console()
    slot_, job = report["slot"], report["job"]
    console.print(
        f"Slot {report['name']}: "
        + (
            f"{slot_['lag']:,} bytes behind, keeps {slot_['retained']:,} bytes of WAL, {slot_['wal_status']}"
            if slot_
            else "there is none"
        )
    )
    if job:
        age = time.time() - job["at"]
        console.print(
            f"Job: {job['state']} ({age:,.0f} s ago), epoch {job['job']['epoch']} on {job['job']['host']}; {job['counters']}"
        )
        if job["error"]:
            console.print(f"Last error: {job['error']}", style="red")
    console.print(
        f"Stream at {report['position'] or '(nothing streamed yet)'}; snapshot {'complete' if report['complete'] else 'not complete'}"
    )
    table = RichTable("table", "topic", "boundary", "filtered", "ranges", "rows")
    for row in report["tables"]:
        table.add_row(*(str(row[k]) for k in ("table", "topic", "boundary", "filtered", "ranges", "rows")))
    console.print(table)


@cli.command("drop-slot")
@_options(everything=False)
@click.option(
    "--when",
    type=click.Choice(["retired", "always", "never"]),
    default="retired",
    show_default=True,
    help="retired: only if the stream was stopped for good.",
)
@click.option(
    "--forget-cluster",
    metavar="SYSTEM_IDENTIFIER",
    help="Only delete the saved state of a slot of this name in another cluster that is gone for good; touch no database.",
)
def drop_slot(when: str, forget_cluster: str | None, **values: Any) -> None:
    """Drop slot and publications, and delete the slot's saved state."""

    from airflow_bottledwater.provision.drop import drop, forget

    pipeline = _pipeline(values)
    click.echo(forget(pipeline, forget_cluster) if forget_cluster else drop(pipeline, when=when), err=True)


@cli.command()
@_options(everything=False)
@click.option("--retire", is_flag=True, help="For good: the slot may then be dropped.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for the job's end.")
def stop(retire: bool, timeout: float, **values: Any) -> None:
    """Ask the running job of a slot to stop, wherever it runs."""
    from airflow_bottledwater.postgres.connect import identify, session
    from airflow_bottledwater.state import control

    pipeline = _pipeline(values)
    with session(pipeline.postgres) as connection:
        cluster = identify(connection)
    asked = control.request_stop(pipeline, cluster, retire=retire)
    if asked is None:
        raise errors.StateError(f"No job has ever reported for slot {pipeline.slot!r}.")
    ended = control.wait_ended(pipeline, cluster, asked["job"]["id"], timeout=timeout)
    if ended is None:
        raise errors.Outage(f"The job did not end within {timeout:.0f} s.", "Raise --timeout, or end its process.")
    click.echo(f"The job is {ended['state']}.", err=True)


@cli.command("redrive")
@_options(everything=False)
def redrive_letters(**values: Any) -> None:
    """Publish the dead letters whose cause is mended; those that a newer record has overtaken are dropped."""
    from airflow_bottledwater.provision import redrive

    found = redrive.redrive(_pipeline(values))
    click.echo(
        f"{found.published} published, {found.overtaken} overtaken by newer records and dropped, {found.failed} still refused, "
        f"{found.incomplete} too large to hold their row.",
        err=True,
    )


for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Entry point: our errors become a line on standard error and exit code 1."""
    _log_to_stderr()
    try:
        with extras.explained():
            cli(prog_name="bottledwater")
    except BottledWaterError as error:
        for line in str(error).splitlines():
            log.critical("%s", line)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
