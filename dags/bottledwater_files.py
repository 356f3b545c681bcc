"""The DAGs of every pipeline that a YAML file describes: all files of the folder ``pipelines`` beside this file, or of
the folder that the environment variable ``BOTTLEDWATER_PIPELINES`` names. A file's section ``schedules`` says which
DAGs it gets beside the one that streams.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow_bottledwater import Pipeline

FOLDER = Path(os.environ.get("BOTTLEDWATER_PIPELINES") or Path(__file__).parent / "pipelines")

if FOLDER.is_dir():
    # a file that is wrong is an import error of this one; the pipelines of the other files are loaded
    globals().update(Pipeline.dags_of_folder(FOLDER))
