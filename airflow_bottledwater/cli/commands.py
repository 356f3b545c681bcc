"""The command and its subcommands."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from airflow_bottledwater import extras
from airflow_bottledwater.cli import jobs, probe, report
from airflow_bottledwater.cli.ddl import ddl_group
from airflow_bottledwater.cli.importing import import_debezium
from airflow_bottledwater.cli.log import say, setup_log
from airflow_bottledwater.cli.metrics import metrics_command, top_command
from airflow_bottledwater.cli.options import (
    LONGEST,
    RUN_ONLY,
    Number,
    options,
    pipeline_of,
    spark_of,
    spark_options,
    timeout_option,
)
from airflow_bottledwater.cli.snapshots import snapshot, snapshots_command
from airflow_bottledwater.cli.tables import pause_table, resume_table
from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.local.commands import COMMANDS
from airflow_bottledwater.pipeline.rules import listed, selected
from airflow_bottledwater.policy import transient
from airflow_bottledwater.spark.job import EXIT_FAILED, EXIT_TRANSIENT

log = logging.getLogger("bottledwater")

# bad usage exits with 1, as in the original Bottled Water
click.UsageError.exit_code = 1


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@options(everything=True)
@click.version_option(package_name="airflow-provider-bottledwater")
@click.pass_context
def cli(
    context: click.Context,
    /,
    master: str | None,
    spark_conf: dict[str, str],
    bounded: bool,
    restart: bool,
    assume_snapshot_complete: bool,
    position: str | None,
    **values: Any,
) -> None:
    """Publish a consistent snapshot of a PostgreSQL database, then every committed change, to Kafka.

    Creates the slot where it is absent, takes (or resumes) the snapshot, and streams in the foreground until it is
    interrupted. Started again it goes on where it was.
    """
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context)
    else:
        if assume_snapshot_complete != (position is not None):
            raise click.UsageError("--assume-snapshot-complete and --position belong together")
        where = spark_of(values["config"], master, spark_conf)
        jobs.run(pipeline_of(values), *where, bounded, position, restart, lambda: pipeline_of(values))


def _refuse_misplaced(context: click.Context) -> None:
    """Refuse options before a subcommand: they would not reach it, which could then drop another slot, say.

    :raises click.UsageError: there is one, other than that for the log.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is ParameterSource.COMMANDLINE and option.name != "log_format":
            raise click.UsageError(
                f"Put {option.opts[0]} behind {context.invoked_subcommand!r}: it belongs to the subcommand."
            )


@cli.command()
@options(everything=True)
def preflight(**values: Any) -> None:
    """Check source, broker and registry; change nothing."""
    from airflow_bottledwater.provision import preflight as checks

    found = checks.run(pipeline_of({name: value for name, value in values.items() if name not in RUN_ONLY}))
    keyed = sum(t.keyed for t in found.tables)
    log.info("Ready: %d tables (%d with a key) of database %r.", len(found.tables), keyed, found.cluster.database)


@cli.command("take-over")
@options(everything=True)
def take_over_command(**values: Any) -> None:
    """Go on with a slot that another program has read, such as a connector of Debezium, without a snapshot.

    The slot is taken over at its confirmed position; what was committed before is not published. Stop the other program
    first, then run this once, and start the pipeline.
    """
    from airflow_bottledwater.model.lsn import format_lsn
    from airflow_bottledwater.provision.take_over import take_over

    pipeline = pipeline_of({name: value for name, value in values.items() if name not in RUN_ONLY})
    made = take_over(pipeline)
    say(f"Slot {made.name!r} is taken over at {format_lsn(made.consistent_point)}: start the stream.")
    if pipeline.create_publication:
        say("Set create_publication to false from now on: the publications are the other program's.")


@cli.command()
@options(everything=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option(
    "--check", is_flag=True, help="For probes: exit with 0 if the pipeline's job works, else with 1 and one line why."
)
@click.option(
    "--max-lag", type=click.IntRange(min=0), metavar="BYTES", help="Of --check: how far the slot may be behind."
)
@click.option(
    "--max-age",
    type=Number(min=0, min_open=True),
    metavar="SECONDS",
    help="Of --check: how old the job's last report may be.  [default: ten heartbeats, at least 30]",
)
@click.option(
    "--max-dead-letters",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Of --check: how many dead letters may be open.",
)
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True, max=LONGEST),
    default=10.0,
    show_default=True,
    help="Of --check: seconds to wait for PostgreSQL and Kafka.",
)
def status(
    as_json: bool,
    check: bool,
    max_lag: int | None,
    max_age: float | None,
    max_dead_letters: int,
    timeout: float,
    **values: Any,
) -> None:
    """Slot, lag, boundaries, progress and errors of a pipeline."""
    if check:
        if as_json:
            raise click.UsageError("--check and --json do not belong together")
        limits = {"max_lag": max_lag, "max_age": max_age, "max_dead_letters": max_dead_letters}
        # the probe asks the servers itself, for at most this time, and says in one line that they do not answer
        probe.answer(pipeline_of(values, asks=False), limits, timeout=timeout)
        return
    if max_lag is not None or max_age is not None:
        raise click.UsageError("--max-lag and --max-age belong to --check")
    from airflow_bottledwater.jobs import status as reports

    found = reports.report(pipeline_of(values))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    # names and errors may contain brackets, which rich would take for markup
    report.show(found, Console(markup=False))


@cli.command("drop-slot")
@options(everything=False)
@click.option(
    "--when",
    type=click.Choice(["retired", "always", "never"]),
    default="retired",
    show_default=True,
    help="retired: only if the stream was stopped for good.",
)
@click.option(
    "--forget-cluster",
    metavar="PIPELINE",
    help="Only delete the saved state of a pipeline whose source is gone for good: SYSTEM_IDENTIFIER/DATABASE/SLOT, as "
    "messages have it. The connection is that of a server that answers; no database is changed.",
)
def drop_slot(when: str, forget_cluster: str | None, **values: Any) -> None:
    """Drop slot and publications, and delete the slot's saved state."""
    from airflow_bottledwater.provision.drop import drop, forget

    # a cluster that is gone cannot be asked
    pipeline = pipeline_of(values, later=True, asks=not forget_cluster)
    say(forget(pipeline, forget_cluster) if forget_cluster else drop(pipeline, when=when))


@cli.command()
@options(everything=False)
@click.option("--retire", is_flag=True, help="For good: the slot may then be dropped.")
@timeout_option("Seconds for the job to end in order.")
def stop(retire: bool, timeout: float, **values: Any) -> None:
    """Ask the running job of a slot to stop, wherever it runs. If the job does not respond, it is fenced, its slot is
    released and its processes are killed."""
    from airflow_bottledwater.jobs import stop as jobs

    jobs.stop_pipeline(pipeline_of(values, later=True), retire=retire, timeout=timeout, say=say)


@cli.command("redrive")
@options(everything=False)
def redrive_letters(**values: Any) -> None:
    """Publish the dead letters whose cause was fixed, while the stream is stopped; those that a newer record has
    overtaken are dropped."""
    from airflow_bottledwater.provision import redrive

    found = redrive.redrive(pipeline_of(values, later=True))
    say(
        f"{found.published} published, {found.overtaken} overtaken by newer records and dropped, {found.failed} still "
        f"refused, {found.incomplete} too large to hold their row."
    )


@cli.command()
@options(everything=False)
@click.option("-i", "--tables", "verify_tables", help="Only these tables of the pipeline; comma-separated patterns.")
@click.option("--sample", "verify_sample", help="Share of the rows, chosen by their keys, such as 0.01.  [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@spark_options
def verify(as_json: bool, master: str | None, spark_conf: dict[str, str], **values: Any) -> None:
    """Prove that the topics equal their tables, while the stream runs.

    Exits with 0 if they do, with 2 if a topic differs, with 3 if a table cannot be compared, and with 75 if keys were
    changed whenever they were looked at.
    """
    from airflow_bottledwater.cli import verify as verification

    where = spark_of(values["config"], master, spark_conf)
    verification.run(pipeline_of(values, later=True), *where, as_json=as_json)


@cli.command("accept-new-keys")
@options(everything=False)
@click.option("--tables", "of_tables", required=True, help="Tables, as [schema.]table with * and ?, comma-separated.")
def accept_new_keys(of_tables: str, **values: Any) -> None:
    """Accept that the keys in the tables' topics become other bytes: those of lost schema ids, or of a setting that
    gives them another form. The next job publishes all rows under their new keys, and removes the old ones."""
    from airflow_bottledwater.provision.accept import accept

    accepted = accept(pipeline_of(values, later=True), listed(of_tables))
    say(f"Accepted for {', '.join(accepted)}: the next job reads their rows again.")


@cli.command()
@options(everything=False)
@click.option("-i", "--tables", "of_tables", help="Only those of these tables; comma-separated patterns.")
def dismiss(of_tables: str | None, **values: Any) -> None:
    """Give up dead letters, all or those of some tables, while the stream is stopped: what they hold is not published,
    and they are no longer reported."""
    from airflow_bottledwater.provision import redrive

    tables = selected(of_tables)
    say(f"{redrive.dismiss(pipeline_of(values, later=True), tables).dismissed} dismissed.")


cli.add_command(snapshot)
cli.add_command(snapshots_command)
cli.add_command(pause_table)
cli.add_command(resume_table)
cli.add_command(ddl_group)
cli.add_command(import_debezium)
cli.add_command(metrics_command)
cli.add_command(top_command)
for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Entry point: errors become lines in the log, and exit codes (docs/operations.md, "The command as a service")."""
    if sys.__stderr__ is None:  # it is closed, and the next file that is opened would be taken for it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if os.getpid() == 1:  # of a container: the kernel gives it no signal that it has no handler for
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setup_log()
    try:
        with extras.explained():
            sys.exit(cli.main(prog_name="bottledwater", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BottledWaterError as error:
        log.critical("%s", error)
        sys.exit(EXIT_TRANSIENT if transient(error) else EXIT_FAILED)
    except click.Abort:  # Ctrl-C: what runs elsewhere goes on, and what was begun here is not finished
        sys.exit(EXIT_TRANSIENT)
    except Exception:
        log.critical(
            "Unexpected error. This is a fault of the program: please report it with this traceback.", exc_info=True
        )
        sys.exit(EXIT_FAILED)
