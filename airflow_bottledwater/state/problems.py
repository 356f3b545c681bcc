"""The problems of a running job: each part of the job tells its own, and the job's status has all of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from airflow_bottledwater.model.problem import Problem

log = logging.getLogger(__name__)

#: seconds after which a problem that is still there is logged again
_AGAIN = 3600.0
#: problems of one kind that a job's status names: a record of Kafka has no room for those of thousands of tables
_NAMED = 50
#: seconds for which a problem may last before whoever watches the pipeline fails because of it: what mends itself needs
#: a moment
GRACE = 60.0


class Problems:
    """Collects what the parts of a job find wrong; may be used from several threads.

    A problem is logged when it is first told, every hour while it lasts, and when it is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: their ``since`` are of the monotonic clock, since the other one may be set meanwhile
        self._found: dict[str, dict[tuple[str, str], Problem]] = {}
        self._logged: dict[tuple[str, str, str], float] = {}

    def tell(self, part: str, found: Iterable[Problem]) -> None:
        """Replace all that a part of the job has told before.

        :param part: the name of the part, for example ``tables``.
        :param found: what is wrong now; empty if nothing is. One that was told before, of the same kind and subject,
            keeps its ``since``.
        """
        now, shift = time.monotonic(), time.time() - time.monotonic()
        with self._lock:
            before = self._found.get(part, {})
            after: dict[tuple[str, str], Problem] = {}
            for problem in found:
                key = (problem.kind, problem.subject)
                known = before.get(key)
                since = known.since if known else problem.since - shift if problem.since else now
                after[key] = replace(problem, since=since)
                if known is None or known.reason != problem.reason or now - self._logged[part, *key] >= _AGAIN:
                    log.warning("%s", problem)
                    self._logged[part, *key] = now
            for key in before.keys() - after.keys():
                log.info("%s: no longer a problem (%s).", before[key].subject, before[key].kind)
                self._logged.pop((part, *key), None)
            self._found[part] = after

    def all(self) -> list[Problem]:
        """All that is wrong now, the oldest first. Of many of one kind, the last one says how many more there are."""
        kinds: dict[str, list[Problem]] = {}
        shift = time.time() - time.monotonic()
        with self._lock:
            for problem in sorted(
                (problem for part in self._found.values() for problem in part.values()), key=lambda each: each.since
            ):
                kinds.setdefault(problem.kind, []).append(replace(problem, since=problem.since + shift))
        return sorted((each for found in kinds.values() for each in _named(found)), key=lambda each: each.since)


def _named(found: list[Problem]) -> list[Problem]:
    """Problems of one kind, and one instead of those for which a status has no room."""
    if len(found) <= _NAMED:
        return found
    more = found[_NAMED:]
    reason = f"They have the same problem ({more[0].kind}) as those that are named."
    return [
        *found[:_NAMED],
        Problem(more[0].kind, f"{len(more)} more", reason, "The job's log names each.", more[0].since, len(more)),
    ]


def by_kind(problems: Iterable[Problem]) -> dict[str, int]:
    """How many there are of each kind."""
    found: Counter[str] = Counter()
    for each in problems:
        found[each.kind] += each.count
    return found


def lasting(problems: Iterable[Problem], now: float) -> list[Problem]:
    """Those that have lasted for longer than :data:`GRACE`.

    :param now: seconds since 1970, by the same clock as theirs: the time of the status that tells them.
    """
    return [each for each in problems if now - each.since >= GRACE]


def summary(problems: Iterable[Problem]) -> str:
    """Problems in one text, for an error or a probe; empty if there are none."""
    found = list(problems)
    shown = " · ".join(str(each) for each in found[:5])
    return shown + (f" · and {len(found) - 5} more" if len(found) > 5 else "")
