"""Compile what a wheel brings for hosts like this one, with this Python: ``python -m airflow_bottledwater.prebuild``.
See :mod:`airflow_bottledwater.prebuilt`; ``make wheel`` calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from airflow_bottledwater import prebuilt


def _compile(processor: str) -> None:
    """Fill the folder for a processor; numba must not have been imported before."""
    os.environ["NUMBA_CPU_NAME"] = prebuilt.NAME
    os.environ["NUMBA_CPU_FEATURES"] = ",".join(f"+{feature}" for feature in prebuilt.PROCESSORS[processor])
    from airflow_bottledwater import compiled

    compiled.prebuilding = prebuilt.root() / processor
    compiled.prebuilding.mkdir(parents=True)
    from airflow_bottledwater.warm import warm_up

    warm_up()
    prebuilt.write_manifest(compiled.prebuilding, compiled.prebuilt_parts)


def main() -> None:
    """Compile for each processor, in a process of its own, since numba compiles for one."""
    root = prebuilt.root()
    shutil.rmtree(root, ignore_errors=True)
    # what is compiled is also called once, so the processor must be able to run it
    processors = [name for name in prebuilt.PROCESSORS if not prebuilt.lacking(name)]
    running = [subprocess.Popen([sys.executable, "-m", __spec__.name, name]) for name in processors]
    codes = [process.wait() for process in running]
    if any(codes):
        shutil.rmtree(root, ignore_errors=True)
        sys.exit("Compiling failed, see above; there is no compiled code for the wheel.")
    print(
        f"Compiled for {root.name}: {', '.join(processors) or 'nothing, since the processor has other instructions'}."
    )


if __name__ == "__main__":
    main() if not sys.argv[1:] else _compile(sys.argv[1])
