"""``import-debezium``: the description of a pipeline from a connector's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import click

from airflow_bottledwater.cli.log import say
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.debezium import imported
from airflow_bottledwater.pipeline.description import Description


@click.command("import-debezium")
@click.argument("connector", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.  [default: print it]"
)
def import_debezium(connector: Path, output: Path | None) -> None:
    """Write the YAML file of a pipeline that does what a Debezium connector does.

    CONNECTOR is its configuration as JSON, as Kafka Connect takes it. What differs is said at the file's beginning;
    what is secret is not in the file. Nothing is contacted.
    """
    try:
        found = imported(json.loads(connector.read_text()))
        Description.of(found.description)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingError(str(connector), None, "a file of JSON", problem=f"cannot be read ({error})") from None
    except SettingError as error:
        raise error.within(str(connector)) from None
    if output is None:
        click.echo(found.yaml(), nl=False)
        return
    try:
        output.write_text(found.yaml())
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise SettingError(str(output), None, "a file in a folder that is there", problem=problem) from None
    say(f"{output} is written. What differs, in {len(found.differences)} points, is at its beginning.")
