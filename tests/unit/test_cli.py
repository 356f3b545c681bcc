"""The command's options, exit codes and messages; what it does is proven on real servers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from airflow_bottledwater import cli, processes
from airflow_bottledwater.cli import jobs, report
from airflow_bottledwater.cli.options import spark_of
from airflow_bottledwater.errors import BottledWaterError, Refused, SettingError, StateError
from airflow_bottledwater.jobs.status import PipelineReport, TableReport
from airflow_bottledwater.jobs.supervise import LOG, LogReader
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.state import saved
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import SAVED_SETTINGS, SavedSettings
from tests.support.status import status_of

ROOT = Path(__file__).parents[2]
REQUIRED = ["--postgres", "host=db dbname=shop"]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Pipelines that a run was started with, in place of running it."""
    found: list[Settings] = []
    monkeypatch.setattr(jobs, "run", lambda pipeline, *_: found.append(pipeline))
    return found


def _invoke(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(cli.cli, list(arguments))
    return result.exit_code, result.output, result.exception


def test_the_defaults_are_those_of_bottled_water(chosen: list[Settings]) -> None:
    assert _invoke(*REQUIRED)[0] == 0
    (pipeline,) = chosen
    assert (pipeline.slot, pipeline.format, pipeline.on_error) == ("bottledwater", "avro", "exit")
    assert pipeline.kafka == {"bootstrap.servers": "localhost:9092"}
    assert pipeline.registry == {"url": "http://localhost:8081"}


def test_every_short_option_of_the_original_is_there(chosen: list[Settings]) -> None:
    code, output, _ = _invoke(
        "-d", "host=db", "-s", "s1", "-b", "k:1", "-f", "json", "-u", "-p", "pre", "-e", "log", "-x",
        "-C", "linger.ms=7", "-T", "retention.ms=9", "-o", "shop", "-i", "a,b.*",
    )  # fmt: skip
    assert code == 0, output
    (pipeline,) = chosen
    assert pipeline.slot == "s1"
    assert pipeline.kafka == {"bootstrap.servers": "k:1", "linger.ms": "7"}
    assert pipeline.topic_config == {"retention.ms": "9"}
    assert (pipeline.schemas, pipeline.tables) == (("shop",), ("a", "b.*"))
    assert pipeline.allow_unkeyed
    assert pipeline.skip_snapshot
    assert (pipeline.topic_prefix, pipeline.on_error) == ("pre", "log")


def test_help_and_version_exit_with_0() -> None:
    assert _invoke("--help")[0] == 0
    assert _invoke("-h")[0] == 0
    assert _invoke("--version")[0] == 0


def test_an_option_of_a_setting_says_what_the_setting_says() -> None:
    options = {option.name: option.help for option in cli.cli.params if isinstance(option, click.Option)}
    of_settings = sorted(set(options) & set(SETTINGS))
    assert of_settings == [
        "allow_unkeyed", "format", "on_error", "postgres", "schemas", "skip_snapshot", "slot", "tables",
        "topic_config", "topic_prefix",
    ]  # fmt: skip
    for name in of_settings:
        assert (options[name] or "").startswith(SETTINGS[name].sentence.removesuffix("."))
    assert options["on_error"] == f"{SETTINGS['on_error'].sentence}  [exit or log or isolate; default: exit]"
    assert options["tables"] == f"{SETTINGS['tables'].sentence}  [comma-separated; default: all]"
    assert all(options.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--postgres is required"),
        ([*REQUIRED, "surplus"], "No such command"),
        ([*REQUIRED, "--bogus"], "No such option"),
        (["--postgres"], "requires an argument"),
        ([*REQUIRED, "-C", "novalue"], 'Expected configuration in the form property=value, not "novalue"'),
        (
            [*REQUIRED, "-f", "json", "-r", "http://r"],
            "Specifying --schema-registry doesn't make sense for --format=json",
        ),
        (["metrics", "--listen", "127.0.0.1:99999"], "--listen must be ADDRESS:PORT"),
        (["metrics", "--listen", "127.0.0.1:²"], "--listen must be ADDRESS:PORT"),
        (["metrics", "--interval", "inf"], "inf is not in the range"),
        (["stop", *REQUIRED, "--timeout", "nan"], "'nan' is not a finite number"),
        (["snapshot", *REQUIRED, "--tables", "a", "--rows-per-second", "inf"], "'inf' is not a finite number"),
    ],
)
def test_bad_usage_exits_with_1_and_says_what(arguments: list[str], message: str, chosen: list[Settings]) -> None:
    code, output, _ = _invoke(*arguments)
    assert code == 1
    assert message in output
    assert chosen == []


def test_an_address_that_is_none_is_refused() -> None:
    _, _, error = _invoke("metrics", "--listen", f"{'a' * 64}.example:9187")
    assert isinstance(error, Refused) and "it is no address. Choose another with --listen." in str(error)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--format", "xml"], "format"),
        (["--format", "avr0", "-r", "http://r"], "format"),
        (["--on-error", "ignore"], "on_error"),
        (["--slot", "Upper"], "slot"),
        (["--set", "lanes=0"], "lanes"),
        (["--set", "nonsense=1"], "nonsense"),
    ],
)
def test_an_invalid_value_names_setting_value_and_what_is_allowed(arguments: list[str], setting: str) -> None:
    _, _, error = _invoke(*REQUIRED, *arguments)
    assert isinstance(error, SettingError)
    assert error.setting == setting
    assert "Allowed:" in str(error)


#: as arguments can be: bytes that are no text, too, but no NUL
ARGUMENT = st.binary(max_size=20).map(lambda value: os.fsdecode(value.replace(b"\0", b"")))


@settings(max_examples=100)
@given(st.data())
def test_no_value_of_an_option_is_a_fault_of_the_program(data: st.DataObject) -> None:
    options = [each for each in cli.cli.params if isinstance(each, click.Option) and not each.is_flag]
    arguments = list(REQUIRED)
    for option in data.draw(st.lists(st.sampled_from(options), max_size=3)):
        setting = SETTINGS.get(option.name or "")
        names = st.sampled_from(sorted(SETTINGS)) if option.name == "settings" else ARGUMENT
        value = ARGUMENT | st.sampled_from(["nan", "inf", "-1", "1e999", "true", "{{ x }}", "a=b", "http://[", "["])
        if option.multiple:
            value = st.builds("{}={}".format, names, value)
        elif setting is not None and setting.type is Literal:
            value |= st.sampled_from(setting.allowed.split(" or "))
        arguments += [option.opts[-1], data.draw(value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "run", lambda *_: None)
        _, output, error = _invoke(*arguments)
    assert error is None or isinstance(error, SystemExit | BottledWaterError), (arguments, output, error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--postgres", "host=db password=Ma9ker"],
        ["--postgres", "postgresql://u:Ma9ker@db/shop"],
        [*REQUIRED, "-C", "sasl.password=Ma9ker"],
        [*REQUIRED, "-C", "ssl.key.pem=Ma9ker"],
        [*REQUIRED, "-C", "sasl.oauthbearer.assertion.private.key.passphrase=Ma9ker"],
        [*REQUIRED, "-C", "sasl.oauthbearer.assertion.private.key.pem=Ma9ker"],
        [*REQUIRED, "-C", "sasl.oauthbearer.config=clientSecret=Ma9ker"],
        [*REQUIRED, "-r", "http://u:Ma9ker@registry"],
    ],
)
def test_a_password_in_an_argument_is_refused_unless_forced_and_never_repeated(
    arguments: list[str], chosen: list[Settings]
) -> None:
    _, output, error = _invoke(*arguments)
    assert isinstance(error, SettingError)
    assert re.fullmatch(
        r"Setting '\w+' must not have (a password|the secret \S+) on the command line, where other users can see it\. "
        r"Allowed: .*--config, or the option --allow-password-argument\.",
        str(error),
    )
    assert "Ma9ker" not in f"{error}{output}"
    assert chosen == []
    assert _invoke(*arguments, "--allow-password-argument")[0] == 0
    assert len(chosen) == 1


@pytest.mark.parametrize(
    "option", [["-s", "shop"], ["--slot", "shop"], ["-c", "shop.yaml"], ["-C", "a=b"], ["--bounded"]]
)
def test_an_option_before_a_subcommand_is_refused(option: list[str]) -> None:
    """It would not reach the subcommand, which would drop the slot of the default name, say."""
    for subcommand in ("drop-slot", "stop", "redrive", "snapshot", "status"):
        code, output, _ = _invoke(*option, subcommand, *REQUIRED)
        assert code == 1 and f"behind '{subcommand}'" in output, output
    assert _invoke("--log-format", "json", "drop-slot", "--help")[0] == 0


def test_a_subcommand_that_is_interrupted_is_not_a_failure_for_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("airflow_bottledwater.provision.redrive.redrive", interrupt)
    monkeypatch.setattr("airflow_bottledwater.state.saved.completed", lambda pipeline, *_, **__: pipeline)
    monkeypatch.setattr("sys.argv", ["bottledwater", "redrive", *REQUIRED])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 75
    monkeypatch.setattr("sys.argv", ["bottledwater", "redrive", "--bogus"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1 and "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["redrive", "dismiss"])
def test_dead_letters_are_dealt_with_by_the_settings_of_the_last_start(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    pipelines: list[Settings] = []

    def done(pipeline: Settings, *_: object) -> redrive.RedriveResult:
        pipelines.append(pipeline)
        return redrive.RedriveResult()

    monkeypatch.setattr(redrive, command, done)
    monkeypatch.setattr(
        "airflow_bottledwater.state.saved.completed", lambda found, *_, **__: found.with_(format="json")
    )
    assert _invoke(command, *REQUIRED)[0] == 0
    assert [each.format for each in pipelines] == ["json"]


def test_a_choice_of_dead_letters_that_is_empty_is_not_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[Any] = []
    monkeypatch.setattr(redrive, "dismiss", lambda _, tables: given_up.append(tables) or redrive.RedriveResult())
    monkeypatch.setattr("airflow_bottledwater.state.saved.completed", lambda found, *_, **__: found)
    assert _invoke("dismiss", *REQUIRED, "--tables", "")[0] == 1 and given_up == []
    assert _invoke("dismiss", *REQUIRED)[0] == 0 and _invoke("dismiss", *REQUIRED, "--tables", "a,b")[0] == 0
    assert given_up == [[], ["a", "b"]]


def test_a_file_may_leave_settings_to_the_saved_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def completed(pipeline: Settings, given: Any, *, exists: bool = False) -> Settings:
        asked.append((set(given) & {"tables", "on_error"}, exists))
        return pipeline.with_(tables=("a",))

    monkeypatch.setattr("airflow_bottledwater.state.saved.completed", completed)
    monkeypatch.setattr("airflow_bottledwater.cli.jobs.run", lambda pipeline, *_: asked.append(pipeline.tables))
    file = tmp_path / "bw.yaml"
    file.write_text("name: shop\nsaved: true\nsource: {dsn: host=db}\non_error: exit\n")
    assert _invoke("-c", str(file))[0] == 0
    assert asked == [({"on_error"}, True), ("a",)]
    # these need none: a cluster that is gone has no state of its own, and a probe has a timeout of its own
    monkeypatch.setattr("airflow_bottledwater.provision.drop.forget", lambda pipeline, _: "forgotten")
    monkeypatch.setattr("airflow_bottledwater.cli.probe.answer", lambda *_, **__: None)
    assert _invoke("drop-slot", "-c", str(file), "--forget-cluster", "71/a/b")[:2] == (0, "forgotten\n")
    assert _invoke("status", "-c", str(file), "--check")[0] == 0 and len(asked) == 2


def test_saved_settings_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PipelineState({SAVED_SETTINGS: {"values": {"format": "json", "colour": "red"}}})
    monkeypatch.setattr(saved, "session", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(saved, "identify", lambda _: None)
    monkeypatch.setattr(saved, "read_own", lambda *_: state)
    code, _, error = _invoke("redrive", *REQUIRED)
    assert code == 1 and isinstance(error, StateError) and "'colour', which this version does not know" in str(error)
    # as it says: a start with all settings leaves none of them
    (record,) = saved.changed(Settings(postgres="host=db", slot="shop", format="json"), state).values()
    assert record == SavedSettings({"slot": "shop", "format": "json"})


@pytest.mark.parametrize("text", ["host=db password=Ma9ker horse battery", "host=db port=Ma9ker"])
def test_a_probe_shows_nothing_of_a_password_that_is_not_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "bw.yaml"
    file.write_text(f"source: {{dsn: {text}}}\n")
    code, output, error = _invoke("status", "--check", "-c", str(file), "--timeout", "1")
    said = f"{output}{error}{caplog.text}"
    assert code == 1 and "connection string is not valid" in said
    assert "Ma9ker" not in said and "horse" not in said


def test_the_command_line_wins_over_the_file(tmp_path: Path, chosen: list[Settings]) -> None:
    file = tmp_path / "bw.yaml"
    file.write_text(
        "name: from_file\nsource: {dsn: host=db password=secret, tables: [a, b]}\n"
        "kafka:\n  topic_prefix: f\n  properties: {bootstrap.servers: 'k:1', sasl.password: secret}\n"
        "  registry_properties: {url: 'http://r'}\n"
        "spark: {master: 'local[3]', conf: {a: 1, b: 2}}\n"
    )
    code, output, error = _invoke("-c", str(file), "-s", "from_line")
    assert code == 0, (output, error)
    (pipeline,) = chosen
    assert (pipeline.slot, pipeline.topic_prefix, pipeline.tables) == ("from_line", "f", ("a", "b"))
    assert spark_of(file, None, {"b": "3"}) == ("local[3]", {"a": "1", "b": "3"})
    assert spark_of(file, "yarn", {})[0] == "yarn"
    assert spark_of(None, None, {}) == ("local[*]", {})
    assert pipeline.kafka == {"bootstrap.servers": "k:1", "sasl.password": "secret"}
    assert pipeline.registry == {"url": "http://r"}


#: the pipeline's file of the README
README = re.search(r"```yaml\n(name: shop\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("more", "setting", "instead"),
    [
        ([], "kafka.conn_id", "kafka.properties with bootstrap.servers, or the option --broker"),
        (["-C", "linger.ms=5"], "kafka.conn_id", "kafka.properties with bootstrap.servers, or the option --broker"),
        (["-b", "k:1"], "kafka.registry", "kafka.registry_properties with url, or the option --schema-registry"),
    ],
)
def test_what_a_file_leaves_to_airflow_is_not_taken_from_this_host(
    tmp_path: Path, chosen: list[Settings], more: list[str], setting: str, instead: str
) -> None:
    assert README is not None
    file = tmp_path / "shop.yaml"
    file.write_text(README[1])
    _, _, error = _invoke("-c", str(file), *REQUIRED, *more)
    assert str(error) == (
        f"{file}: setting {setting!r} names a connection of Airflow, and the command has none. Allowed: {instead}."
    )
    assert chosen == []
    assert _invoke("-c", str(file), *REQUIRED, "-b", "k:1", "-r", "http://r")[0] == 0
    assert _invoke("-c", str(file), *REQUIRED, "-C", "bootstrap.servers=k:1", "-f", "json")[0] == 0
    assert [each.kafka["bootstrap.servers"] for each in chosen] == ["k:1", "k:1"]
    if setting == "kafka.conn_id":
        assert isinstance(_invoke("metrics", "-c", str(file), *more)[2], SettingError)


def test_our_errors_are_a_line_on_standard_error_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["bottledwater", *REQUIRED, "--slot", "Upper"])
    with caplog.at_level(logging.CRITICAL), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "Setting 'slot' cannot be 'Upper'" in caplog.text


def test_a_setting_with_an_option_of_its_own_is_not_silently_dropped() -> None:
    _, _, error = _invoke(*REQUIRED, "--set", "kafka=x")
    assert isinstance(error, SettingError)
    assert str(error).startswith("Setting 'kafka' cannot be given with --set. Allowed: ")
    for nested in ("messages=a=b", "table_options={}"):
        _, _, error = _invoke(*REQUIRED, "--set", nested)
        assert isinstance(error, SettingError) and "Allowed: the file of --config" in str(error)
    _, _, error = _invoke(*REQUIRED, "--set", "hash_key=0123456789abc key")
    assert isinstance(error, SettingError) and "hash_key_file" in str(error) and "0123456789abc key" not in str(error)


# ------------------------------------------------------------------ what is shown


def test_a_jobs_own_lines_are_shown_at_their_levels_with_their_tracebacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOG).write_text(
        "WARNING: of the JVM\n"
        "26/11/22 09:09:14 WARN Utils: Spark INFO of its own\n"
        "\tat org.apache.spark.util.Utils\n"
        "2026-11-22 09:09:14,123 INFO Read [public.a] INFO\n"
        "2026-11-22 09:09:15,000 ERROR The job failed.\n"
        "Traceback (most recent call last):\n"
        "KeyError: 'x'\n"
        "2026-11-22 09:09:16,999 ERROR Outage: Kafka is away.\n"
    )
    reader = LogReader(tmp_path)
    with caplog.at_level(logging.INFO):
        assert jobs._show(reader)
        assert not jobs._show(reader)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "Read [public.a] INFO"),
        ("ERROR", "The job failed.\nTraceback (most recent call last):\nKeyError: 'x'"),
        ("ERROR", "Outage: Kafka is away."),
    ]


SLOT = SlotState("shop", "pgoutput", "logical", "db", None, 0x1_0000_0010, "reserved", 1234, 5678, None)
REPORT = PipelineReport(
    open_letters={"public.t": {"snapshot": 2, "live": 1}},
    name="shop",
    database="db",
    slot=SLOT,
    consistent_point="0/10",
    position="",
    counters={},
    complete=True,
    tables=[TableReport("public.[a]", "a", "1:2:", "0/10", False, "1/1", 9, True)],
    job=status_of("running", epoch=3, counters={"published": 12345}, error="[x] is away", at=time.time()),
)


def test_the_status_is_shown_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert REPORT.job is not None
    job = replace(REPORT.job, at=time.time(), lag=5_000_000, delay=90.0)
    report.show(replace(REPORT, job=job), Console(markup=False, width=120))
    shown = capsys.readouterr().out
    assert "Pipeline shop of database db" in shown
    assert re.search(
        r"Slot +1\.2 kB behind; PostgreSQL keeps 5\.7 kB of WAL \(reserved\)\n", shown.replace(" \n", "\n")
    )
    assert re.search(r"Job +stream job running, reported [\d.]+ m?s ago by process \d+ on h", shown)
    assert re.search(r"Behind +5\.0 MB and 90 s, as the job has measured", shown)
    assert re.search(r"Last error +\[x\] is away", shown)
    assert re.search(r"Published +12,345 records", shown)
    assert re.search(r"Position +none: nothing was streamed yet", shown)
    assert re.search(r"public\.\[a\] +│ a +│ complete +│ +9", shown)
    assert re.search(r"Dead letters +public\.t: 1 of live snapshots, 2 of the snapshot, open", shown)
    # nothing of Python's, and no words of our own
    assert not re.search(r"[{}]|epoch|boundary|1:2:", shown)


def test_the_status_of_a_pipeline_that_has_not_begun_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = replace(REPORT, slot=None, job=None, tables=[], complete=False)
    report.show(nothing, Console(width=120))
    shown = capsys.readouterr().out
    assert re.search(r"Slot +there is none", shown) and re.search(r"Job +none has ever reported", shown)
    assert (nothing.as_json()["slot"], nothing.as_json()["job"]) == (None, None)


def test_the_problems_of_a_job_that_has_ended_are_shown_only_of_a_bounded_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for state, shown in (("streaming", True), ("finished", True), ("stopped", False), ("failed", False)):
        job = status_of(state, at=time.time(), problems=[Problem("throttled", "public.t", "The broker is slow.")])
        report.show(replace(REPORT, job=job), Console(width=160))
        assert ("The broker is slow." in capsys.readouterr().out) == shown, state


def test_the_status_shows_a_job_that_has_died(capsys: pytest.CaptureFixture[str]) -> None:
    silent = status_of("streaming", at=time.time() - 400)
    report.show(replace(REPORT, job=silent), Console(width=160))
    assert re.search(r"Job +has not reported for 7 min: it was killed, or hangs", capsys.readouterr().out)


def test_the_status_is_json_for_programs() -> None:
    found = json.loads(json.dumps(REPORT.as_json()))
    assert found["slot"]["confirmed"] == "1/10"
    assert found["slot"]["lag"] == 1234
    assert found["job"]["state"] == "running"
    assert found["tables"][0]["rows"] == 9


# ------------------------------------------------------------------ signals, with a job that waits in place of Spark's
_COMMAND = """
import signal, sys
# under nohup, or behind a shell's &, they would be ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from airflow_bottledwater import cli
from airflow_bottledwater.jobs import submit
import airflow_bottledwater.provision.create as creation
import airflow_bottledwater.jobs.status as status

creation.create = lambda *_, **__: None
status.snapshot_is_complete = lambda pipeline: True
submit.command = lambda *_, **__: [sys.executable, "-m", "tests.support.stand_in"]
cli.main()
"""


def _until(found: Callable[[], object], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("signum", "to", "code"),
    [
        (signal.SIGINT, "command", 0),
        (signal.SIGTERM, "command", 0),
        # the terminal was closed
        (signal.SIGHUP, "command", 0),
        (signal.SIGKILL, "command", -9),
        # a service manager signals all of its processes
        (signal.SIGTERM, "both", 0),
        # nobody asked the command
        (signal.SIGTERM, "driver", 75),
        (signal.SIGHUP, "driver", 75),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_signal_leaves_neither_a_job_nor_its_secrets(
    tmp_path: Path, signum: signal.Signals, to: str, code: int
) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *REQUIRED, "-f", "json"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    _until(lambda: list(tmp_path.glob("*/driver.json")))
    (folder,) = (path.parent for path in tmp_path.glob("*/driver.json"))
    assert list(folder.glob("pipeline-*.json"))
    supervisor = json.loads((folder / "supervisor.json").read_text())
    members = processes.family(supervisor["pid"])
    driver = json.loads((folder / "driver.json").read_text())["pid"]
    for pid in {"command": [command.pid], "driver": [driver], "both": [driver, command.pid]}[to]:
        os.kill(pid, signum)
    output = command.communicate(timeout=60)[0].decode()
    assert command.returncode == code, output
    assert (f"{signum.name} from outside" in output) == (code == 75)
    _until(lambda: not processes.alive(members))
    _until(lambda: not folder.exists())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, 2])
def test_a_command_that_cannot_make_what_is_missing_leaves_no_job(tmp_path: Path, seconds: int) -> None:
    """Spark starts meanwhile."""
    refusing = (
        "import time\nfrom airflow_bottledwater.errors import Refused\n"
        f"def refuse(*_, **__):\n    time.sleep({seconds})\n    raise Refused('There is no such table.', 'Make it.')\n"
        "creation.create = refuse"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", _COMMAND.replace("creation.create = lambda *_, **__: None", refusing), *REQUIRED],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = command.communicate(timeout=60)[0].decode()
    assert command.returncode == 1
    assert "There is no such table. Make it." in output
    assert _mentioning(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("to", "code"), [("command", 0), ("driver", 75)])
def test_a_lost_reader_of_the_log_changes_nothing(tmp_path: Path, to: str, code: int) -> None:
    """``bottledwater … 2>&1 | tee log``, whose reader has died, or gets the same Ctrl-C."""
    reader, writer = os.pipe()
    os.close(reader)
    command = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *REQUIRED, "-f", "json"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    _until(lambda: list(tmp_path.glob("*/driver.json")) or command.poll() is not None)
    assert command.poll() is None
    (driver,) = (json.loads(path.read_text())["pid"] for path in tmp_path.glob("*/driver.json"))
    os.kill({"command": command.pid, "driver": driver}[to], signal.SIGTERM)
    assert command.wait(60) == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", ["log.info('Ended.')", "say('Dropped.')", "raise Outage('Kafka is away.')"])
def test_a_reader_that_is_lost_in_the_end_does_not_change_the_exit_code(last: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "import click, logging, sys\nfrom airflow_bottledwater import cli\n"
        "from airflow_bottledwater.cli.log import say\nfrom airflow_bottledwater.errors import Outage\n"
        f"log = logging.getLogger('bottledwater')\n@cli.cli.command('last')\ndef last():\n    {last}\n"
        "sys.argv = ['bottledwater', 'last']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == (75 if "Outage" in last else 0)


def test_a_log_that_is_closed_does_not_change_the_exit_code() -> None:
    code = "import sys\nfrom airflow_bottledwater import cli\nsys.argv = ['bottledwater', '--version']\ncli.main()"
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code], stdout=subprocess.PIPE, check=False
    )
    assert closed.returncode == 0 and b"version" in closed.stdout


def test_the_first_process_of_a_container_ends_by_a_signal() -> None:
    """It has to have a handler: the kernel does nothing else for it."""
    code = (
        "import os, signal, sys\nfrom airflow_bottledwater import cli\nprocess, os.getpid = os.getpid(), lambda: 1\n"
        "cli.cli.command('last')(lambda: os.kill(process, signal.SIGTERM))\nsys.argv = ['bottledwater', 'last']\n"
        "cli.main()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 128 + signal.SIGTERM


def _mentioning(folder: Path) -> list[str]:
    """The processes that have the folder in their environment: as that for temporary files, or as a job's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue  # it is gone, or another user's
    return found


def test_a_command_that_ignores_hang_ups_goes_on_ignoring_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nohup`` says so before it starts us."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def over(*_: object, **__: object) -> bool:
        raise SettingError("position", "", "")

    monkeypatch.setattr("airflow_bottledwater.jobs.supervise.start", lambda *_, **__: None)
    monkeypatch.setattr("airflow_bottledwater.provision.create.create", over)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert isinstance(_invoke(*REQUIRED)[2], SettingError)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
