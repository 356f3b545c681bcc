"""What the jobs have in common: arguments, the settings file, the Spark context, signals, the exit code and the
outcome."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from airflow_bottledwater.errors import ApplicationEnded, BottledWaterError, Outage, Refused, StopRequested, TakenOver
from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.log import formatter, tell_row
from airflow_bottledwater.jobs.run_directory import Driver, RunRecord, Unreported
from airflow_bottledwater.jobs.submit import refuse_speculation
from airflow_bottledwater.jobs.supervise import RUN_DIRECTORY, stop_asked
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.model.stop import Stop
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import copies, installed
from airflow_bottledwater.spark.error_codec import unpack

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext

    from airflow_bottledwater.model.job import Job

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_TRANSIENT = 0, 1, 75  # 75: EX_TEMPFAIL of sysexits.h


#: texts by which the JVM reports that a Python process of a job (worker, executor) has died
_DEATHS = (
    "Python worker exited unexpectedly",
    "ExecutorLostFailure",
    "Broken pipe",
    "Connection reset",
    "EOFException",
    "java.net.SocketException",
)
#: texts by which Spark says that its application was ended from outside: by an operator of the cluster, by its manager,
#: or by a signal
_ENDS = ("SparkContext was shut down", "Master removed our application")
#: the class of an error by which Spark refuses a property's value; it is also that of what a context says that was
#: stopped while it began, since no master has answered
_ILLEGAL = "java.lang.IllegalArgumentException"
_STOPPED = ("MetricsSystem", "stopped SparkContext", "stopped context")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Where a job, and each of its executors, finds the pipeline's settings.

    :param path: the file, which alone contains secrets.
    :param more: settings without secrets, which override those of the file.
    """

    path: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Settings:
        """Read the settings file, at its path or where Spark's ``--files`` put it.

        In cluster mode that is the driver's working directory (YARN and Kubernetes); an executor finds it through
        Spark.

        :raises Refused: the file is in none of these places, or may not be read.
        :raises SettingError: a setting is not allowed.
        """
        path = Path(self.path)
        for place in (path, *copies.protected(path)):
            # Path.exists raises an error where the executor's user may not look
            if os.path.exists(place):
                try:
                    return Settings.read(place, **self.more)
                except OSError as error:
                    raise Refused(f"The settings file {str(place)!r} cannot be read: {error.strerror}.") from error
        raise Refused(
            f"The settings file {self.path!r} is not on host {socket.gethostname()}.",
            "Spark has not sent it (--files); on Kubernetes, mount the secret that holds it in the driver and in the "
            "executors.",
        )


@contextlib.contextmanager
def _left_out(*names: str) -> Iterator[None]:
    """Let imports of these packages fail, if they were not imported before."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


#: seconds between two lines in the log while Spark's application has not begun
_TELL = 30.0
_WAITS = (
    "Spark's application has not begun for %.0f s: it waits for the cluster, whose manager says why "
    "(YARN: its queue may be full)."
)


@contextlib.contextmanager
def _told(message: str) -> Iterator[None]:
    """Warn again and again while the block lasts, so that nobody waits in silence.

    :param message: with a place for the seconds.
    """
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(_TELL):
            log.warning(message, time.monotonic() - began)

    threading.Thread(target=tell, name="waits", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def context(name: str, properties: Mapping[str, str] | None = None) -> Iterator[SparkContext]:
    """The Spark context of a job, which is stopped at the end of the block. No job uses SQL, so none needs a session,
    which would take a second more.

    :raises Refused: speculative execution is on: a second attempt of a lane or batch would fence the first.
    :raises ApplicationEnded: the cluster's manager did not let the application begin.
    """
    installed.prefer()
    from pyspark import SparkConf, SparkContext

    conf = SparkConf().setAppName(name).setAll(list((properties or {}).items()))
    # PySpark's first call into the JVM imports its helpers for tests (NumpyArrayConverter.can_convert,
    # pyspark/sql/types.py), and these import pandas, Arrow and protocol buffers if they can: a hundred megabytes that
    # only SQL has a use for
    with _left_out("pandas", "pyarrow", "google.rpc"), _told(_WAITS):
        try:
            made = SparkContext.getOrCreate(conf)
        except Exception as error:
            raise _not_begun(error, conf) from error
    try:
        made.setLogLevel("ERROR")
        refuse_speculation(made.getConf().get("spark.speculation", ""))
        yield made
    finally:
        copies.remove(made)
        made.stop()


def _not_begun(error: Exception, conf: SparkConf) -> Exception:
    """Why an application has not begun: a property that Spark refuses, or a manager that is away just now, as when the
    whole cluster is started again."""
    text = str(error)
    if type(error).__name__ != "Py4JJavaError" or (_ILLEGAL in text and not any(sign in text for sign in _STOPPED)):
        return error
    return ApplicationEnded(
        f"Spark's application could not begin at {conf.get('spark.master', '')}: {_first_line(text)}",
        "Look whether the cluster's manager is there, and what it says of the application.",
    )


def _first_line(text: str) -> str:
    """What py4j's text says of the error in the JVM; its first line only says which call failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[min(1, len(lines) - 1)].removeprefix(": ")[:500] if lines else ""


#: how a Python worker says that it lacks a package, when it is given a function of it
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def translate(error: BaseException) -> BaseException:
    """The error of this package that Spark has wrapped. If a process of the job has died (killed, out of memory), an
    :class:`Outage`, since the job may work when it is submitted again. Any other error is returned unchanged."""
    if isinstance(error, BottledWaterError):
        return error
    # known by its name: this module does not import py4j
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        return Outage(f"Spark's driver does not answer: {type(error).__name__}.", "See the job's log.")
    text = str(error)
    if (found := unpack(text)) is not None:
        return found
    if (missing := _MISSING.search(text)) is not None:
        return Refused(
            f"The executors' Python has no module {missing[1]!r}.",
            "Install airflow-provider-bottledwater[spark] for it, in the driver's version, in the image or in the "
            "archive of the environment, and name that Python (PYSPARK_PYTHON; or spark.pyspark.python, in client mode "
            "with the driver's own as spark.pyspark.driver.python).",
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        return Refused(
            "Driver and executors have different versions of Python.",
            "Name the same version for both (PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON, or "
            "spark.pyspark.python and spark.pyspark.driver.python).",
        )
    if any(sign in text for sign in _ENDS):
        return ApplicationEnded(
            "Spark's application was ended from outside the job.",
            "See the job's log, and what the cluster's manager says.",
        )
    if any(sign in text for sign in _DEATHS):
        return Outage("A Python process of the job died (killed, or out of memory).", "See the job's log.")
    if type(error).__name__ == "Py4JJavaError" and "Traceback (most recent call last)" not in text:
        return Outage(f"Spark has failed: {_first_line(text)}", "See the job's log, and the executors' logs.")
    return error


def check_attempt(pipeline: Settings, state_topic: str, claimed: Job) -> bool:
    """In a task that Spark has started again, check that the job still has the claim, before the transactional id is
    initialised; returns whether it is such a task.

    :raises TakenOver: another job has claimed the slot; initialising the id would fence it.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or context.attemptNumber() == 0:
        return False
    from airflow_bottledwater.state.claim import reached

    reached(pipeline, state_topic, claimed)
    return True


def log_to_stderr() -> None:
    """Set up a job's log, in the driver and in a worker that logs itself."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("py4j", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


#: what a job does: with the pipeline, where executors find its settings, whether it is bounded, and the event that ends
#: it
Work = Callable[[Settings, SettingsFile, bool, Stop], dict[str, Any]]


def run(kind: str, title: str, work: Work) -> None:
    """The command line of a job: ``--pipeline FILE [--settings JSON] [--job ID] [--bounded]``.

    SIGTERM, SIGINT and SIGHUP end the job in order: as a stop if it was requested by :func:`supervise.stop`, otherwise
    as a transient failure, since a host that reboots sends the same signals. The job reports itself in Kafka
    (:mod:`airflow_bottledwater.jobs.submitted`), and its outcome (counts or error) is also written into the run
    directory, if there is one.

    :param kind: snapshot, stream or pipeline.
    """

    @click.command(help=title)
    @click.option("--pipeline", "path", required=True, help="The settings file (secrets are only there).")
    @click.option(
        "--settings", default="{}", help="Settings without secrets, as JSON; they override those of the file."
    )
    @click.option(
        "--job", "job_id", default="", help="The id by which the job is watched; a new one if it is not given."
    )
    @click.option("--bounded", is_flag=True, help="End when everything is published that is committed now.")
    def command(path: str, settings: str, job_id: str, bounded: bool) -> None:
        file = SettingsFile(path, json.loads(settings))
        sys.exit(_run(kind, work, file, job_id, bounded))

    log_to_stderr()
    command()


def _run(kind: str, work: Work, file: SettingsFile, job_id: str, bounded: bool) -> int:
    from airflow_bottledwater.jobs.submitted import JobReporter, LogTail

    tail = LogTail()
    logging.getLogger().addHandler(tail)
    stopped = Stop(_asked)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _: stopped.interrupt(number))
    leave(Driver(os.getpid()))
    reporter: JobReporter | None = None
    try:
        pipeline = file.load()
        reporter = JobReporter(pipeline, job_id, kind, tail, stopped.set)
        reporter.start()
        outcome = Outcome(ok=True, counts=work(pipeline, file, bounded, stopped))
    except StopRequested as error:
        log.info("%s", error)
        stopped.set()
        outcome = Outcome(ok=True)
    except BaseException as raised:
        failure = translate(raised)
        if not isinstance(failure, BottledWaterError) or isinstance(failure, ApplicationEnded):
            # Spark raises an error of its own if the same signal has ended its processes
            failure = stopped.interruption or failure
        outcome = _failed(failure)
    if outcome.ok:
        interruption = stopped.interruption
        outcome = _failed(interruption) if interruption else replace(outcome, stopped=stopped.is_set())
    leave(outcome)
    if reporter is not None and not outcome.ok and not stopped.is_set():
        _note(kind, pipeline, reporter.last_claim, outcome)
    if reporter is None or not reporter.finish(outcome):
        leave(Unreported())
    return EXIT_OK if outcome.ok else EXIT_TRANSIENT if outcome.transient else EXIT_FAILED


def _note(kind: str, pipeline: Settings, claim: str, outcome: Outcome) -> None:
    """Let the pipeline's status say why this job failed for good, if it has never reported there: but for one that was
    taken over, since another job works then, and for one that only verifies."""
    from airflow_bottledwater.jobs import requests

    if outcome.transient or outcome.kind == TakenOver.__name__ or kind == "verify":
        return
    try:
        requests.not_begun(pipeline, outcome.error, claim=claim)
    except BottledWaterError as unsaid:
        log.info("Only this log has why the job failed: %s", unsaid)


def _asked() -> bool:
    """Whether the signal belongs to a request to stop (:func:`supervise.stop`)."""
    folder = os.environ.get(RUN_DIRECTORY)
    return folder is not None and stop_asked(Path(folder))


def _failed(failure: BaseException) -> Outcome:
    from airflow_bottledwater.policy import transient

    kind, error = type(failure).__name__, str(failure)
    if isinstance(failure, BottledWaterError):
        log.error("%s: %s", kind, error)
        tell_row(log, failure)
    else:
        log.error("The job failed.", exc_info=failure)
        error = f"{kind}: {error}"  # that of a KeyError is a key alone
    return Outcome(ok=False, kind=kind, error=error[:4000], transient=transient(failure))


def leave(record: RunRecord) -> bool:
    """Write a record into the run directory, if the job has one; returns whether it is there. A full disk ends no job:
    what matters is reported in Kafka, too."""
    if folder := os.environ.get(RUN_DIRECTORY):
        try:
            run_directory.write(Path(folder), record)
            return True
        except OSError as error:
            log.warning("%s cannot be written in %s: %s", record.FILE, folder, error)
    return False
