"""What the documentation prints, so that a test runs the very lines that a reader copies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from airflow_bottledwater.pipeline.description import Description, Spark

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, section: str, language: str) -> list[str]:
    """The code blocks of one language in a section.

    :param page: such as ``operations.md``.
    :param section: its heading.
    """
    inside, found = False, list[str]()
    # split into text and blocks, in turn: a line of a block that begins with # is no heading
    for part in re.split(r"^(```\w*\n.*?^```$)", (DOCS / page).read_text(), flags=re.M | re.S):
        if part.startswith("```"):
            first, _, rest = part.partition("\n")
            if inside and first == f"```{language}":
                found.append(rest.removesuffix("```"))
        elif headings := re.findall(r"^#+ (.*)$", part, re.M):
            inside = headings[-1] == section
    return found


class OnKubernetes:
    """What operations.md says about Kubernetes: the secret, and the arguments of the operators.

    :ivar settings: the content of the secret's file; its passwords are left out there.
    :ivar secret: the name of the secret, ``namespace`` and ``file`` are those of the command that makes it.
    :ivar spark: what the pipeline says of Spark.
    """

    def __init__(self) -> None:
        (console,) = blocks("operations.md", "Kubernetes", "console")
        (python,) = blocks("operations.md", "Kubernetes", "python")
        shown = re.search(r"^\$ cat (\S+)\n(.*)$", console, re.M)
        made = re.search(r"^\$ kubectl create secret generic (\S+) --namespace=(\S+) --from-file=(\S+)$", console, re.M)
        assert shown and made and shown[1] == made[3]
        self.settings: dict[str, Any] = json.loads(shown[2])
        self.secret, self.namespace, self.file = made.groups()
        found: dict[str, Any] = {"Pipeline": Description, "Spark": Spark}
        exec(python, found)
        self.spark: Spark = found["shop"].spark
