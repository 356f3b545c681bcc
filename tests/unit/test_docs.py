"""The documentation says what the code does, as far as a program can tell."""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from click.exceptions import Exit

import airflow_bottledwater
from airflow_bottledwater import cli, errors
from airflow_bottledwater.encoding import types
from airflow_bottledwater.errors import BottledWaterError, SettingError
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.pipeline.description import Schedules, Spark
from airflow_bottledwater.pipeline.groups import DEFAULT_BROKER, DEFAULT_REGISTRY
from airflow_bottledwater.pipeline.settings import GROUPS, SETTINGS, Settings
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.policy import ERROR_ACTIONS, act
from tests.unit.test_examples import parsed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS_PAGE, ERRORS, FORMAT = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("settings", "errors", "message-format")
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def rows(text: str, columns: int) -> list[list[str]]:
    """The rows of a page's tables that have so many columns."""
    found = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    return [row for row in found if len(row) == columns]


# ---------------------------------------------------------------------- settings

DOCUMENTED = {
    row[0].strip("`"): row for row in rows(SETTINGS_PAGE.replace("|  |", "|   |"), 6) if row[0].startswith("`")
}


def shown(value: Any) -> str:
    """A default as the table has it."""
    if value in ("", (), {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def without_markup(text: str) -> str:
    """A cell without code marks, and with the texts of its links alone."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text.replace("`", ""))


def test_every_setting_is_documented_once_and_no_other() -> None:
    assert sorted(DOCUMENTED) == sorted(SETTINGS)
    assert all(SETTINGS_PAGE.count(f"\n| `{name}` |") == 1 for name in DOCUMENTED)


def test_the_groups_of_settings_are_the_pages_sections() -> None:
    sections = {
        section.partition("\n")[0]: re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        for section in SETTINGS_PAGE.split("\n## ")[1:]
    }
    documented = [(heading, names) for heading, names in sections.items() if names]
    # a group's documentation begins with the heading
    assert documented == [((group.__doc__ or "").partition(".")[0], list(group.__annotations__)) for group in GROUPS]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_settings_default_is_the_codes(name: str) -> None:
    special = {
        "postgres": "required",
        "kafka": f"`bootstrap.servers={DEFAULT_BROKER}`",
        "registry": f"`url={DEFAULT_REGISTRY}`",
    }
    expected = special.get(name) or shown(getattr(Settings(postgres="host=db"), name))
    assert DOCUMENTED[name][1] == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_allowed_is_in_the_codes_words(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.of(**{"postgres": "host=db", name: object()})
    assert DOCUMENTED[name][2] == caught.value.allowed


@pytest.mark.parametrize("name", SETTINGS)
def test_when_a_setting_may_change_is_in_the_codes_words(name: str) -> None:
    assert DOCUMENTED[name][3] == SETTINGS[name].changes


@pytest.mark.parametrize("name", SETTINGS)
def test_a_settings_meaning_begins_with_the_codes_sentence(name: str) -> None:
    meaning, sentence = without_markup(DOCUMENTED[name][5]), SETTINGS[name].sentence
    assert meaning == sentence or meaning.startswith(f"{sentence} ")


def test_every_key_of_where_and_when_jobs_run_is_documented_as_it_is() -> None:
    documented = {row[0].strip("`"): row for row in rows(SETTINGS_PAGE.replace("|  |", "|   |"), 4) if "`" in row[0]}
    described = {each.name: each for part in (Spark, Schedules) for each in part.described().values()}
    assert list(documented) == list(described)
    for name, key in described.items():
        _, default, allowed, meaning = documented[name]
        assert (default, allowed) == (shown(key.default), key.allowed), name
        assert meaning == key.sentence or meaning.startswith(f"{key.sentence} "), name


OPTIONS = {
    row[0].strip("`"): row
    for row in rows((ROOT / "docs" / "choose.md").read_text().replace("|  |", "|   |"), 5)
    if row[0].startswith("`")
}


def test_every_option_of_a_table_is_documented_as_it_is() -> None:
    described = Table.described()
    assert list(OPTIONS) == list(described)
    for name, option in described.items():
        _, default, allowed, changes, meaning = OPTIONS[name]
        assert (default.strip(), allowed, changes) == (shown(option.default), option.allowed, option.changes), name
        assert meaning == option.sentence or meaning.startswith(f"{option.sentence} "), name


def test_the_settings_options_exist_and_all_options_are_documented() -> None:
    options = {option for parameter in cli.cli.params for option in parameter.opts if option.startswith("--")}
    named = {option for row in DOCUMENTED.values() for option in re.findall(r"--[a-z-]+", row[4])}
    assert named <= options
    # all that describe a pipeline; the rest is of a run or of the command
    assert options - named == {
        "--config", "--allow-password-argument", "--set", "--master", "--spark-conf", "--bounded", "--version",
        "--assume-snapshot-complete", "--position", "--restart", "--log-format",
    }  # fmt: skip


# ---------------------------------------------------------------------- errors

CLASSES = [
    *(kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BottledWaterError)),
    NewProducerNeeded,
    RecordRefused,
]


def made(kind: type[BottledWaterError]) -> BottledWaterError:
    arguments: dict[type[BottledWaterError], tuple[Any, ...]] = {
        errors.SettingError: ("lanes", 0, "1 to 256"),
        errors.PreflightError: (["this"],),
        errors.Interrupted: (15,),
        RecordRefused: ("what", 0, 10),
    }
    return kind(*arguments.get(kind, ("what",)))


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_its_section(kind: type[BottledWaterError]) -> None:
    assert f"\n### {kind.__name__}\n" in ERRORS


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_done_about_an_error_is_what_the_policy_says(kind: type[BottledWaterError]) -> None:
    documented = {row[0].strip("`"): row[1] for row in rows(ERRORS, 3) if row[0].startswith("`")}
    assert documented[kind.__name__] == act(made(kind)).name


def test_no_error_is_documented_that_is_gone() -> None:
    assert set(re.findall(r"^### (\w+)$", ERRORS, re.MULTILINE)) == {kind.__name__ for kind in CLASSES}
    assert set(ERROR_ACTIONS) <= set(CLASSES)


# ---------------------------------------------------------------------- types

TYPES = {
    "boolean": 16, "bytea": 17, "name": 19, "bigint": 20, "smallint": 21, "integer": 23, "text": 25, "json": 114,
    "real": 700, "double precision": 701, "character(n)": 1042, "character varying": 1043, "date": 1082, "time": 1083,
    "timestamp": 1114, "timestamp with time zone": 1184, "numeric": 1700, "uuid": 2950, "jsonb": 3802, "oid": 26,
    "xid": 28, "cid": 29, "xid8": 5069, "money": 790, "interval": 1186, "time with time zone": 1266, "inet": 869,
    "cidr": 650, "refcursor": 1790, "xml": 142, "pg_node_tree": 194, "pg_ndistinct": 3361, "pg_dependencies": 3402,
    "pg_mcv_list": 5017, "pg_brin_bloom_summary": 4600, "pg_brin_minmax_multi_summary": 4601,
}  # fmt: skip
MAPPED = {
    name: row[1]
    for row in rows(FORMAT.partition("\n## Types\n")[2].partition("\n## ")[0], 4)
    for name in (row[0].split(", ") if "(p, s)" not in row[0] else [row[0]])
}


def avro_shown(schema: Any) -> str:
    """An Avro schema as the table has it."""
    if isinstance(schema, str):
        return f"`{schema}`"
    return f"`{schema['type']}` / `{schema.get('logicalType') or schema['namespace'] + '.' + schema['name']}`"


def column(oid: int, typmod: int = -1, kind: str = "b") -> ColumnType:
    return ColumnType(oid, typmod, oid, typmod, kind, "")


def test_the_type_table_has_the_types_of_the_code() -> None:
    assert set(TYPES.values()) == set(types.TABLE)
    documented = set(MAPPED) - {"PostgreSQL", "---"}
    extensions = {label for _, label in types.EXTENSIONS}
    made_of_others = {"an array", "a composite", "a range", "a multirange"}
    others = {"numeric(p, s)", "an enum", "regclass and its like", "every other type"}
    assert documented == {*TYPES, *extensions, *made_of_others, *others}


@pytest.mark.parametrize("name", TYPES)
def test_a_types_avro_schema_is_the_codes(name: str) -> None:
    assert MAPPED[name] == avro_shown(types.mapping(column(TYPES[name])).avro(column(TYPES[name])))


def test_so_are_those_of_the_other_rows() -> None:
    typmod = ((12 << 16) | 2) + 4
    assert MAPPED["numeric(p, s)"] == avro_shown(types.mapping(column(1700, typmod)).avro(column(1700, typmod)))
    assert MAPPED["an enum"] == avro_shown(types.mapping(column(99_999, kind="e")).avro(column(99_999)))
    assert MAPPED["an array"] == "`array`"
    assert MAPPED["every other type"] == avro_shown(types.TEXT.avro(column(99_999)))


# ---------------------------------------------------------------------- commands, links, pictures


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", without_code(text), re.MULTILINE):
        base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchor, n = base, 0
        while anchor in found:
            n += 1
            anchor = f"{base}-{n}"
        found.add(anchor)
    return found


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`]*`", "", without_code(page.read_text()))
    return [link for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_and_their_anchors_exist(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_links_in_messages_lead_to_sections_that_exist() -> None:
    sources = [path.read_text() for path in (ROOT / "airflow_bottledwater").rglob("*.py")]
    named = {found for text in sources for found in re.findall(r"\{DOCS\}([\w-]+)\.html#([\w-]+)", text)}
    assert named
    assert [link for link in named if link[1] not in anchors((ROOT / "docs" / f"{link[0]}.md").read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_pictures_exist(page: Path) -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    assert [name for name in pictures if not (page.parent / name).exists()] == []


def test_the_classes_of_the_readmes_table_are_the_packages() -> None:
    """All are in airflow_bottledwater, it says."""
    section = re.search(r"## Operators and sensors\n(.*?)\n## ", PAGES[0].read_text(), re.DOTALL)
    assert section is not None
    rows = [line.split("|")[1] for line in section[1].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row)}
    assert len(named) > 10 and named <= set(airflow_bottledwater.__all__)
    assert all(getattr(airflow_bottledwater, name) for name in airflow_bottledwater.__all__)


#: arguments that all of this package have, or those of Airflow
COMMON = {"self", "pipeline", "name", "group_id", "poke_interval"}


def test_the_arguments_of_the_readmes_table_are_the_classes() -> None:
    found = {row[0].strip("`"): row[2] for row in rows(PAGES[0].read_text(), 3) if re.match(r"`[A-Z]\w+`$", row[0])}
    assert len(found) > 10
    for name, cell in found.items():
        taken = inspect.signature(getattr(airflow_bottledwater, name).__init__).parameters.values()
        own = {each.name for each in taken if each.kind is not each.VAR_KEYWORD} - COMMON
        if cell.startswith("`"):
            named = set(re.findall(r"`([a-z_]+)`", cell))
            # a sensor's time-out is Airflow's; other names are values of an argument
            assert own - ({"timeout"} if name.endswith("Sensor") else set()) <= named, name
            assert named <= own or ": `" in cell, name


def test_every_page_is_linked_from_the_readme() -> None:
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= {link.partition("#")[0] for link in links(PAGES[0])}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ |=\S+ )make ([a-z-]+)", text)) <= targets


def commands(page: Path) -> list[list[str]]:
    """What a page tells to run: in its sentences, and in its blocks. An ellipsis there is for more of the same, or for
    a value."""
    text = page.read_text().replace("\\\n", " ")
    called = re.findall(r"(?<!`)`(bottledwater [a-z-][^`]*)`", without_code(text))
    called += re.findall(
        r"^(?:\$ )?(bottledwater [a-z-].*)", "\n".join(re.findall(r"```.*?```", text, re.DOTALL)), re.M
    )
    found = []
    for line in called:
        words = shlex.split(line, comments=True)
        found.append([each for before, each in pairwise(["", *words]) if each != "…" or before.startswith("-")])
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "connector.json").touch()
    for arguments in commands(page):
        with contextlib.suppress(click.MissingParameter, Exit):  # a sentence names the command only; --help
            parsed(arguments)


def test_most_subcommands_are_told_somewhere() -> None:
    assert isinstance(cli.cli, click.Group)
    told = {each[1] for page in PAGES for each in commands(page)}
    assert set(cli.cli.commands) <= told


#: folders of the package
ROOMS = sorted(path.parent.name for path in (ROOT / "airflow_bottledwater").glob("*/__init__.py"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_modules_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"\b(airflow_bottledwater(?:\.[a-z_]+)+)", text):
        base = ROOT / module.replace(".", "/")
        assert base.with_suffix(".py").exists() or base.is_dir(), module
    for file in re.findall(rf"`((?:{'|'.join(ROOMS)}|tests)/[\w/]+\.py)`", text):
        assert (ROOT / file).exists() or (ROOT / "airflow_bottledwater" / file).exists(), file
    for name in re.findall(rf"`((?:{'|'.join(ROOMS)})/[a-z_/]*[a-z_])`", text):
        found = ROOT / "airflow_bottledwater" / name
        assert found.with_suffix(".py").exists() or found.is_dir(), name


def test_the_tests_of_each_class_of_faults_are_there() -> None:
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| (`tests/[^|]+) \|$", (ROOT / "docs" / "development.md").read_text(), re.M)
    assert len(rows) == 7
    for row in rows:
        for file, names in re.findall(r"`(tests/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", row):
            text = (ROOT / file).read_text()
            for name in re.findall(r"\w+", names):
                assert f"def {name}(" in text, name
