"""``python -m airflow_bottledwater.cli``: the same as ``bottledwater``."""

from airflow_bottledwater.cli.commands import main

main()
