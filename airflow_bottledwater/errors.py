"""Every error this package raises on purpose: what happened, to which object, and what the reader can do.

The class decides what the runners do with it (:mod:`airflow_bottledwater.policy`); the message is for people.
"""

from __future__ import annotations

import signal


class BottledWaterError(Exception):
    """Base of all our errors.

    :param what: one sentence: what happened, naming the slot, table, topic or setting.
    :param remedy: what the reader can do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}".strip()


class SettingError(BottledWaterError):
    """A setting has a value that is not allowed; nothing was contacted yet.

    :param value: the value; None where it is not shown.
    :param allowed: what is allowed, as the rest of a sentence.
    :param problem: what is wrong, as the rest of a sentence about the setting; empty: its value.
    """

    def __init__(self, setting: str, value: object, allowed: str, problem: str = "") -> None:
        super().__init__(f"Setting {setting!r} {problem or f'cannot be {value!r}'}.", f"Allowed: {allowed}.")
        self.setting, self.value, self.allowed, self.problem = setting, value, allowed, problem

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, object, str, str]]:
        return type(self), (self.setting, self.value, self.allowed, self.problem)


class PreflightError(BottledWaterError):
    """The source, the broker or the registry is not ready; nothing was changed.

    :param problems: one sentence each, with its remedy.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[PreflightError], tuple[list[str]]]:
        return type(self), (self.problems,)


class Outage(BottledWaterError):
    """A server is away. Never a record's fault: waited out with back-off, and reported."""


class Interrupted(Outage):
    """A signal that nobody of ours sent ended the job, for example of a host that reboots: it may be submitted again.

    :param signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(
            f"The job was ended by {signal.Signals(signum).name} from outside; nobody had asked it to stop.",
            "Start it again, it goes on where it was (Airflow submits it again by itself). To stop it, use 'bottledwater stop', or mark "
            "its task.",
        )
        self.signum = signum

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        return type(self), (self.signum,)


class Refused(BottledWaterError):
    """Going on would lose, double or invent data, or is not permitted; a person has to decide."""


class SchemaRefused(Refused):
    """The registry does not take a schema, or none can be made of the columns: of rows in a stream it is a record error each."""


class CredentialsRefused(Refused):
    """A server does not accept the password, or one side not the other's certificate. On a stream that had worked it is waited
    out for a moment (a rotated password reaches its file), then the job ends as after an outage."""


class SlotError(Refused):
    """The replication slot is not the one our records describe, or cannot be used."""


class SlotInUse(SlotError):
    """Another session replicates from the slot (SQLSTATE 55006)."""


class StateError(Refused):
    """The state topic does not hold what is needed, or contradicts the source."""


class TakenOver(BottledWaterError):
    """Another job has claimed the slot; this one ends without publishing anything more."""


class StaleBatch(BottledWaterError):
    """The batch does not start where the state says that the stream is: another attempt of the job went on meanwhile. Publishing
    it would repeat or skip; a job that is started again goes on from the state."""


class RecordError(BottledWaterError):
    """A permanent verdict on one record: it cannot be encoded, is too large, or its topic refuses it."""

    def __init__(self, what: str, remedy: str = "", *, position: str = "", topic: str = "") -> None:
        super().__init__(what, remedy)
        self.position, self.topic = position, topic

    def __reduce__(self) -> tuple[object, ...]:
        return _record_error, (self.what, self.remedy, self.position, self.topic)


def _record_error(what: str, remedy: str, position: str, topic: str) -> RecordError:
    return RecordError(what, remedy, position=position, topic=topic)


class StopRequested(BottledWaterError):
    """Somebody asked the job to stop; not a failure."""


class ProtocolError(BottledWaterError):
    """Bytes from PostgreSQL that do not follow the documented format."""


class JobFailed(BottledWaterError):
    """A Spark job ended without success."""


class LocalServerError(BottledWaterError):
    """An embedded server could not be started or stopped."""
