"""Errors of ours through Spark: what comes out is what went in, and only what passes is tried again."""

from __future__ import annotations

import pytest

from airflow_bottledwater import errors
from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.spark.error_codec import Failure, PackedError, pack, received, returned, unpack


@pytest.mark.parametrize(
    "error",
    [
        errors.Outage("The broker is away.", "Wait."),
        errors.Refused("No “rights”\nat all", "Grant them: [to whom]"),
        errors.TakenOver("Another job has it."),
        errors.StateError("Gone.", ""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_found_in_the_text_that_spark_makes_of_it(error: BottledWaterError) -> None:
    text = f"py4j.Py4JJavaError: … Traceback:\n  PackedError: {pack(error)}\n\tat org.apache.spark …"
    found = unpack(text)
    assert type(found) is type(error)
    assert found is not None and (found.what, found.remedy) == (error.what, error.remedy)


def test_a_record_error_keeps_where_it_was() -> None:
    found = unpack(str(pack(errors.RecordError("Too large.", "Raise it.", position="0/1", topic="shop.a"))))
    assert isinstance(found, errors.RecordError)
    assert (found.position, found.topic) == ("0/1", "shop.a")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # made with other arguments than text and remedy: what they mean for whoever starts the job stays
        (errors.Interrupted(15), errors.Outage),
        (errors.PreflightError(["wal_level is replica"]), BottledWaterError),
        (errors.SettingError("slot", "X", "a to z"), BottledWaterError),
    ],
    ids=["Interrupted", "PreflightError", "SettingError"],
)
def test_an_error_with_other_arguments_keeps_its_text(error: BottledWaterError, kind: type) -> None:
    found = unpack(str(pack(error)))
    assert type(found) is kind
    assert found is not None and found.what == error.what


def test_an_error_of_a_newer_version_is_one_of_ours_still() -> None:
    class Unheard(BottledWaterError):
        """Not in this version's errors."""

    found = unpack(str(pack(Unheard("It happened.", "Do it."))))
    assert type(found) is BottledWaterError and found.what == "It happened."


def test_text_without_a_token_carries_nothing() -> None:
    assert unpack("java.lang.OutOfMemoryError") is None


def test_a_task_whose_snapshot_was_given_up_is_not_started_again() -> None:
    def ended() -> None:
        raise errors.HolderEnded("The session that holds the snapshot has ended.", "Run it again.")

    with pytest.raises(errors.HolderEnded, match="Run it again"):
        received(returned(ended))


def test_what_passes_is_raised_so_that_spark_starts_the_task_again() -> None:
    def away() -> None:
        raise errors.Outage("The broker is away.")

    with pytest.raises(PackedError, match="The broker is away"):
        returned(away)


def test_what_does_not_pass_is_the_tasks_result_and_raised_in_the_driver() -> None:
    def taken() -> None:
        raise errors.TakenOver("Another job has it.")

    result = returned(taken)
    assert isinstance(result, Failure)
    with pytest.raises(errors.TakenOver, match="Another job has it"):
        received(result)


def test_a_bug_is_no_error_of_ours_and_passes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        returned(lambda: 1 // 0)


def test_a_result_is_a_result() -> None:
    assert received(returned(lambda: {"rows": 7})) == {"rows": 7}


def test_of_an_error_that_quotes_another_the_outer_one_comes_out() -> None:
    inner = pack(errors.Outage("The broker is away."))
    found = unpack(str(pack(errors.Refused(f"The lane ended: {inner}"))))
    assert type(found) is errors.Refused


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_a_token_that_was_cut_carries_nothing(cut: int) -> None:
    text = str(pack(errors.Outage("The broker is away.", "Wait."))).rstrip("]")
    assert unpack(text[:-cut]) is None
    assert unpack("quoted: bottledwater-error:abc") is None
