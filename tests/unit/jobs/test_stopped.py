"""A pipeline that was asked to stop stays so until a person starts it again, whoever else is about to begin a job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.errors import PipelineStopped, StateError
from airflow_bottledwater.jobs import fence, requests, stop, submitted
from airflow_bottledwater.jobs.submitted import JobReporter, LogTail
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.operators.verify import VerifyTopicsOperator
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import drop as dropping
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import (
    JobRecord,
    StatusRecord,
    StopRequest,
    decode,
    encode,
    job_key,
    request_key,
    status_key,
    stop_key,
    stopped_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic
from tests.support.status import status_of

PIPELINE = Settings.of(postgres="host=db", slot="shop", kafka={"bootstrap.servers": "k"}, format="json")
CLUSTER = Cluster("77", 1, "db", 170000)
NAME = CLUSTER.pipeline("shop")
OWNER = Owner("shop", "r", "stream", -1, "h", "/f", "local[2]")


class Shared:
    """The shared topic, and a source that says who it is."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        #: how often the source was asked
        self.asked = 0

    def write(self, kafka: Any, records: dict[str, Any], **_: Any) -> None:
        for key, value in records.items():
            self.records.pop(key, None) if value is None else self.records.update({key: value})

    def says(self, status: StatusRecord | None) -> None:
        self.write(None, {status_key(NAME): encode(status) if status else None})

    @property
    def status(self) -> StatusRecord:
        found = decode(StatusRecord, self.records.get(status_key(NAME)))
        assert found is not None
        return found

    def refuses(self, asked: float | None) -> bool:
        """Whether nothing is to be begun that a person has asked for then."""
        try:
            requests.refuse_stopped(PIPELINE, asked)
        except PipelineStopped:
            return True
        return False


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    made = Shared()

    class Topic(contextlib.AbstractContextManager["Topic"]):
        def __exit__(self, *_: object) -> None: ...

        def get(self, key: str, **_: Any) -> tuple[Any, float]:
            return made.records.get(key), 0.0

        def subscribe(self, _: object) -> Topic:
            return self

    @contextlib.contextmanager
    def session(*_: Any, **__: Any) -> Iterator[None]:
        made.asked += 1
        yield

    monkeypatch.setattr(control_topic, "read", lambda _: dict(made.records))
    monkeypatch.setattr(control_topic, "write", made.write)
    monkeypatch.setattr(ControlTopic, "of", lambda _: Topic())
    for module in (requests, fence):
        monkeypatch.setattr(module, "session", session)
        monkeypatch.setattr(module, "identify", lambda _: CLUSTER)
    monkeypatch.setattr("airflow_bottledwater.postgres.connect.session", session)
    monkeypatch.setattr("airflow_bottledwater.postgres.server.identify", lambda _: CLUSTER)
    return made


def _stop(*, retire: bool = False) -> list[str]:
    said: list[str] = []
    stop.stop_pipeline(PIPELINE, retire=retire, timeout=5, say=said.append)
    return said


@pytest.mark.parametrize("retire", [False, True])
@pytest.mark.parametrize("last", ["stopped", "finished", "failed"])
def test_a_stop_holds_for_what_was_asked_for_before_and_has_not_begun(shared: Shared, last: str, retire: bool) -> None:
    """A person starts the pipeline, whose run waits in a queue, say, and stops it again."""
    shared.says(status_of(last, permanent=last == "failed", stopped_by="request" if last == "stopped" else ""))
    requests.want(PIPELINE, CLUSTER)
    started = time.time()
    assert not shared.refuses(started) and not shared.refuses(None)
    assert _stop(retire=retire) == [f"The job is {last}."]
    assert shared.refuses(started) and not shared.refuses(time.time() + 1)
    # the schedule, or another DAG: no person
    assert shared.refuses(None)
    # whose slot was dropped since
    shared.says(None)
    assert shared.refuses(started) and shared.refuses(None) and not shared.refuses(time.time() + 1)


def test_who_starts_a_pipeline_again_undoes_its_stop(shared: Shared) -> None:
    shared.says(status_of("stopped"))
    _stop()
    assert shared.refuses(None)
    requests.want(PIPELINE, CLUSTER)
    assert not shared.refuses(None) and not shared.refuses(0.0)
    # so does a job that a person has begun
    _stop()
    shared.says(status_of("streaming", epoch=9))
    assert not shared.refuses(None)
    # and who begins the pipeline anew behind its drop
    shared.says(None)
    assert shared.refuses(None)
    requests.want(PIPELINE, CLUSTER)
    assert not shared.refuses(None)


def test_a_pipeline_that_a_version_before_has_stopped_is_started_by_persons_only(shared: Shared) -> None:
    shared.says(status_of("stopped", stopped_by="request"))
    assert shared.refuses(None) and not shared.refuses(1.0)


def test_only_where_a_pipeline_was_stopped_the_source_is_asked(shared: Shared) -> None:
    shared.says(status_of("streaming"))
    shared.write(None, {stopped_key("77/db/shop2"): encode(StopRequest("request", at=time.time()))})
    requests.refuse_stopped(PIPELINE, None)
    assert not shared.asked
    # of one with this slot in another database, it is
    shared.write(None, {stopped_key("77/other/shop"): encode(StopRequest("request", at=time.time()))})
    requests.refuse_stopped(PIPELINE, None)
    assert shared.asked


def test_a_job_that_ends_by_itself_while_it_is_asked_to_stop_is_stopped(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.says(status_of("streaming", owner=OWNER))

    def ends(*_: Any, **__: Any) -> StatusRecord:
        shared.says(status_of("finished", owner=OWNER))
        return shared.status

    monkeypatch.setattr(requests, "wait_ended", ends)
    assert _stop(retire=True) == ["The job is finished."]
    assert not shared.status.wanted and shared.status.retired


def test_a_stop_before_the_first_job_holds_and_is_no_success(shared: Shared) -> None:
    started = time.time()
    with pytest.raises(
        StateError, match=r"No job has ever reported for slot 'shop' of this database \(.*\)\. .* none begins"
    ):
        _stop()
    assert shared.refuses(started) and not shared.refuses(time.time() + 1)


def test_a_command_that_is_about_to_begin_a_job_hears_of_a_stop(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_claim", lambda *_: None)
    shared.says(status_of("stopped", stopped_by="request"))
    begun = time.time()
    assert not fence.asked_meanwhile(PIPELINE, begun)
    _stop()
    assert fence.asked_meanwhile(PIPELINE, begun) and not fence.asked_meanwhile(PIPELINE, time.time() + 1)


@pytest.mark.parametrize("wanted", [True, False])
def test_with_a_pipeline_only_a_stop_that_was_undone_is_forgotten(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    shared.says(status_of("stopped", stopped_by="" if wanted else "request"))
    shared.write(None, {stopped_key(NAME): encode(StopRequest("request", at=5.0))})
    monkeypatch.setattr("airflow_bottledwater.jobs.snapshots.forget_all", lambda *_: None)
    state: Any = type("State", (), {"tables": {}, "raw": {}})
    claim: Any = type("Claim", (), {"state": state, "write": lambda self, _: None})()
    dropping._forget(PIPELINE, claim, NAME, {})
    assert (stopped_key(NAME) in shared.records) == (not wanted)
    assert status_key(NAME) not in shared.records


def _job(kind: str, claim: str = "", *, stopped: list[str]) -> JobReporter:
    made = JobReporter(PIPELINE, "v", kind, LogTail(), lambda: stopped.append(kind))
    made.record.pipeline, made.record.claim = NAME, claim
    made.listening.set()
    return made


@pytest.mark.parametrize(
    ("kind", "claim", "ends"), [("stream", "", True), ("verify", "", False), ("verify", "in place of one", True)]
)
def test_a_verification_that_only_reads_outlasts_a_stop_and_publishes_nothing_more(
    shared: Shared, kind: str, claim: str, ends: bool
) -> None:
    shared.says(status_of("finished"))
    record = JobRecord(kind, "shop", OWNER, host="h", pipeline=NAME, claim=claim, at=time.time())
    shared.write(None, {job_key("v"): encode(record)})
    assert requests.stop_starting(PIPELINE, NAME, "") == (kind != "verify")
    stopped: list[str] = []
    job = _job(kind, claim, stopped=stopped)
    job._hear_now(stop_key("v"), shared.records[stop_key("v")])
    assert bool(stopped) is ends and not job.may_claim(NAME)
    # its own task may end it all the same
    job._hear_now(stop_key("v"), encode(StopRequest("task")))
    assert stopped


def test_the_kind_of_a_verification_is_that_of_its_job() -> None:
    assert VerifyTopicsOperator.job_name == submitted.VERIFY


def _request(shared: Shared, at: float) -> None:
    shared.write(None, {stopped_key(NAME): encode(StopRequest("request", at=at))})
    shared.write(None, {request_key(NAME): encode(StopRequest("request", 1, at=at))})


@pytest.mark.parametrize("last", [status_of("finished", kind="snapshot"), status_of("failed")])
def test_what_a_person_starts_behind_a_stop_is_not_ended_by_its_request(shared: Shared, last: StatusRecord) -> None:
    """Which no job has answered: the snapshot has finished, or the job has died, and the next one was never begun."""
    at = time.time() - 60
    shared.says(last.told(stopped_by="request"))
    _request(shared, at)
    left = decode(StopRequest, shared.records[request_key(NAME)])
    assert left is not None and requests.holds(left, shared.status, 2, time.time())
    # for what was asked for before, and for nobody, the request stays
    assert shared.refuses(at - 5) and shared.refuses(None) and request_key(NAME) in shared.records
    assert not shared.refuses(at + 5) and request_key(NAME) not in shared.records


def test_a_request_that_a_job_is_about_to_answer_stays(shared: Shared) -> None:
    at = time.time() - 60
    shared.says(status_of("streaming"))
    _request(shared, at)
    assert not shared.refuses(at + 5) and request_key(NAME) in shared.records
    # so does one behind which nobody has asked: the next job of the same task obeys it
    shared.says(status_of("failed"))
    assert not shared.refuses(at - 5) and request_key(NAME) in shared.records


@pytest.mark.parametrize("answers", [True, False])
def test_what_a_person_starts_while_a_stop_waits_is_started_behind_it(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    started: list[float] = []
    shared.says(status_of("streaming", owner=OWNER))

    def waits(*_: Any, **__: Any) -> StatusRecord | None:
        time.sleep(0.01)
        started.append(time.time())
        time.sleep(0.01)
        shared.says(status_of("finished", owner=OWNER))
        return shared.status if answers else None

    monkeypatch.setattr(requests, "wait_ended", waits)
    monkeypatch.setattr(stop, "_give_up", lambda *_: None)
    _stop(retire=True)
    assert not shared.status.wanted and shared.status.retired and not shared.refuses(started[0])


def test_who_retires_a_pipeline_before_its_first_job_has_its_slot_dropped(shared: Shared) -> None:
    def keeps(when: str = "retired") -> bool:
        return dropping.keeps(when, shared.records, NAME, claim)

    claim = Job(1, "c", "create", "h", 1, time.time() - 60)
    assert keeps()
    for retire in (False, True):
        with pytest.raises(StateError, match="nor of a schedule or of another DAG"):
            _stop(retire=retire)
        assert keeps() is not retire
    assert keeps("never") and not keeps("always")
    # a drop that has died is finished by the next
    claim = replace(claim, kind="drop", started=time.time() + 60)
    assert not keeps()
    # but a slot that a person has had made since is another one
    claim = replace(claim, kind="create")
    assert keeps()
    # and what the first job has reported counts from then on
    shared.says(status_of("streaming"))
    claim = replace(claim, started=5.0)
    assert keeps()
