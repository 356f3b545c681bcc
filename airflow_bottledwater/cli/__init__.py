"""``bottledwater``: the pipeline at a shell prompt, without Airflow.

Options, defaults and exit codes are those of the original Bottled Water: 0 after a stop by signal and for ``--help``, 1
for failures, including bad usage. Only a transient failure has a code of its own: 75, as in sysexits.h, so that a
service manager can tell them apart. Progress and errors go to standard error, the report of ``status`` to standard
output.
"""

from airflow_bottledwater.cli.commands import cli, main

__all__ = ["cli", "main"]
