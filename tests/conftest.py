"""What all tests share: fixtures, and one seed for all random values of a run."""

from __future__ import annotations

import random
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# the helpers' own asserts say what they compared, too
pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["tests.support.fixtures", "tests.support.clusters.fixtures"]

#: seconds of tests from which on the summary says which files take longest
_LONG = 300
_TESTS = Path(__file__).parent
_REGISTRY = pytest.StashKey[Any]()

# a first call compiles for seconds, and a shared machine is slow now and then: neither is a fault of the code
hypothesis.settings.register_profile(
    "bottledwater",
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    print_blob=True,
)
hypothesis.settings.load_profile("bottledwater")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for all random values of a run, the same in each of its processes."""
    # under nohup it is ignored, and so it would be by all commands that tests start and end by it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.option.hypothesis_seed is None:
        given = getattr(config, "workerinput", {})  # in a process of pytest-xdist, by its controller
        config.option.hypothesis_seed = given.get("seed") or str(random.randrange(1 << 24))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked ``some``, as many cases as that says are drawn by the seed; the others are long."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, found in cases.items():
        (count,) = found[0].get_closest_marker("some").args  # type: ignore[union-attr]
        dice = random.Random(f"{config.option.hypothesis_seed} {test}")
        for item in dice.sample(found, max(0, len(found) - count)):
            item.add_marker(pytest.mark.long)
    _draw_a_version(config, items)
    # files of unit tests, which compute, between those of integration tests, which wait; the slowest are before both
    place: dict[Path, float] = {}
    for kind in ("integration", "unit"):
        files = dict.fromkeys(item.path for item in items if item.path.is_relative_to(_TESTS / kind))
        place |= {file: (rank + 1) / len(files) for rank, file in enumerate(files)}
    items.sort(key=lambda item: place.get(item.path, 0.0))


def _draw_a_version(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests of each version of PostgreSQL, those of one that the seed draws are quick; the others are long."""
    from tests.support.fixtures import VERSIONS  # when the helpers' asserts can be rewritten

    drawn = random.Random(config.option.hypothesis_seed).choice(VERSIONS)
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("each_postgres", drawn) != drawn:
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Each process of pytest-xdist knows the seed, and where to ask for the registry that all have together."""
    from tests.support.shared_registry import SharedRegistry  # when the helpers' asserts can be rewritten

    config = node.config
    if _REGISTRY not in config.stash:
        config.stash[_REGISTRY] = SharedRegistry()
        config.add_cleanup(config.stash[_REGISTRY].stop)
    node.workerinput["seed"] = config.option.hypothesis_seed
    node.workerinput["registry"] = config.stash[_REGISTRY].url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With which it can be repeated; of a long run, too, which files take longest."""
    terminalreporter.write_line(f"random values: --hypothesis-seed={config.option.hypothesis_seed}")
    taken: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                taken[report.nodeid.partition("::")[0]] += report.duration
    if taken.total() > _LONG:
        terminalreporter.write_line(f"{taken.total():.0f} s of tests, of these:")
        for file, seconds in taken.most_common(20):
            terminalreporter.write_line(f"{seconds:6.0f} s  {file}")
