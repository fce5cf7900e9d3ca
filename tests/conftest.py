"""Prepares the tier before any test module can start a JAX backend, and collects the tests that belong to it."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import zlib

import jax
import pytest
import testing  # noqa: F401  starts the backend of the tier
import tier

tier.check_installation()

# Some tests run themselves in processes of their own, which find the helpers there.
HELPERS = str(pathlib.Path(__file__).with_name("helpers"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))

# Linux gives a process 65530 mappings by default, of which every program of XLA has some; without one more XLA crashes.
MAX_MAPPINGS = 30_000
MAPPINGS = pathlib.Path("/proc/self/maps")

_OF_TIER = set(tier.suites())
collect_ignore = [str(path) for path in tier.FOLDER.glob("*/*_test.py") if path not in _OF_TIER]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped test is a failure")
    parser.addoption(
        "--twentieth-of-cases",
        type=int,
        choices=range(20),
        help="of the slow tests in `tier.REPETITIONS`, runs this twentieth only, and half of `tier.PROGRAMS`",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that `tier.only_on_cpu` and `tier.needs_gpus` mark for other tiers. Marks slow tests.

    Nodes' names and order choose parts, so that every worker of pytest-xdist chooses the same.
    """
    if [config.invocation_params.dir / argument for argument in config.args] == [tier.FOLDER]:
        tier.all_tests = [item.nodeid.removeprefix("tests/") for item in items]
    of_tier, others = [], []
    twentieth = config.option.twentieth_of_cases
    program = itertools.count()
    # The longest tests come first, so that no worker waits for one at the end.
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/processes/", "tests/tools/")))
    for item in items:
        parts = getattr(item, "function", None), getattr(item, "cls", None)
        name = item.nodeid.removeprefix("tests/")
        is_chosen = tier.is_collected(*parts)
        if tier.slow_pattern(name):
            item.add_marker("slow")
            if twentieth is not None and name.startswith(tier.REPETITIONS):
                is_chosen = is_chosen and zlib.crc32(name.encode()) % 20 == twentieth
            elif twentieth is not None and name.startswith(tier.PROGRAMS):
                is_chosen = is_chosen and next(program) % 2 == twentieth % 2
        (of_tier if is_chosen else others).append(item)
    if others:
        items[:] = of_tier
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled programs between suites if the process has many mappings."""
    if nextitem is None or nextitem.path == item.path or not MAPPINGS.exists():
        return
    if MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Makes skipped tests a failure under --fail-on-skip."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and session.config.option.fail_on_skip and reporter.stats.get("skipped"):
        reporter.write_line("\nTests were skipped, and --fail-on-skip forbids it.", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
