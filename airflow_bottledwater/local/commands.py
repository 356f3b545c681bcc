"""``bottledwater demo``, ``up`` and ``down``: the whole pipeline on embedded servers.

Importing this module needs none of the packages of the `local` extra; the commands report if they are missing.
"""

from __future__ import annotations

import logging
import sys

import click

from airflow_bottledwater import extras


def _begin() -> None:
    """Prepare any of the commands.

    :raises Refused: a package of the extra is not installed.
    """
    for extra in ("local", "airflow", "spark"):
        extras.require(extra)
    # the commands report their progress themselves
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("airflow_bottledwater.provision.preflight").setLevel(logging.ERROR)


@click.command()
def demo() -> None:
    """Run the whole pipeline on real servers and real data, started for it and stopped afterwards, and compare in the
    end."""
    _begin()
    from airflow_bottledwater.local.demo import demo as run

    try:
        run()
    except KeyboardInterrupt:
        click.echo("Interrupted; nothing was left running.", err=True)
        sys.exit(130)


@click.command()
def up() -> None:
    """Start the servers of the demo, with an Airflow that has the DAG, and leave them running."""
    _begin()
    from airflow_bottledwater.local.demo_stack import up as start

    start()


@click.command()
def down() -> None:
    """Stop what "up" has started; the data stay."""
    _begin()
    from airflow_bottledwater.local.demo_stack import down as stop

    stop()


COMMANDS = (demo, up, down)
