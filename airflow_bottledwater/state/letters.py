"""Dead letters as they are read in their topic; and those that nobody has settled yet, as problems of their pipeline:
counted in its state by whoever writes or settles one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.model.problem import Problem

#: the kind of these problems
KIND = "dead-letters"
_BY = {"snapshot": "the snapshot", "stream": "the stream", "live": "live snapshots"}


class LetterHead(msgspec.Struct):
    """What a dead letter says of itself, without its row; see ``docs/message-format.md``."""

    pipeline: str
    relation: str
    oid: int
    op: str
    pos: str
    by: str
    error: str
    key: dict[str, str | None] | None = None


prepare(LetterHead)


def head(raw: bytes, names: Collection[str]) -> LetterHead | None:
    """A dead letter of a pipeline; None for one of another pipeline, and for what is none: others may write to the
    topic, too.

    :param names: the pipeline's, and those that it had.
    """
    try:
        found = msgspec.json.decode(raw, type=LetterHead)
    except ValueError:
        return None
    return found if found.pipeline in names else None


def problems(open_letters: Mapping[str, Mapping[str, int]]) -> list[Problem]:
    """One problem for each table that has open dead letters.

    :param open_letters: see :attr:`~airflow_bottledwater.state.pipeline_state.PipelineState.open_letters`.
    """
    return [
        Problem(
            KIND,
            table,
            f"{sum(counts.values()):,} of its rows or changes are only in the dead-letter topic ({described(counts)}).",
            "Mend the cause, which each dead letter names. Then stop the stream and run 'bottledwater redrive', or "
            "give them up with 'bottledwater dismiss'.",
        )
        for table, counts in open_letters.items()
    ]


def are_open(count: int) -> str:
    """How many dead letters are open, for messages."""
    return f"{count:,} dead letter{' is' if count == 1 else 's are'} open"


def described(counts: Mapping[str, int]) -> str:
    """Open dead letters by what has written them, for messages."""
    return ", ".join(f"{count:,} of {_BY.get(by, by)}" for by, count in sorted(counts.items()))
