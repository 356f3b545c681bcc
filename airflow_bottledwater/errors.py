"""All errors that this package raises on purpose. Their messages say what happened, to which object, and what the
reader can do.

The class of an error decides what a job does about it (:mod:`airflow_bottledwater.policy`); the message is for people.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence

#: where the pages of docs/ are published, for those who have only the wheel (Documentation in pyproject.toml); messages
#: link to them as ``DOCS + "page.html#section"``
DOCS = "https://airflow-provider-bottledwater.readthedocs.io/en/stable/"
#: the remedy where state records are missing
LOST_STATE = f"What can be done: {DOCS}operations.html#state-topics-and-lost-state"


class BottledWaterError(Exception):
    """The base of all errors of this package.

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
    """A setting has a value that is not allowed; no server was contacted.

    :param value: the value; None where it is not shown.
    :param allowed: what is allowed, as the rest of a sentence.
    :param problem: what is wrong, as the rest of a sentence about the setting; empty: its value.
    :param file: the path of the file that has it; empty if it is not from a file.
    """

    def __init__(self, setting: str, value: object, allowed: str, problem: str = "", file: str = "") -> None:
        where = f"{file}: setting" if file else "Setting"
        super().__init__(f"{where} {setting!r} {problem or f'cannot be {value!r}'}.", f"Allowed: {allowed}.")
        self.setting, self.value, self.allowed, self.problem, self.file = setting, value, allowed, problem, file
        self.args = setting, value, allowed, problem, file  # by which it is made again from its pickle

    def within(self, file: str) -> SettingError:
        """The same error, of a setting in a file."""
        return SettingError(self.setting, self.value, self.allowed, self.problem, file)


class PreflightError(BottledWaterError):
    """The source, the broker or the registry is not ready; nothing was changed.

    :param problems: what is wrong, each with its remedy; more than one are numbered in the message.
    """

    def __init__(self, problems: list[str]) -> None:
        lines = problems
        if len(problems) > 1:
            lines = [
                f"{len(problems)} problems were found:",
                *(f"{n}. {problem}" for n, problem in enumerate(problems, 1)),
            ]
        super().__init__("\n".join(lines))
        self.problems = problems
        self.args = (problems,)  # by which it is made again from its pickle


class Outage(BottledWaterError):
    """A server is not available. No record is to blame: the job waits with backoff, and reports it."""


class ConnectionNotFound(Outage):
    """Airflow does not find a connection: nobody has defined it, this host or this team may not see it, or a secrets
    backend does not answer, which Airflow does not tell apart.

    :param conn_ids: of all that are not found.
    """

    def __init__(self, what: str, remedy: str = "", conn_ids: Sequence[str] = ()) -> None:
        super().__init__(what, remedy)
        self.conn_ids = tuple(conn_ids)
        self.args = what, remedy, self.conn_ids  # by which it is made again from its pickle


class SourcePressed(Outage):
    """Reading tables presses on their source. The snapshot gives up its locks and its xmin, and goes on under a new
    one; or the job ends, to be started again.

    :param limit: what is passed: locks or xmin.
    """

    def __init__(self, what: str, remedy: str = "", *, limit: str = "locks") -> None:
        super().__init__(what, remedy)
        self.limit = limit


class HolderEnded(Outage):
    """The session that holds the snapshot has ended: nothing can be read under it any more, however often it is
    tried."""


class OtherBuild(Outage):
    """A worker of Spark that began while the job ran has another build of this package than the driver. The job is
    started again, with what is installed then."""


class TypeAltered(Outage):
    """The type of a column was altered while its table was read or streamed, which PostgreSQL does not report: the
    definitions are to be read anew. The stream does so itself.

    :ivar lsn: the final LSN of the first transaction with a value that does not fit; 0 if it is not known.
    """

    lsn = 0


class ApplicationEnded(Outage):
    """The Spark application of a job was ended by its cluster; the job may be submitted again."""


class Interrupted(Outage):
    """A signal from outside the pipeline ended the job, for example when its host reboots: it may be submitted again.

    :param signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(
            f"The job was ended by {signal.Signals(signum).name} from outside the pipeline, although no stop had been "
            "requested.",
            "Start it again: it continues where it was (Airflow submits it again by itself). To stop a job, use "
            "'bottledwater stop', or mark its task as failed or success.",
        )
        self.signum = signum
        self.args = (signum,)  # by which it is made again from its pickle


class Refused(BottledWaterError):
    """Going on would lose, double or invent data, or is not permitted; manual intervention is required."""


class SchemaRefused(Refused):
    """The registry rejects a schema, or none can be made from the columns. In a stream, each affected row is a record
    error."""


class TableRefused(Refused):
    """The changes of a table cannot be published: its key means something else now, less of it would be hidden, or a
    type is gone. A stream leaves them out until the table's rows are read again. No other refusal is one of a table: it
    ends the job, and nothing is left out."""


class CredentialsRefused(Refused):
    """A server rejects the password, or one side rejects the other's certificate. A stream that had worked before waits
    for a moment, since a rotated password may reach its file; then the job ends as after an outage."""


#: what can be done where only what looks beside a stream is refused
_CHANGED = (
    "If the credentials were changed, put the new ones into the file that the connection names, which is read again; "
    "or into the connection itself, and restart the job, which has those of its start: clear the stream's task, or end "
    "the command and start it again. The stream publishes meanwhile."
)


def beside(error: BottledWaterError) -> str:
    """The remedy for an error of what looks at the servers beside a stream, which goes on."""
    return f"{error.remedy} {_CHANGED}" if isinstance(error, CredentialsRefused) else error.remedy


def rotated(error: CredentialsRefused) -> Outage:
    """The error of a job that had worked with credentials which are refused now."""
    return Outage(
        f"{error.what} The job had worked with these credentials: they were changed since.",
        "Start it again with the new ones (Airflow submits it again with those of its connections).",
    )


@contextlib.contextmanager
def being_changed(worked: bool = True) -> Iterator[None]:
    """Within this block, credentials that are refused are being changed, if a job has worked with them.

    :raises Outage: instead of :class:`CredentialsRefused`.
    """
    try:
        yield
    except CredentialsRefused as error:
        raise rotated(error) if worked else error from None


class SlotError(Refused):
    """The replication slot is not the one that the saved state describes, or cannot be used."""


class SlotInUse(SlotError):
    """Another session replicates from the slot (SQLSTATE 55006)."""


class StateError(Refused):
    """The saved state in the state topic is missing or incomplete, or contradicts the source."""


class TopicGone(StateError):
    """The topic of a table was deleted, and made again perhaps. That is for good, but for a running stream: it begins
    anew, and lets go of the table if that was dropped."""


class TakenOver(BottledWaterError):
    """Another job has claimed the slot; this one ends without publishing anything more."""


class StaleBatch(BottledWaterError):
    """The batch does not start at the position in the state: another attempt of the job has published meanwhile.
    Publishing the batch would repeat or skip changes; when the job is started again, it continues from the state."""


class BeginsAnew(BottledWaterError):
    """The stream begins anew from the state, in the same job, which settles what has changed."""


class SchemasLost(BeginsAnew):
    """The registry has lost schemas that the stream's records name, and gets them again."""


class ChosenTopicGone(BeginsAnew):
    """A topic that a record of an outbox has chosen was deleted: it is made again when another record chooses it."""


class RecordError(BottledWaterError):
    """One record is rejected for good: it cannot be encoded, is too large, or its topic refuses it.

    :param row: which row it is, by its key. That is not in the message, which those may read, too, who may not see rows
        (in the pipeline's status, say), but in the job's log (:func:`airflow_bottledwater.jobs.log.tell_row`).
    """

    def __init__(self, what: str, remedy: str = "", *, position: str = "", topic: str = "", row: str = "") -> None:
        super().__init__(what, remedy)
        self.position, self.topic, self.row = position, topic, row


class StopRequested(BottledWaterError):
    """The job was asked to stop; this is not a failure."""


class PipelineStopped(Refused):
    """The pipeline was asked to stop, and no person has asked for it to run since: nothing is begun."""


class ProtocolError(BottledWaterError):
    """PostgreSQL sent bytes that do not follow the documented format."""


class JobFailed(BottledWaterError):
    """A Spark job ended without success."""


class JobDied(JobFailed):
    """A Spark job ended for a transient reason: started again, it goes on where it was.

    :param kind: the class of the job's own error.
    """

    def __init__(self, what: str, remedy: str = "", *, kind: str = "") -> None:
        super().__init__(what, remedy)
        self.kind = kind


class LocalServerError(BottledWaterError):
    """An embedded server could not be started or stopped."""
