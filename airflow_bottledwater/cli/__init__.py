"""``bottledwater``: the original's main job at a shell prompt, without Airflow.

Options, defaults and exit codes are Bottled Water's: 0 after a stop by signal and for ``--help``, 1 for everything that
fails, bad usage included. Progress and errors go to standard error, what ``status`` reports to standard output.
"""

from airflow_bottledwater.cli.commands import cli, main

__all__ = ["cli", "main"]
