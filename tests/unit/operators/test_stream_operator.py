"""What the stream operator decides: submit, attach, start afresh, end; with the job replaced."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import NEVER_EXPIRE
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred

from airflow_bottledwater.errors import CredentialsRefused, JobDied, JobFailed, Outage, PipelineStopped, SlotInUse
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.holder import Holder
from airflow_bottledwater.hooks.tasks import Fate
from airflow_bottledwater.jobs import fence as provision_stop
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import requests, restarts, stop, submitted, watch
from airflow_bottledwater.jobs.watch import Ended
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators import stream as stream_operator
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.preflight import ReplicationPreflightOperator
from airflow_bottledwater.operators.slot import CreateReplicationSlotOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.description import Description, Source
from airflow_bottledwater.provision import live
from airflow_bottledwater.triggers.job import JobTrigger, PauseTrigger
from tests.support.lives import TRIGGERED, run_of, ti_of

OLD = {"id": "old", "folder": "/tmp/nowhere/old", "host": "elsewhere", "application": "", "master": "yarn"}
NEW = {**OLD, "id": "new", "folder": "/tmp/nowhere/new"}
OVER: Any = {"status": "over"}

pytestmark = pytest.mark.usefixtures("connections")


ORDERS = Description("orders", source=Source(tables=("a",)))
KEYLESS = Description("orders", source=Source(tables=("a",), hash_key_file="/nowhere/key"))


class Store:
    """Airflow's task state store."""

    def __init__(self, **values: Any) -> None:
        self.values, self.retentions = values, set()

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        if value is None:
            raise ValueError("Cannot set value as None")  # as Airflow does
        self.values[key] = value
        self.retentions.add(retention)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class World:
    """Jobs that are not there: how each ended, and what was done, in order."""

    def __init__(self) -> None:
        self.living: set[str] = set()
        #: who works on the slot
        self.holder: Holder | None = None
        self.ends: dict[str, Ended] = {}
        self.done: list[str] = []
        self.arguments: list[str] = []
        self.reached: int | None = None
        #: when the pipeline was asked to stop while no job ran
        self.asked = -math.inf
        #: for each bounded run that has noted where it begins
        self.begun: list[Any] = []
        #: when the pipeline was asked to stop last
        self.stopped = -math.inf
        #: whether a job that is asked to stop does
        self.answers = True
        #: how many submissions the cluster still refuses
        self.refuses = 0

    def end(self, identity: dict[str, str], **outcome: Any) -> None:
        self.living.discard(identity["id"])
        self.ends[identity["id"]] = Ended(Outcome(**outcome))

    def how(self, identity: Any) -> Ended | None:
        if identity["id"] in self.living:
            return None
        return self.ends.get(identity["id"], Ended(Outcome(ok=False, error="killed", transient=True)))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> World:
    made = World()

    def start(hook: Any, identity: Any, application: str, *, ends_with_parent: bool, **_: Any) -> None:
        made.done.append("start, ends with task" if ends_with_parent else "start")
        made.arguments = list(hook._application_args)
        made.living.add(identity["id"])

    def send(hook: Any, application: str, started: Any, named: Any) -> None:
        made.done.append("send")
        made.arguments = [application, *hook._application_args, *map(str, (hook._conf or {}).items())]
        named("application_1_2")
        if made.refuses:
            made.refuses -= 1
            raise JobDied("spark-submit ended with exit code 1.")

    def stop(pipeline: Any, identity: Any, **_: Any) -> bool:
        made.done.append(f"stop {identity['id']}")
        made.living.discard(identity["id"])
        return made.answers

    def refuse(pipeline: Any, asked: float | None) -> None:
        if made.stopped > (asked or 0.0):
            raise PipelineStopped("The pipeline was asked to stop.")

    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    monkeypatch.setattr(requests, "refuse_stopped", refuse)
    monkeypatch.setattr(AssetEvents, "begun", lambda self: made.begun.append(self._events))
    monkeypatch.setattr(spark_job, "prepare", lambda pipeline, kind, place: (NEW, tmp_path / "pipeline-x.json"))
    monkeypatch.setattr(spark_job, "start", start)
    monkeypatch.setattr(spark_job, "send", send)
    monkeypatch.setattr(identities, "forget", lambda identity: made.done.append(f"remove {identity['id']}"))
    monkeypatch.setattr(live, "name_of", lambda pipeline: "name")
    monkeypatch.setattr(submitted, "announce", lambda pipeline, job_id, *_: None)
    monkeypatch.setattr(stream_operator, "living", lambda pipeline, name: made.holder)
    monkeypatch.setattr(watch, "still_runs", lambda pipeline, identity, **_: made.how(identity))
    monkeypatch.setattr(watch, "forget", lambda pipeline, identity, asked: made.done.append(f"forget {identity['id']}"))
    monkeypatch.setattr("airflow_bottledwater.jobs.stop.stop", stop)
    monkeypatch.setattr(restarts, "reached", lambda pipeline: made.reached)
    monkeypatch.setattr(provision_stop, "asked_meanwhile", lambda pipeline, since: made.asked >= since)
    return made


def operator(**arguments: Any) -> StreamToKafkaOperator:
    return StreamToKafkaOperator(task_id="stream", **{"pipeline": ORDERS, **arguments})


def context(
    store: Store,
    *,
    try_number: int = 1,
    max_tries: int = 0,
    run_type: str = "manual",
    asked: float = TRIGGERED,
    clear_number: int = 0,
) -> dict[str, Any]:
    ti = ti_of("stream", at=asked, try_number=try_number, max_tries=max_tries)
    run = run_of(run_type, at=asked, clear_number=clear_number)
    return {"task_state_store": store, "ti": ti, "dag_run": run}


def deferred(act: Callable[[], Any]) -> JobTrigger:
    with pytest.raises(TaskDeferred) as raised:
        act()
    assert raised.value.method_name == "execute_complete"
    assert isinstance(raised.value.trigger, JobTrigger)
    return raised.value.trigger


def paused(made: StreamToKafkaOperator, store: Store, event: dict[str, Any]) -> float:
    """The seconds for which the task is deferred before it submits again, as it then does."""
    with pytest.raises(TaskDeferred) as raised:
        made.execute_complete(context(store), event)
    assert raised.value.method_name == "submit_again"
    assert isinstance(raised.value.trigger, PauseTrigger)
    return raised.value.trigger.until - time.time()


def again(made: StreamToKafkaOperator, store: Store) -> JobTrigger:
    return deferred(lambda: made.submit_again(context(store), {"status": "over"}))


# ------------------------------------------------------------------ execute
def test_first_it_submits_stores_who_the_job_is_and_defers(world: World) -> None:
    store = Store()
    trigger = deferred(lambda: operator().execute(context(store)))
    assert world.done == ["start"]
    assert trigger.identity == NEW == store.values["bottledwater_job"]
    assert store.retentions == {NEVER_EXPIRE}
    assert trigger.deadline is None and trigger.hook["settings"]["slot"] == "orders"
    assert "--bounded" not in world.arguments and "--pipeline" in world.arguments


def test_who_the_job_is_is_stored_before_it_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spark_job, "start", died)
    store = Store()
    made = operator()
    with pytest.raises(KeyboardInterrupt):
        made.execute(context(store))
    assert store.values["bottledwater_job"] == NEW == made._identity


@pytest.mark.parametrize(
    ("bounded", "given"), [(True, True), ("True", True), ("true", True), ("False", False), ("", False), (False, False)]
)
def test_bounded_may_come_as_text(world: World, bounded: Any, given: bool) -> None:
    deferred(lambda: operator(bounded=bounded).execute(context(Store())))
    assert ("--bounded" in world.arguments) == given


def test_a_retry_attaches_to_a_job_that_runs(world: World) -> None:
    world.living.add(OLD["id"])
    store = Store(bottledwater_job=OLD)
    trigger = deferred(lambda: operator(retries=2).execute(context(store, try_number=2, max_tries=2)))
    assert world.done == []
    assert trigger.identity == OLD == store.values["bottledwater_job"]


@pytest.mark.parametrize("found", [True, False])
def test_what_the_triggerer_cannot_see_the_task_looks_at(
    world: World, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    store, made = Store(), operator(timeout=3600, start_timeout=1500)
    trigger = deferred(lambda: made.execute(context(store)))
    given, still_runs = list[float](), watch.still_runs
    monkeypatch.setattr(watch, "still_runs", lambda *of, start_timeout: given.append(start_timeout) or still_runs(*of))
    event = {"status": "unseen", "message": "Nobody watches it.", "trigger": list(trigger.serialize())}

    def resume() -> Any:
        return operator().resume_execution("execute_complete", {"event": event}, context(store))

    if not found:  # here, either
        monkeypatch.delenv("AIRFLOW_CONN_KAFKA_DEFAULT")
    again = deferred(resume)
    assert again.serialize() == trigger.serialize() and again.deadline is not None
    # nothing was done to the job
    assert world.done == ["start"] and store.values["bottledwater_job"] == NEW
    world.end(NEW, ok=True, counts={"position": "0/5"})
    if found:
        assert resume() == {"position": "0/5"}
        # it may not have begun yet: it has what is left of its time
        assert given == [900.0, 900.0]


def test_a_retry_after_a_job_that_died_submits(world: World) -> None:
    store = Store(bottledwater_job=OLD)
    trigger = deferred(lambda: operator(retries=2).execute(context(store, try_number=3, max_tries=2)))
    assert world.done == ["forget old", "start"] and trigger.identity == NEW


def test_a_retry_after_a_job_that_fell_silent_fences_it_and_submits(world: World) -> None:
    """It may only be frozen: its record, with the request to stop, stays for it."""
    world.ends["old"] = Ended(Outcome(ok=False, error="silent", transient=True), lost=True)
    deferred(lambda: operator(retries=2).execute(context(Store(bottledwater_job=OLD), try_number=3, max_tries=2)))
    assert world.done == ["stop old", "remove old", "start"]


@pytest.mark.parametrize(("try_number", "max_tries", "retries"), [(2, 1, 0), (5, 6, 2), (1, 2, 2)])
def test_a_cleared_task_stops_the_old_job_before_it_submits(
    world: World, try_number: int, max_tries: int, retries: int
) -> None:
    """Clearing sets max_tries to try_number + retries and adds one to try_number; the state stays."""
    world.living.add(OLD["id"])
    store = Store(bottledwater_job=OLD)
    trigger = deferred(
        lambda: operator(retries=retries).execute(context(store, try_number=try_number, max_tries=max_tries))
    )
    assert world.done == ["stop old", "forget old", "start"]
    assert trigger.identity == NEW == store.values["bottledwater_job"]


def test_a_cleared_task_does_not_submit_while_the_old_job_cannot_be_stopped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use(*_: Any, **__: Any) -> None:
        raise SlotInUse("Slot 'orders' is in use.")

    monkeypatch.setattr(stop, "stop", in_use)
    with pytest.raises(SlotInUse):
        operator().execute(context(Store(bottledwater_job=OLD), try_number=2, max_tries=1))
    assert world.done == []


def test_a_retry_of_a_job_that_has_ended_well_ends_well(world: World) -> None:
    world.end(OLD, ok=True, counts={"position": "0/5", "published": 7})
    result = operator(retries=1).execute(context(Store(bottledwater_job=OLD), try_number=2, max_tries=1))
    assert result == {"position": "0/5", "published": 7}
    assert world.done == ["forget old"]


@pytest.mark.parametrize("retry", [True, False])
def test_what_a_bounded_run_has_changed_is_told_before_its_job_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch, retry: bool
) -> None:
    monkeypatch.setattr(AssetEvents, "stream", lambda self, begun: world.done.append(f"tell {begun}"))
    monkeypatch.setattr(StreamToKafkaOperator, "keep_lineage", lambda self: world.done.append("lineage"))
    world.end(OLD, ok=True, counts={"position": "0/5"})
    made, store = operator(bounded=True, retries=1), Store(bottledwater_job=OLD, bottledwater_began="0/1")
    of = context(store, try_number=2, max_tries=1)
    assert (made.execute(of) if retry else made.execute_complete(of, ended(world))) == {"position": "0/5"}  # type: ignore[arg-type]
    assert world.done == ["tell 0/1", "lineage", "forget old"]


@pytest.mark.parametrize(
    ("try_number", "told", "began", "is_now"),
    [
        # what the first try has published is told with what this one does
        (2, False, "0/1", "0/1"),
        (2, False, None, "0/9"),
        # also if the task was cleared before it could be told
        (3, False, "0/1", "0/1"),
        (3, True, "0/1", "0/9"),
    ],
)
def test_a_bounded_run_that_succeeds_in_the_end_tells_what_all_tries_have_published(
    world: World, monkeypatch: pytest.MonkeyPatch, try_number: int, told: bool, began: Any, is_now: Any
) -> None:
    monkeypatch.setattr(AssetEvents, "begin", lambda _: "0/9")
    world.ends["old"] = end = Ended(Outcome(ok=True, stopped=True), asked=True)
    old = {**OLD, "ended": end.as_event()} if told else OLD
    known = {} if began is None else {"bottledwater_began": began}
    store = Store(bottledwater_job=old, **known, **({} if told else {"bottledwater_untold": True}))
    at = context(store, try_number=try_number, max_tries=1 if try_number == 2 else 3)
    deferred(lambda: operator(bounded=True, retries=1).execute(at))
    assert "start" in world.done and store.get("bottledwater_began") == is_now
    assert len(world.begun) == 1


def test_a_bounded_run_that_could_not_be_told_is_told_by_a_retry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    away = [True]

    def tell(self: AssetEvents, begun: Any) -> None:
        if away:
            raise Outage("away")
        world.done.append(f"tell {begun}")

    monkeypatch.setattr(AssetEvents, "stream", tell)
    world.end(OLD, ok=True, counts={"position": "0/5"})
    made, store = operator(bounded=True, retries=1), Store(bottledwater_job=OLD, bottledwater_began="0/1")
    with pytest.raises(Outage, match="away"):
        made.execute_complete(context(store, max_tries=1), ended(world))
    assert world.done == []
    away.clear()
    assert made.execute(context(store, try_number=2, max_tries=1)) == {"position": "0/5"}  # type: ignore[arg-type]
    assert world.done == ["tell 0/1", "forget old"]


def test_a_bounded_run_begins_only_where_it_is_known_what_it_has_to_tell(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: AssetEvents) -> None:
        raise Outage("away")

    monkeypatch.setattr(AssetEvents, "begin", away)
    with pytest.raises(Outage, match="away"):
        operator(bounded=True).execute(context(Store()))
    assert world.done == []


def test_a_cleared_bounded_run_does_not_tell_again_what_was_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first try after that could not begin."""
    begins = iter([Outage("away"), Outage("away"), "0/9"])

    def begin(self: AssetEvents) -> Any:
        if isinstance(found := next(begins), Outage):
            raise found
        return found

    monkeypatch.setattr(AssetEvents, "begin", begin)
    world.end(OLD, ok=True, counts={"position": "0/5"})
    made = operator(bounded=True, retries=2)
    store = Store(bottledwater_job=OLD, bottledwater_began="0/1", bottledwater_untold=True)
    made.execute_complete(context(store, max_tries=2), ended(world))
    for number in (2, 3):
        with pytest.raises(Outage, match="away"):
            made.execute(context(store, try_number=number, max_tries=3))
    deferred(lambda: made.execute(context(store, try_number=4, max_tries=3)))
    assert world.done == ["forget old", "start"] and store.get("bottledwater_began") == "0/9"
    assert store.get("bottledwater_untold")


def test_a_retry_of_a_job_that_was_stopped_submits(world: World) -> None:
    """After its timeout for example: it has not ended well, it was ended."""
    world.end(OLD, ok=True, stopped=True, counts={"position": "0/5"})
    world.ends["old"] = dataclasses.replace(world.ends["old"], asked=True)
    deferred(lambda: operator(retries=1).execute(context(Store(bottledwater_job=OLD), try_number=2, max_tries=1)))
    assert world.done == ["forget old", "start"]


def test_a_retry_does_not_undo_that_the_pipeline_was_asked_to_stop(world: World) -> None:
    """The first try saw the end, and failed before it could succeed: Airflow did not tell it the connections, for
    example."""
    world.end(OLD, ok=True, stopped=True, counts={"position": "0/5"})
    found = operator(retries=1).execute(context(Store(bottledwater_job=OLD), try_number=2, max_tries=1))  # type: ignore[arg-type]
    assert found == {"position": "0/5", "stopped": True} and world.done == ["forget old"]


def test_nor_does_a_retry_behind_a_try_that_has_cleared_the_job_away(world: World) -> None:
    """And then failed before it could succeed: its result could not be handed over, for example."""
    world.end(OLD, ok=True, stopped=True, counts={"position": "0/5"})
    store, event = Store(bottledwater_job=OLD), ended(world)
    for try_number in (1, 2, 3):
        made, at = operator(retries=2), context(store, try_number=try_number, max_tries=2)
        found = made.execute_complete(at, event) if try_number == 1 else made.execute(at)  # type: ignore[arg-type]
        assert found == {"position": "0/5", "stopped": True}
        world.ends.clear()  # of what is forgotten, nothing is known any more
    assert set(world.done) == {"forget old"}
    # cleared, it runs
    deferred(lambda: operator(retries=2).execute(context(store, try_number=4, max_tries=5)))
    assert world.done[-1] == "start" and "stop old" not in world.done


def test_a_retry_behind_a_job_that_has_failed_waits_for_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(bottledwater_job=OLD)
    with pytest.raises(JobFailed, match="killed"):
        operator(restarts=0).execute_complete(context(store), ended(world))
    monkeypatch.setattr(watch, "still_runs", lambda *_: pytest.fail("the job has ended"))
    deferred(lambda: operator(retries=1).execute(context(store, try_number=2, max_tries=1)))
    assert world.done == ["forget old", "start"]


def test_a_task_that_is_cleared_after_its_retries_were_changed_is_no_retry(world: World) -> None:
    """Clearing counts those of the run's version of the DAG, and the operator has those of the file."""
    store = Store()
    deferred(lambda: operator().execute(context(store)))
    deferred(lambda: operator(retries=3).execute(context(store, try_number=2, max_tries=1)))
    assert world.done == ["start", "stop new", "forget new", "start"]


@pytest.mark.parametrize("timeout", [100.0, 100, "100"])
def test_a_timeout_becomes_the_triggers_deadline(world: World, timeout: Any) -> None:
    with pytest.raises(TaskDeferred) as raised:
        operator(timeout=timeout, poll_interval=2.0).execute(context(Store()))
    trigger: Any = raised.value.trigger
    assert 90 < trigger.deadline - time.time() <= 100
    # Airflow's own comes later: nobody stops the job when that one expires
    assert raised.value.timeout is not None and raised.value.timeout.total_seconds() > 100


@pytest.mark.parametrize("timeout", [None, "None", "", 0])
def test_without_a_timeout_there_is_no_deadline(world: World, timeout: Any) -> None:
    assert deferred(lambda: operator(timeout=timeout).execute(context(Store()))).deadline is None


@pytest.mark.parametrize("later", [True, False])
def test_asked_to_stop_in_the_pause_it_ends_instead_of_submitting_again(world: World, later: bool) -> None:
    started = time.time() - 60
    store = Store(bottledwater_restarts={"count": 3, "at": time.time() + 8, "position": None, "before": started})
    world.asked = started + (1 if later else -1)
    if later:
        assert operator().submit_again(context(store), {"status": "over"}) == {}  # type: ignore[arg-type]
    else:
        again(operator(), store)
    assert world.done == ([] if later else ["start"])


@pytest.mark.parametrize("stage", ["before", "between"])
@pytest.mark.parametrize(
    ("run_type", "asked", "clear_number", "begins"),
    [
        ("manual", -5, 0, False),
        ("manual", 5, 0, True),
        # cleared before, and behind it
        ("manual", -5, 1, False),
        ("scheduled", 5, 1, True),
        # a schedule, Airflow's backfills and other DAGs start nothing again
        ("scheduled", 5, 0, False),
        ("backfill", 5, 0, False),
        ("operator_triggered", 5, 0, False),
    ],
)
def test_a_pipeline_that_was_stopped_runs_only_if_a_person_has_asked_for_that_since(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    run_type: str,
    asked: float,
    clear_number: int,
    begins: bool,
) -> None:
    """Also if the stop comes while the job is about to be submitted, when nobody finds it yet.

    :param asked: seconds behind the stop.
    """
    monkeypatch.setattr(AssetEvents, "begin", lambda _: "0/9")

    def announce(*_: Any) -> None:
        world.stopped = TRIGGERED

    monkeypatch.setattr(submitted, "announce", announce)
    if stage == "before":
        announce()
    store, made = Store(), operator(bounded=True)
    of = context(store, run_type=run_type, asked=TRIGGERED + asked, clear_number=clear_number)
    if begins:
        deferred(lambda: made.execute(of))
        assert world.done == ["start"]
        return
    with pytest.raises(AirflowSkipException, match="asked to stop"):
        made.execute(of)
    assert world.done == ([] if stage == "before" else ["forget new"])


def test_a_retry_does_not_begin_what_was_stopped_since_the_first_try(world: World) -> None:
    store = Store()
    deferred(lambda: operator(retries=1).execute(context(store, max_tries=1)))
    world.living.clear()
    world.stopped = TRIGGERED + 5
    with pytest.raises(AirflowSkipException):
        operator(retries=1).execute(context(store, try_number=2, max_tries=1, asked=TRIGGERED + 60))
    # nor does the job that follows in the same try
    with pytest.raises(AirflowSkipException):
        operator(retries=1).submit_again(context(store, try_number=2, max_tries=1), {"status": "over"})  # type: ignore[arg-type]
    assert world.done.count("start") == 1
    # whoever clears it starts the pipeline again
    cleared = context(store, try_number=3, max_tries=3, asked=TRIGGERED + 90, clear_number=1)
    deferred(lambda: operator(retries=1).execute(cleared))
    assert world.done[-1] == "start"


def test_a_first_try_that_was_lost_before_it_began_anything_is_made_up_for(world: World) -> None:
    """Where a scheduler restarts, for example: the first try that runs has another number."""
    world.stopped = TRIGGERED - 5
    deferred(lambda: operator(retries=1).execute(context(Store(), try_number=2, max_tries=1)))
    assert world.done == ["start"]
    # what a person has stopped since, that try does not begin
    world.stopped = TRIGGERED + 5
    with pytest.raises(AirflowSkipException):
        operator(retries=1).execute(context(Store(), try_number=2, max_tries=1))


@pytest.mark.parametrize("cleared", [False, True])
def test_a_retry_that_follows_a_stop_is_not_what_a_person_has_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch, cleared: bool
) -> None:
    """Also if the first try has failed before it could begin anything."""
    store, made = Store(bottledwater_life=0), operator(retries=1)
    first, second = (1, 2) if not cleared else (3, 4)
    lives = {"max_tries": second - 1, "clear_number": int(cleared)}
    with monkeypatch.context() as patched:
        patched.setattr(StreamToKafkaOperator, "_place", lambda _: (_ for _ in ()).throw(Outage("away")))
        with pytest.raises(Outage):
            made.execute(context(store, try_number=first, **lives))
    world.stopped = TRIGGERED + 5
    with pytest.raises(AirflowSkipException):
        made.execute(context(store, try_number=second, asked=TRIGGERED + 60, **lives))
    assert not world.done


def test_a_schedules_job_is_submitted_again_while_it_is_not_known_whether_there_was_a_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job waits for the servers, for longer than the restarts do; only before its first one nothing is begun."""

    def away(*_: Any) -> None:
        raise Outage("Kafka is away.")

    store, made = Store(), operator(retries=1)
    monkeypatch.setattr(requests, "refuse_stopped", away)
    with pytest.raises(Outage):
        made.execute(context(store, max_tries=1, run_type="scheduled"))
    with monkeypatch.context() as patched:
        patched.setattr(requests, "refuse_stopped", lambda *_: None if not world.done else away())
        patched.setattr(submitted, "announce", lambda *_: world.done.append("announce"))
        # what may have been stopped just before its first job could be found
        with pytest.raises(Outage):
            made.execute(context(store, max_tries=1, run_type="scheduled"))
        assert world.done == ["announce", "forget new"] and world.done.clear() is None
    with pytest.raises(Outage):
        made.execute(context(store, try_number=2, max_tries=1, run_type="scheduled"))
    with monkeypatch.context() as patched:
        patched.setattr(requests, "refuse_stopped", lambda *_: None)
        deferred(lambda: made.execute(context(store, try_number=2, max_tries=1, run_type="scheduled")))
    deferred(lambda: made.submit_again(context(store, try_number=2, max_tries=1, run_type="scheduled"), OVER))
    assert world.done.count("start") == 2


@pytest.mark.parametrize("bounded", [False, True])
def test_what_a_verification_has_left_is_taken_when_the_job_is_submitted(
    world: World, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    monkeypatch.setattr(AssetEvents, "begin", lambda _: "0/9")
    monkeypatch.setattr(AssetEvents, "begun", lambda _: world.done.append("taken"))
    world.stopped = TRIGGERED + 5
    with pytest.raises(AirflowSkipException):
        operator(bounded=bounded).execute(context(Store()))
    assert not world.done
    monkeypatch.setattr(submitted, "announce", lambda *_: setattr(world, "stopped", TRIGGERED + 5))
    world.stopped = -math.inf
    with pytest.raises(AirflowSkipException):
        operator(bounded=bounded).execute(context(Store()))
    assert "taken" not in world.done
    monkeypatch.setattr(submitted, "announce", lambda *_: None)
    world.stopped = -math.inf
    deferred(lambda: operator(bounded=bounded).execute(context(Store())))
    assert world.done[-2:] == ["start", "taken"]


@pytest.mark.parametrize(("bounded", "take_over"), [(False, False), (True, False), (True, True)])
def test_a_job_that_continues_one_ends_no_stream_that_was_begun_meanwhile(
    world: World, bounded: bool, take_over: bool
) -> None:
    """A command, for example, that was started while no triggerer ran; a job of this task that fell silent is not."""
    restarts = {"count": 3, "at": time.time() + 8, "position": None, "before": time.time() - 60}
    made, store = operator(bounded=bounded, take_over=take_over), Store(bottledwater_restarts=dict(restarts))
    before = dict(store.values)
    world.holder = Holder(JOB)
    if take_over:
        again(made, store)
        assert world.done == ["start"]
        return
    error = SlotInUse if bounded else AirflowFailException
    with pytest.raises(error, match="would end it for good" if bounded else "was taken over by the"):
        made.submit_again(context(store), {"status": "over"})  # type: ignore[arg-type]
    assert world.done == [] and store.values == before


@pytest.mark.parametrize("bounded", [True, False])
def test_an_outage_in_the_pause_is_waited_for_by_the_next_job(
    world: World, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """A stream's own patience is longer than that of all restarts together."""

    def away(*_: Any) -> None:
        raise Outage("away")

    monkeypatch.setattr(stream_operator, "living", away)
    restarts = {"count": 10, "at": time.time() + 8, "position": None, "before": time.time() - 60}
    made, store = operator(bounded=bounded), Store(bottledwater_restarts=restarts)
    if bounded:
        with pytest.raises(JobFailed, match="away"):
            made.submit_again(context(store), {"status": "over"})  # type: ignore[arg-type]
    else:
        again(made, store)
    assert world.done == ([] if bounded else ["start"])


@pytest.mark.parametrize(("known", "same"), [("shop", True), ("", True), ("other", False)])
def test_a_database_that_the_connection_does_not_name_is_any(world: World, known: str, same: bool) -> None:
    store = Store()
    deferred(lambda: operator(retries=2).execute(context(store, max_tries=2)))
    store.values["bottledwater_whose"] = [known, "orders"]
    made, at = operator(retries=2), context(store, try_number=2, max_tries=2)
    if same:
        deferred(lambda: made.execute(at))
    else:
        with pytest.raises(AirflowFailException, match="in database 'other'"):
            made.execute(at)  # type: ignore[arg-type]


def test_a_cleared_task_whose_job_has_ended_begins_with_another_pipeline(world: World) -> None:
    store = Store(bottledwater_job={**OLD, "ended": Ended(Outcome(ok=True)).as_event()})
    store.values["bottledwater_whose"] = ["shop", "before"]
    with pytest.raises(AirflowFailException, match="slot 'before'"):
        operator(retries=1).execute(context(store, try_number=2, max_tries=1))
    deferred(lambda: operator(retries=1).execute(context(store, try_number=3, max_tries=3)))
    assert world.done == ["start"] and store.values["bottledwater_whose"][1] == "orders"


def test_a_task_has_nothing_to_do_with_the_job_of_another_pipeline(world: World) -> None:
    """One entry fewer in the list of a mapped task gives it the pipeline of the next one, while its job runs."""
    store, other = Store(), operator(pipeline=Description("other", source=Source(tables=("a",))), retries=2)
    deferred(lambda: operator(retries=2).execute(context(store, max_tries=2)))
    kept, event = dict(store.values), ended(world)
    for act in (
        lambda: other.execute(context(store, try_number=2, max_tries=2)),
        lambda: other.execute(context(store, try_number=2, max_tries=3)),  # cleared
        lambda: other.resume_execution("execute_complete", {"event": event}, context(store)),
        lambda: other.resume_execution("submit_again", {"event": {"status": "over"}}, context(store)),
        lambda: other.resume_execution("__fail__", {"error": "it failed"}, context(store, try_number=3, max_tries=2)),
    ):
        with pytest.raises(AirflowFailException, match=r"slot 'orders' .* with slot 'other' .* here now"):
            act()
    # but for when a person has asked for it
    assert world.done == ["start"] and {**store.values, "bottledwater_asked": kept["bottledwater_asked"]} == kept


def test_a_task_that_stays_ends_when_it_is_asked_to_stop_in_the_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_BACKOFF", 0.01)
    ended = Ended(Outcome(ok=False, error="died", transient=True))
    monkeypatch.setattr(StreamToKafkaOperator, "_wait", lambda *_: ended)
    world.asked = time.time() + 60
    assert operator(deferrable=False).execute(context(Store())) == {}  # type: ignore[arg-type]
    assert world.done == ["start, ends with task", "forget new"]


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize("wrong", [{"timeout": "soon"}, {"restarts": "often"}, {"timeout": "inf"}])
def test_a_limit_that_is_no_number_is_refused_before_the_job_starts(world: World, wrong: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException, match=f"Setting '{next(iter(wrong))}' cannot be"):
        operator(**wrong).execute(context(Store()))
    assert world.done == []


def test_a_job_without_its_key_of_hashes_is_not_submitted(world: World) -> None:
    with pytest.raises(AirflowFailException, match="'hash_key_file' cannot be read"):
        operator(pipeline=KEYLESS).execute(context(Store()))
    assert world.done == []


@pytest.mark.parametrize("before", [ReplicationPreflightOperator, CreateReplicationSlotOperator])
def test_nothing_is_made_without_the_key_of_hashes(before: Any) -> None:
    with pytest.raises(AirflowFailException, match="'hash_key_file' cannot be read"):
        before(task_id="t", pipeline=KEYLESS).execute(context(Store()))


def test_workers_that_end_with_their_task_are_refused_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "KubernetesExecutor")
    with pytest.raises(AirflowFailException, match="deferrable=False"):
        operator().execute(context(Store()))
    assert world.done == []
    # as it advises
    monkeypatch.setattr(StreamToKafkaOperator, "_wait", lambda *_: Ended(Outcome(ok=True, counts={"position": "0/5"})))
    assert operator(deferrable=False).execute(context(Store())) == {"position": "0/5"}
    assert world.done == ["start, ends with task", "forget new"]


@pytest.mark.parametrize(
    "executor", ["LocalExecutor", "CeleryExecutor", "airflow.providers.edge3.executors.EdgeExecutor"]
)
def test_workers_that_live_on_are_not_refused(world: World, monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    deferred(lambda: operator().execute(context(Store())))
    assert world.done == ["start"]


@pytest.mark.parametrize("name", ["postgres_default", "spark_default"])
def test_without_a_connection_nothing_is_started(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(f"AIRFLOW_CONN_{name.upper()}")
    with pytest.raises(Outage, match=f"'{name}'"):
        operator().execute(context(Store()))
    assert world.done == []


def test_in_cluster_mode_it_is_sent_and_watched(world: World, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "KubernetesExecutor")
    connect("spark_default", conn_type="spark", host="yarn", extra={"deploy-mode": "cluster"})
    store = Store()
    trigger = deferred(lambda: operator().execute(context(store)))
    assert world.done == ["send"]
    assert trigger.identity == store.values["bottledwater_job"] == {**NEW, "application": "application_1_2"}
    # the file is where YARN puts it
    assert world.arguments[1:3] == ["--pipeline", "pipeline-x.json"]
    assert "('spark.yarn.submit.waitAppCompletion', 'false')" in world.arguments


@pytest.fixture
def cluster(world: World, connections: Any, connect: Any) -> None:
    connect("spark_default", conn_type="spark", host="yarn", extra={"deploy-mode": "cluster"})


@pytest.mark.usefixtures("cluster")
def test_a_job_whose_submission_failed_is_given_up_since_the_cluster_may_have_accepted_it(world: World) -> None:
    world.refuses = 1
    store = Store()
    with pytest.raises(JobDied, match="exit code 1"):
        operator(retries=1).execute(context(store, max_tries=1))
    # its record and the request to stop stay: nothing is forgotten
    assert world.done == ["send", "stop new"]
    world.ends["new"] = Ended(Outcome(ok=False, error="It did not answer.", transient=True), pending=True)
    deferred(lambda: operator(retries=1).execute(context(store, try_number=2, max_tries=1)))
    assert world.done == ["send", "stop new", "send"]


@pytest.mark.usefixtures("cluster")
def test_a_submission_that_is_interrupted_is_given_up_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(hook: Any, application: str, started: Any, named: Any) -> None:
        named("application_1_2")
        raise TimeoutError

    stopped = []
    monkeypatch.setattr(spark_job, "send", send)
    monkeypatch.setattr(stop, "stop", lambda pipeline, identity, **_: stopped.append(identity))
    with pytest.raises(TimeoutError):
        operator().execute(context(Store()))
    assert stopped == [{**NEW, "application": "application_1_2"}] and world.done == []


@pytest.mark.usefixtures("cluster")
def test_a_submission_that_fails_after_the_job_died_counts_as_another_restart(world: World) -> None:
    world.refuses = 1
    store = Store(bottledwater_job=OLD)
    assert 1 < paused(operator(), store, ended(world)) <= 2
    with pytest.raises(TaskDeferred) as raised:
        operator().submit_again(context(store), {"status": "over"})
    assert raised.value.method_name == "submit_again"
    assert store.values["bottledwater_restarts"]["count"] == 2
    assert again(operator(), store).identity["application"] == "application_1_2"
    world.refuses = 1
    with pytest.raises(JobFailed, match="exit code 1"):
        operator(restarts=2).submit_again(context(store), {"status": "over"})


def test_a_task_that_stays_submits_again_until_it_is_accepted(
    world: World, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_BACKOFF", 0.01)
    ends = [
        Ended(Outcome(ok=False, error="died", transient=True)),
        Ended(Outcome(ok=True, counts={"position": "0/5"})),
    ]

    def wait(*_: Any) -> Ended:
        world.refuses = len(ends) - 1
        return ends.pop(0)

    monkeypatch.setattr(StreamToKafkaOperator, "_wait", wait)
    assert operator(deferrable=False).execute(context(Store())) == {"position": "0/5"}
    assert world.done == ["send", "forget new", "send", "stop new", "send", "forget new"]


def test_the_timeout_goes_on_while_the_job_is_submitted_again(world: World) -> None:
    store = Store()
    first = deferred(lambda: operator(timeout=100).execute(context(store)))
    world.end(NEW, ok=False, error="died", transient=True)
    paused(operator(timeout=100), store, ended(world, NEW))
    time.sleep(0.2)
    found = again(operator(timeout=100), store)
    assert first.deadline is not None and found.deadline == pytest.approx(first.deadline, abs=0.1)


def test_a_standalone_cluster_has_no_python_drivers(world: World, connect: Any) -> None:
    connect("spark_default", conn_type="spark", host="spark://m", port=7077, extra={"deploy-mode": "cluster"})
    with pytest.raises(AirflowFailException, match="deploy-mode to client"):
        operator().execute(context(Store()))
    # as it advises
    connect("spark_default", conn_type="spark", host="spark://m", port=7077, extra={"deploy-mode": "client"})
    deferred(lambda: operator().execute(context(Store())))


@pytest.mark.parametrize(
    ("given", "cores"), [({}, "1"), ({"executor_cores": 4}, "4"), ({"total_executor_cores": 3}, "3")]
)
def test_a_stream_takes_no_more_cores_of_a_standalone_cluster_than_one_executor_has(
    world: World, connect: Any, given: dict[str, int], cores: str
) -> None:
    connect("spark_default", conn_type="spark", host="spark://m", port=7077, extra={"deploy-mode": "client"})
    made = operator(**given)
    deferred(lambda: made.execute(context(Store())))
    assert made.conf is not None and made.conf["spark.cores.max"] == cores


def test_what_the_refusal_of_an_executor_advises_is_not_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "KubernetesExecutor,LocalExecutor")
    with pytest.raises(AirflowFailException, match="executor='LocalExecutor'"):
        operator().execute(context(Store()))
    deferred(lambda: operator(executor="LocalExecutor").execute(context(Store())))


@pytest.mark.parametrize("value", ["true", "True", "TRUE ", True])
def test_speculative_execution_is_refused_in_all_of_its_forms(world: World, value: Any) -> None:
    with pytest.raises(AirflowFailException, match="speculation"):
        operator(conf={"spark.speculation": value}).execute(context(Store()))
    # nothing is left of it
    assert world.done == ["forget new"]
    world.done.clear()
    deferred(lambda: operator(conf={"spark.speculation": "false"}).execute(context(Store())))


# ------------------------------------------------------------------ execute_complete
def ended(world: World, identity: dict[str, str] = OLD) -> dict[str, Any]:
    how = world.how(identity)
    assert how is not None
    return {"status": "ended", "identity": identity, **how.as_event()}


@pytest.mark.parametrize("event", [None, {}, {"status": "running"}, {"status": "error", "identity": OLD}])
def test_an_event_that_is_not_known_fails(world: World, event: dict[str, Any] | None) -> None:
    with pytest.raises(JobFailed, match="Unexpected trigger event"):
        operator().execute_complete(context(Store()), event)


def test_a_job_that_ended_well_is_the_tasks_result(world: World) -> None:
    world.end(OLD, ok=True, counts={"position": "0/5"})
    assert operator().execute_complete(context(Store()), ended(world)) == {"position": "0/5"}
    assert world.done == ["forget old"]


def test_a_permanent_failure_is_not_retried(world: World) -> None:
    world.end(OLD, ok=False, error="Slot 'orders' was invalidated.", transient=False)
    with pytest.raises(AirflowFailException, match="invalidated"):
        operator().execute_complete(context(Store()), ended(world))


def test_a_job_that_died_is_submitted_again_after_a_pause(world: World) -> None:
    """In which no worker waits for it."""
    store = Store(bottledwater_job=OLD)
    assert 1 < paused(operator(), store, ended(world)) <= 2
    assert world.done == ["forget old"]
    trigger = again(operator(), store)
    assert world.done == ["forget old", "start"]
    assert trigger.identity == NEW == store.values["bottledwater_job"]
    assert store.values["bottledwater_restarts"]["count"] == 1
    assert store.retentions == {NEVER_EXPIRE}


def test_credentials_that_are_refused_behind_a_job_that_was_let_in_are_being_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the server first, and in the connection some minutes later."""
    store, refused = Store(bottledwater_job=OLD), [CredentialsRefused("PostgreSQL refuses the connection.")]

    def name_of(pipeline: Any) -> str:
        if refused:
            raise refused.pop()
        return "name"

    monkeypatch.setattr(live, "name_of", name_of)
    with pytest.raises(AirflowFailException, match="refuses the connection"):
        operator().execute(context(Store()))
    refused.append(CredentialsRefused("PostgreSQL refuses the connection."))
    paused(operator(), store, ended(world))
    with pytest.raises(TaskDeferred) as raised:
        operator().submit_again(context(store), {"status": "over"})
    assert raised.value.method_name == "submit_again" and store.values["bottledwater_restarts"]["count"] == 2
    assert again(operator(), store).identity == NEW
    world.end(NEW, ok=False, kind="CredentialsRefused", error="The schema registry denies access.", transient=False)
    paused(operator(), store, ended(world, NEW))
    assert store.values["bottledwater_restarts"]["count"] == 3
    # not without end; and at a first start at once
    for begun in (store, Store(bottledwater_job=NEW)):
        with pytest.raises(JobFailed if begun is store else AirflowFailException, match="denies access"):
            operator(restarts=3).execute_complete(context(begun), ended(world, NEW))


@pytest.mark.parametrize("event", [None, {}, {"status": "ended"}])
def test_an_event_that_ends_no_pause_fails(world: World, event: Any) -> None:
    with pytest.raises(JobFailed, match="Unexpected trigger event"):
        operator().submit_again(context(Store()), event)
    assert world.done == []


def test_it_is_submitted_with_longer_and_longer_pauses_and_not_for_ever(world: World) -> None:
    store, pauses = Store(), []
    for _ in range(10):
        pauses.append(round(paused(operator(restarts="10"), store, ended(world))))
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    world.done.clear()
    with pytest.raises(JobFailed, match="killed"):
        operator(restarts="10").execute_complete(context(store), ended(world))
    assert world.done == ["forget old"]


@pytest.mark.parametrize(
    ("ran", "position", "reached", "kind", "anew"),
    [
        # it published: whatever ended it is not what ended the ones before
        (1000, 5, 6, "Outage", True),
        # it only lived as long as its outage_timeout
        (1000, 5, 5, "Outage", False),
        (1000, 5, None, "Outage", False),
        (1000, None, 6, "Outage", False),
        # out of memory in the same transaction again
        (1000, 5, 5, "JobFailed", False),
        # nothing was to be published, and its host was started again
        (1000, 5, 5, "Interrupted", True),
        (10, 5, 6, "Interrupted", False),
    ],
)
def test_the_count_starts_anew_behind_a_job_that_worked(
    world: World, ran: float, position: int | None, reached: int | None, kind: str, anew: bool
) -> None:
    store = Store(bottledwater_restarts={"count": 7, "at": time.time() - ran, "position": position})
    world.end(OLD, ok=False, error="away", transient=True, kind=kind)
    world.reached = reached
    paused(operator(), store, ended(world))
    kept = store.values["bottledwater_restarts"]
    assert kept["count"] == (1 if anew else 8)
    assert kept["position"] == (position if reached is None else reached)


def test_a_job_that_was_stopped_while_its_task_waits_is_submitted_again(world: World) -> None:
    """By a triggerer that had to give the trigger to another one. A stop of the pipeline is a person's: the task
    succeeds."""
    world.end(OLD, ok=True, stopped=True, counts={"position": "0/5"})
    assert operator().execute_complete(context(Store()), ended(world))["position"] == "0/5"
    world.ends["old"] = Ended(Outcome(ok=True, stopped=True), asked=True)
    world.done.clear()
    store = Store()
    paused(operator(), store, ended(world))
    again(operator(), store)
    assert world.done == ["forget old", "start"]


def test_a_job_that_fell_silent_is_fenced_before_it_is_submitted_again(world: World) -> None:
    world.ends["old"] = Ended(Outcome(ok=False, error="silent", transient=True), lost=True)
    paused(operator(), Store(), ended(world))
    assert world.done == ["stop old", "remove old"]


def test_without_deferring_it_is_submitted_again_in_the_task(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter(
        [Ended(Outcome(ok=False, error="killed", transient=True)), Ended(Outcome(ok=True, counts={"position": "0/9"}))]
    )
    monkeypatch.setattr(StreamToKafkaOperator, "_wait", lambda *_: next(ends))
    monkeypatch.setattr(restarts, "_BACKOFF", 0.01)
    store = Store()
    assert operator(deferrable=False).execute(context(store)) == {"position": "0/9"}
    assert world.done == ["start, ends with task", "forget new", "start, ends with task", "forget new"]
    assert store.values["bottledwater_restarts"]["count"] == 1


def test_a_pause_in_the_task_lasts_no_longer_for_a_clock_that_is_set_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [1e6], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clocks = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 2e9 - 3600 * len(slept), sleep=sleep)
    monkeypatch.setattr(stream_operator, "time", clocks)
    operator()._sleep_until(2e9 + 8)
    assert 8 <= sum(slept) < 8.1
    # the end of the pause was told by another host's clock
    slept.clear()
    operator()._sleep_until(2e9 + 86_400)
    assert 300 <= sum(slept) < 300.1


def test_without_deferring_its_timeout_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamToKafkaOperator, "_wait", lambda self, identity, timeout: None)
    with pytest.raises(Outage, match="timeout of 5 s"):
        operator(deferrable=False, timeout=5.0).execute(context(Store()))
    assert world.done == ["start, ends with task", "stop new", "forget new"]


def test_after_its_time_the_job_is_stopped_and_the_task_fails(world: World) -> None:
    with pytest.raises(Outage, match="timeout of 5 s"):
        operator(timeout=5.0).execute_complete(context(Store()), {"status": "timeout", "identity": OLD})
    assert world.done == ["stop old", "forget old"]


@pytest.mark.parametrize(("try_number", "stopped"), [(1, []), (2, ["stop old", "forget old"])])
def test_when_the_trigger_fails_the_last_try_stops_the_job(world: World, try_number: int, stopped: list[str]) -> None:
    with pytest.raises(Exception, match="Trigger"):
        operator(retries=1).resume_execution(
            "__fail__",
            {"error": "Trigger failure"},
            context(Store(bottledwater_job=OLD), try_number=try_number, max_tries=1),  # type: ignore[arg-type]
        )
    assert world.done == stopped


def test_killed_on_the_worker_it_stops_the_job(world: World) -> None:
    made = operator()
    deferred(lambda: made.execute(context(Store())))
    made.on_kill()
    assert world.done == ["start", "stop new", "forget new"]


def test_killed_before_it_submits_it_starts_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow calls on_kill, and lets the process go on for some seconds."""
    made = operator()
    monkeypatch.setattr(submitted, "announce", lambda *_: made.on_kill())
    with pytest.raises(Outage, match="was ended"):
        made.execute(context(Store()))
    assert "start" not in world.done and "stop new" in world.done


def test_killed_while_it_looks_for_the_job_of_an_earlier_try_it_stops_that_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = operator(retries=1)

    def still_runs(pipeline: Any, identity: Any) -> None:
        made.on_kill()

    monkeypatch.setattr(watch, "still_runs", still_runs)
    with pytest.raises(Outage, match="was ended"):
        made.execute(context(Store(bottledwater_job=OLD), try_number=2, max_tries=1))  # type: ignore[arg-type]
    assert world.done == ["stop old", "forget old"]


def test_the_request_to_a_job_that_does_not_answer_stays(world: World) -> None:
    """It may wake up, or begin later."""
    world.answers = False
    made = operator()
    deferred(lambda: made.execute(context(Store())))
    made.on_kill()
    assert world.done == ["start", "stop new", "remove new"]


def test_ended_by_airflow_a_task_that_stays_does_not_submit_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow calls on_kill, and lets the process go on."""
    made = operator(deferrable=False)

    def wait(*_: Any) -> Ended:
        made.on_kill()
        return Ended(Outcome(ok=True, stopped=True), asked=True)

    monkeypatch.setattr(StreamToKafkaOperator, "_wait", wait)
    with pytest.raises(Outage, match="task was ended"):
        made.execute(context(Store()))
    assert world.done == ["start, ends with task", "stop new", "forget new"]


def test_it_can_be_copied(world: World) -> None:
    assert copy.deepcopy(operator(bounded=True)).bounded is True


# ------------------------------------------------------------------ who holds the slot
JOB = Job(7, "claim", "stream", "h", 5, 0.0)


@pytest.mark.parametrize(
    ("fate", "arguments", "does"),
    [
        # a stream that has a task, beside which a bounded run begins
        (Fate.GOES_ON, {"bounded": True}, "refuses"),
        (Fate.UNKNOWN, {"bounded": "True"}, "refuses"),
        (Fate.GOES_ON, {"bounded": True, "take_over": "True"}, "submits"),
        (Fate.GOES_ON, {}, "submits"),
        # a stream of another Airflow, of which this one knows nothing
        (Fate.FOREIGN, {"bounded": True}, "refuses"),
        (Fate.FOREIGN, {}, "submits"),
        # nobody waits for it any more
        (Fate.GONE, {}, "stops"),
        (Fate.GONE, {"bounded": True}, "stops"),
        (Fate.ENDED, {"bounded": True}, "stops"),
        # of a command
        (None, {"bounded": True}, "refuses"),
        (None, {}, "submits"),
    ],
)
def test_a_bounded_run_ends_no_stream_that_lives(
    world: World, monkeypatch: pytest.MonkeyPatch, fate: Fate | None, arguments: dict[str, Any], does: str
) -> None:
    owner = Owner("d", "of another day", "stream", -1, "h", "", "s")
    world.holder = Holder(JOB) if fate is None else Holder(JOB, owner, OLD)
    monkeypatch.setattr(stream_operator, "owners_fate", lambda *task: fate)
    if does == "refuses":
        # it is tried again: the stream may end
        with pytest.raises(SlotInUse, match=r"epoch 7.*" + ("of a command" if fate is None else "'of another day'")):
            operator(**arguments).execute(context(Store()))
        assert world.done == []
        return
    deferred(lambda: operator(**arguments).execute(context(Store())))
    assert world.done == (["stop old", "forget old", "start"] if does == "stops" else ["start"])


def test_a_task_of_another_airflow_with_the_same_ids_is_not_this_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[Owner] = []
    monkeypatch.setattr(submitted, "announce", lambda pipeline, job_id, kind, owner, *_: announced.append(owner))
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://a")
    deferred(lambda: operator().execute(context(Store())))
    assert announced[0].airflow == "https://a"
    world.holder = Holder(JOB, dataclasses.replace(announced[0], airflow="https://b"), OLD)
    with pytest.raises(SlotInUse, match="in the Airflow 'https://b'"):
        operator(bounded=True).execute(context(Store()))
    assert "stop old" not in world.done


def test_a_kafka_that_does_not_answer_keeps_no_stream_from_starting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise Outage("away")

    monkeypatch.setattr(stream_operator, "living", away)
    # but a bounded run would end a stream that lives
    with pytest.raises(Outage, match="away"):
        operator(bounded=True).execute(context(Store()))
    for arguments in ({}, {"bounded": True, "take_over": True}):
        world.done.clear()
        deferred(lambda arguments=arguments: operator(**arguments).execute(context(Store())))  # type: ignore[misc]
        assert world.done == ["start"]
